"""What the tests of this folder share: the backends that can run here, the maths in plain torch, and what Triton would compile.

The reference implementation runs always; the kernel where its interpreter is on, or on a GPU.
"""

import torch

from nanoragen.kernels.dispatch import interpreted, triton
from nanoragen.kernels.linear import linear_logprob_entropy

BACKENDS = ["torch"] + (["triton"] if triton is not None and (interpreted() or torch.cuda.is_available()) else [])
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"


def by_the_book(x, targets, ignore_index=-100):
    """Log-prob of the targets and entropy of softmax(x), straight from the definitions, in the type of x."""
    p, log_p = torch.softmax(x, -1), torch.log_softmax(x, -1)
    live = targets != ignore_index
    logprob = log_p.gather(-1, torch.where(live, targets, 0)[..., None].long()).squeeze(-1)
    entropy = -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)  # the gradient at -inf is not 0 * inf
    return torch.where(live, logprob, 0.0), torch.where(live, entropy, 0.0)


# -- linear_logprob_entropy --------------------------------------------------------------------------------------------


def make(P, D, V, dtype=torch.float32, bias=True, seed=0):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(P, D).to(DEVICE, dtype), (2 * torch.randn(V, D) / D**0.5).to(DEVICE, dtype)
    return hidden, weight, torch.randn(V).to(DEVICE, dtype) if bias else None, torch.randint(V, (P,), device=DEVICE)


def linear_book(hidden, weight, bias, targets, temperature=1.0, ignore_index=-100, dtype=torch.float64):
    """Logits in `dtype`, then a softmax of at least float32 (what a trainer without the kernel does)."""
    x = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return by_the_book((x if dtype == torch.float64 else x.float()) / temperature, targets, ignore_index)


def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def value_and_grads(impl, inputs, targets, g, h):
    """Values of an implementation, and gradients of (g . logprob + h . entropy)."""
    inputs = leaves(*inputs)
    values = impl(*inputs, targets)
    loss = sum((v * u).sum() for v, u in zip(values, (g, h)))
    return values, torch.autograd.grad(loss, [t for t in inputs if t is not None])


def ours(backend, **options):
    return lambda hidden, weight, bias, targets: linear_logprob_entropy(
        hidden, weight, targets, bias=bias, backend=backend, **options
    )


def close(found, wanted, tolerance=2e-5):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


# -- what is compiled --------------------------------------------------------------------------------------------------


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
