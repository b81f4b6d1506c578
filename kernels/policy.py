"""The whole policy loss from logits, fused with the softmax: a training step touches the logits twice.

    loss, stats = policy_loss(logits, targets, old_logprob, advantages, weights, clip_high=0.28, inplace=True)
    loss.backward()

With l = log p(target), r = e^(l - l_old), d = l_ref - l (capped at +-20) and H the entropy of the distribution, a token's loss is

    weight * ( -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)) + beta k(d) - entropy_coef H )
    k1 = -d      k2 = d^2 / 2      k3 = e^d - d - 1                               (Schulman 2020)

Its derivatives by l and by H are known as soon as l is, so the forward program of a row computes and stores them:

    g = weight * ( -A r [not clipped] + beta k'(d) [|d| <= 20] )        k1' = 1     k2' = -d     k3' = 1 - e^d
    h = -weight * entropy_coef

and the backward pass is logprob.py's: one read and one write of the logits, over themselves with inplace=True. How tokens are
averaged is in the weights: 1 / (tokens of the sequence * sequences) is the mean over sequences of their token means.

A token is clipped where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low: there the minimum is constant. The side is
chosen before anything is multiplied, so a ratio that overflows leaves no inf * 0 = NaN where the true gradient is 0. Where it
is not clipped (A < 0) such a ratio is an infinite loss, as it should be.

The sum over tokens is torch's, of the [T] token losses: the same order every time, no atomics. Left out: gradients to anything
but the logits, and sequence-level ratios.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from nanoragen.kernels import reference
from nanoragen.kernels.dispatch import jit, tl, use_triton
from nanoragen.kernels.logprob import (
    LOG2E, UNSPECIALIZED, _row_offset, _row_softmax, check_logits, launch_args, logits_gradient,
)  # fmt: skip
from nanoragen.kernels.reference import PolicyStats


def policy_loss(
    logits, targets, old_logprob, advantages, weights, *, ref_logprob=None, clip_low=0.2, clip_high=0.2, beta=0.0, kl="k3",
    entropy_coef=0.0, temperature=1.0, ignore_index=-100, inplace=False, backend="auto",
) -> tuple[torch.Tensor, PolicyStats]:  # fmt: skip
    """The clipped objective of PPO and GRPO with KL penalty and entropy bonus. Returns (loss, stats of each token).

    logits       [..., V]; logits, targets [...], temperature, ignore_index, inplace, backend as in logprob.logprob_entropy
    old_logprob  [...] log-prob of the target when it was sampled; None: the present one (first update: ratio 1, not clipped)
    advantages   [...]
    weights      [...] weight of each token; the loss is the sum over tokens. Weight 0: no part in the loss, whatever the ratio
    ref_logprob  [...] log-prob under the reference model; needed where beta is not 0, else only measured
    clip_low, clip_high  the ratio is clipped to 1 - clip_low .. 1 + clip_high; math.inf: not at all
    beta, kl     weight of the KL penalty, and its estimator "k1", "k2" or "k3"
    entropy_coef weight of the entropy bonus

    The loss is a float32 number (float64 for float64 logits), differentiable with respect to the logits alone. stats has no
    gradient: logprob, entropy, clipped (0 or 1), kl (0 without ref_logprob), each [...]. Tokens of ignore_index are 0 in all of
    them. ValueError for shapes that do not fit or settings that are none of these; targets as in logprob.logprob_entropy.
    Source: Schulman et al. 2017, eq. 7; RAGEN-2 (arXiv 2604.06268), eq. 1; the two-sided clip after DAPO (arXiv 2503.14476).
    """
    check_logits(logits, targets, temperature, ignore_index, inplace)
    given = {"old_logprob": old_logprob, "advantages": advantages, "weights": weights, "ref_logprob": ref_logprob}
    for key, value in given.items():
        if value is None and key in ("advantages", "weights") or value is not None and value.shape != targets.shape:
            shape = None if value is None else tuple(value.shape)
            raise ValueError(f"{key}: shape {shape} for targets {tuple(targets.shape)}; valid: the same")
    if kl not in ("k1", "k2", "k3"):
        raise ValueError(f"kl: {kl!r}; valid: k1, k2, k3")
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low, clip_high: {clip_low}, {clip_high}; valid: 0 or more")
    if beta != 0 and ref_logprob is None:
        raise ValueError(f"beta: {beta} without ref_logprob; valid: 0, or log-probs of a reference model")
    settings = 1 - clip_low, 1 + clip_high, float(beta), kl, float(entropy_coef), float(temperature), int(ignore_index), inplace
    if not (use_triton(backend, logits) and logits.dtype != torch.float64):
        return reference.policy_loss(logits, targets, *given.values(), *settings)
    loss, *stats = _PolicyLoss.apply(logits, targets, *given.values(), *settings)
    return loss, PolicyStats(*stats)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits, targets, old, advantages, weights, ref, low, high, beta, kl, entropy_coef, temperature, ignore_index, inplace
    ):  # fmt: skip
        targets = targets.reshape(-1).contiguous()
        old, advantages, weights, ref = (
            None if t is None else t.detach().reshape(-1).float().contiguous() for t in (old, advantages, weights, ref)
        )
        # zeros: the program of an ignored row writes nothing
        out = torch.zeros(8, len(targets), dtype=torch.float32, device=logits.device)
        loss, logprob, entropy, clipped, kl_value, row_max, log2_sum, grad_logprob = out.unbind()
        if len(targets):
            rows, sizes, options = launch_args(logits)
            _policy_loss_fwd_kernel[(len(targets),)](
                rows, targets, old, advantages, weights, ref, loss, logprob, entropy, clipped, kl_value, row_max, log2_sum,
                grad_logprob, *sizes, ignore_index, LOG2E / temperature, low, high, beta, entropy_coef, KL_KIND=kl, **options,
            )  # fmt: skip
        ctx.save_for_backward(logits, targets, entropy, row_max, log2_sum, grad_logprob, weights)
        ctx.entropy_coef, ctx.settings = entropy_coef, (temperature, ignore_index, inplace)
        stats = [t.view(logits.shape[:-1]) for t in (logprob, entropy, clipped, kl_value)]
        ctx.mark_non_differentiable(*stats)
        return loss.sum(), *stats

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        *saved, g, weights = ctx.saved_tensors
        h = weights * (-ctx.entropy_coef * grad_loss)
        return logits_gradient(*saved, g * grad_loss, h, *ctx.settings), *[None] * 13


@jit
def _token_loss(logprob, old, ref, advantage, ratio_low, ratio_high, KL_KIND: tl.constexpr, HAS_REF: tl.constexpr):
    """Of a token: policy loss, its derivative by logprob, whether it is clipped; KL estimate, its derivative."""
    ratio = tl.exp(logprob - old)
    clipped = ((advantage > 0) & (ratio > ratio_high)) | ((advantage < 0) & (ratio < ratio_low))
    bound = tl.where(advantage > 0, ratio_high, ratio_low)
    policy = -advantage * tl.where(clipped, bound, tl.where(advantage == 0, 0.0, ratio))
    policy_grad = tl.where(clipped, 0.0, policy)  # A r is its own derivative
    kl = 0.0
    kl_grad = 0.0
    if HAS_REF:
        difference = ref - logprob
        d = tl.where(difference != difference, difference, tl.minimum(tl.maximum(difference, -20.0), 20.0))  # a NaN stays NaN
        if KL_KIND == "k1":
            kl = -d
            kl_grad = 1.0
        elif KL_KIND == "k2":
            kl = d * d / 2
            kl_grad = -d
        else:
            kl = tl.exp(d) - d - 1
            kl_grad = 1 - tl.exp(d)
        kl_grad = tl.where(tl.abs(difference) <= 20.0, kl_grad, 0.0)
    return policy, policy_grad, clipped, kl, kl_grad


PER_TOKEN = ["old_logprob_ptr", "advantages_ptr", "weights_ptr", "ref_logprob_ptr", "loss_ptr", "clipped_ptr", "kl_ptr"]
ALIGNMENT = "do_not_specialize_on_alignment"


@jit(**UNSPECIALIZED | {ALIGNMENT: UNSPECIALIZED[ALIGNMENT] + PER_TOKEN})
def _policy_loss_fwd_kernel(
    logits_ptr, targets_ptr, old_logprob_ptr, advantages_ptr, weights_ptr, ref_logprob_ptr, loss_ptr, logprob_ptr, entropy_ptr,
    clipped_ptr, kl_ptr, row_max_ptr, log2_sum_ptr, grad_logprob_ptr, n_inner, stride_outer: tl.int64, stride_inner: tl.int64, V,
    ignore_index, log2_scale, ratio_low, ratio_high, beta, entropy_coef, KL_KIND: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    target = tl.load(targets_ptr + row)
    if target != ignore_index:
        bits: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth
        row_ptr = logits_ptr + _row_offset(row, n_inner, stride_outer, stride_inner, ALIGNED, bits)
        logprob, entropy, m, log2_sum = _row_softmax(row_ptr, target, V, log2_scale, BLOCK_V)
        weight = tl.load(weights_ptr + row)
        advantage = tl.where(weight == 0, 0.0, tl.load(advantages_ptr + row))  # no 0 * inf at a ratio that overflows
        old = logprob if old_logprob_ptr is None else tl.load(old_logprob_ptr + row)
        ref = logprob if ref_logprob_ptr is None else tl.load(ref_logprob_ptr + row)
        policy, policy_grad, clipped, kl, kl_grad = _token_loss(
            logprob, old, ref, advantage, ratio_low, ratio_high, KL_KIND, ref_logprob_ptr is not None
        )
        penalty = tl.where(beta == 0, 0.0, beta * kl)
        tl.store(loss_ptr + row, tl.where(weight == 0, 0.0, weight * (policy + penalty - entropy_coef * entropy)))
        tl.store(grad_logprob_ptr + row, tl.where(weight == 0, 0.0, weight * (policy_grad + beta * kl_grad)))
        tl.store(logprob_ptr + row, logprob)
        tl.store(entropy_ptr + row, entropy)
        tl.store(clipped_ptr + row, clipped.to(tl.float32))
        tl.store(kl_ptr + row, kl)
        tl.store(row_max_ptr + row, m)
        tl.store(log2_sum_ptr + row, log2_sum)
