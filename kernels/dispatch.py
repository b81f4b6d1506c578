"""Which of the two implementations a call runs, and the one place where Triton is imported.

Triton is Linux-only and easily broken by a mismatched driver or torch. Without it everything works, on the reference
implementations in reference.py, and a warning says so once.
"""

import functools
import os
import warnings

try:
    import triton
    import triton.language as tl
except Exception as e:  # a broken Triton fails in many ways, none of which may take the package down
    triton = tl = None
    WHY = "is not installed" if isinstance(e, ModuleNotFoundError) else f"does not import ({type(e).__name__}: {e})"


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def use_triton(backend: str, tensor) -> bool:
    """True for the kernel, False for the reference. "auto": the kernel for CUDA tensors and under TRITON_INTERPRET=1."""
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend: {backend!r}; valid: auto, triton, torch")
    if backend == "torch":
        return False
    if triton is None:
        if backend == "triton":
            raise ValueError(f"backend: triton {WHY}; valid: torch, or auto")
        warn_once()
        return False
    if interpreted() and isinstance(tl.sum, triton.JITFunction):
        raise ValueError("TRITON_INTERPRET: set after Triton was imported; valid: set before Python starts, or not at all")
    runs = tensor.is_cuda or interpreted()
    if backend == "triton" and not runs:
        raise ValueError("backend: triton needs CUDA tensors, or TRITON_INTERPRET=1 set before the import; valid: torch, or auto")
    return runs


@functools.cache
def warn_once():
    warnings.warn(f"Triton {WHY}: the reference implementations in torch are used instead of the kernels", stacklevel=4)


def jit(function=None, **options):
    """triton.jit, or the function itself where there is no Triton (it is then never called)."""
    if function is None:
        return lambda f: jit(f, **options)
    return triton.jit(function, **options) if triton is not None else function
