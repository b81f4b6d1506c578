"""Which of the two ways a call takes, and the one place where Triton is imported.

Triton is Linux-only and easily broken by a mismatched driver or torch. Without it everything works, on the twins in
reference.py, and says so once.
"""

import os
import warnings

try:
    import triton
    import triton.language as tl
except Exception as e:  # a broken Triton fails in many ways, none of which may take the package down
    triton = tl = None
    missing = e if not isinstance(e, ModuleNotFoundError) else None


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def use_triton(backend: str, tensor) -> bool:
    """True for the kernel, False for the twin. "auto": the kernel for CUDA tensors and under TRITON_INTERPRET=1."""
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend: {backend!r}; valid: auto, triton, torch")
    wanted = backend == "triton" or (backend == "auto" and (tensor.is_cuda or interpreted()))
    if wanted and triton is None:
        if backend == "triton":
            raise ValueError("backend: triton is not installed or does not import; valid: torch, or auto")
        warn_once()
        return False
    if backend == "triton" and not (tensor.is_cuda or interpreted()):
        raise ValueError(
            "backend: triton needs CUDA tensors, or TRITON_INTERPRET=1 set before the import; valid: torch, or auto"
        )
    return wanted


def warn_once(said=[]):  # the list is the memory
    if not said:
        said.append(True)
        warnings.warn("Triton is not available: the plain torch twins are used instead", stacklevel=3)


def jit(function):
    """triton.jit, or the function itself where there is no Triton (it is then never called)."""
    return triton.jit(function) if triton is not None else function
