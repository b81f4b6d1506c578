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
    WHY = "is not installed" if isinstance(e, ModuleNotFoundError) else f"does not import ({type(e).__name__}: {e})"


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def use_triton(backend: str, tensor) -> bool:
    """True for the kernel, False for the twin. "auto": the kernel for CUDA tensors and under TRITON_INTERPRET=1."""
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


def warn_once(said=[]):  # the list is the memory
    if not said:
        said.append(True)
        warnings.warn(f"Triton {WHY}: the plain torch twins of the kernels are used instead", stacklevel=4)


def jit(function=None, **options):
    """triton.jit, or the function itself where there is no Triton (it is then never called)."""
    if function is None:
        return lambda f: jit(f, **options)
    return triton.jit(function, **options) if triton is not None else function
