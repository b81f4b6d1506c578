"""The backends that can run here: the twin always; the kernel where its interpreter is on (or on a GPU)."""

import torch

from nanoragen.kernels.dispatch import interpreted, triton

BACKENDS = ["torch"] + (["triton"] if triton is not None and (interpreted() or torch.cuda.is_available()) else [])
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
