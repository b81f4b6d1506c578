"""What the tests of this folder share: the backends that can run here, and what Triton would compile for a launch.

The twin runs always; the kernel where its interpreter is on, or on a GPU.
"""

import torch

from nanoragen.kernels.dispatch import interpreted, triton

BACKENDS = ["torch"] + (["triton"] if triton is not None and (interpreted() or torch.cuda.is_available()) else [])
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"


class Recorder:
    """In the place of a kernel: notes what Triton would compile for each launch, by its own rules, and runs nothing."""

    def __init__(self, kernel):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        self.bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
        self.versions = set()

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            _, specialization, options = self.bind(*args, **kwargs)
            self.versions.add(repr((specialization, options)))

        return launch
