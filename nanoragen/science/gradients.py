"""Gradients by reward variance: which prompts teach the task, and where only the regularisers speak (RAGEN-2's SNR picture).

    found = measure(model, reference, critic, episodes, rewards, ids, pad_id, c, token_weight, policy_loss)
    # {"grad_norm/0/task": 0.21, "grad_norm/0/entropy": 0.35, ..., "grad_norm/5/std_max": 0.53}

Groups are sorted by in-group reward std into buckets of (all but) equally many groups, bucket 0 the lowest. In each bucket,
as if it were a minibatch of its own, three gradients are taken at the weights as they are: of the task (policy term at ratio
1, with the advantages that the run's algorithm gives without a filter), of the entropy bonus with coefficient 1, and of the
KL to the reference with coefficient 1. The paper's claim: where rewards hardly vary the task gradient is weak, the other two
are not, so they decide what is learned there.

Signal-to-noise ratio of the task gradient g: every group's episodes are dealt to two halves in turn. Of their gradients a and b
(means over n_a and n_b episodes), with n = n_a + n_b and g = (n_a a + n_b b) / n,

    noise = (n_a n_b / n^2) |a - b|^2      expectation: total variance of g over draws of episodes, prompts fixed
    signal = |g|^2 - noise                 expectation: |E g|^2
    snr = signal / noise                   powers, not amplitudes; about 0: another draw would point anywhere

Both are unbiased for independent episodes of equal weight, so the ratio is no smoothed one: it is negative about as often as
not where there is no signal, and reported as it is. Episodes that share a baseline are not quite independent: with
A = r - mean(r) of K episodes the signal is high by the share 1 / (K-1)^2 (2% for K = 8). To average over steps, average the
noise, |g|^2 / (1 + snr), and |g|^2.

Nothing of the run is changed: gradients come from torch.autograd.grad, which touches no .grad, and nothing is random. Costs a
forward and three backward passes over the step's episodes, and memory for four gradients. Left out: a bucket of everything (the
log has `grad_norm` of the updates), per-layer norms, and gradients of the updates after a step's first.
"""

import math
from dataclasses import replace

import torch

from nanoragen.learning import advantages
from nanoragen.policy.batches import make_batch, split_by_length
from nanoragen.policy.loading import autocast
from nanoragen.policy.prefix_cache import prefix_cache
from nanoragen.policy.scoring import micro_batch, token_logprobs

BUCKETS = 6  # the paper's


def buckets(std: list[float], count: int = BUCKETS) -> list[list[int]]:
    """Positions of `std` in ascending order (ties by position), cut into min(count, len) lists whose sizes differ by 1 at most."""
    order = sorted(range(len(std)), key=lambda i: (std[i], i))
    count = min(count, len(order))
    return [order[len(order) * n // count : len(order) * (n + 1) // count] for n in range(count)]


def measure(model, reference, critic, episodes, rewards, ids, pad_id, c, token_weight, policy_loss) -> dict[str, float]:
    """The metrics above of a step's episodes, none filtered, under the run's settings c; {} where none has a sampled token.

    reference: frozen model, or None (no KL then); critic: or None; rewards, ids [B]: of each episode, its group. The last two
    are train.py's own, handed over because a script has no one name to be imported by.
    """
    rows = [row for row, e in enumerate(episodes) if e.num_tokens]
    if not rows:
        return {}
    c = replace(c, filter="none", filter_include_zero=True)
    batch, kept = make_batch(episodes, pad_id).to(model.device), torch.tensor(rows, dtype=torch.long)
    found = advantages.group_statistics(c, episodes, rewards, ids)
    value = critic.values(batch, kept, c) if critic else None
    advantage, _ = advantages.token_advantages(c, found, episodes, rewards, ids, batch, kept, value)
    members = {}  # group -> its episodes
    for row in rows:
        members.setdefault(int(ids[row]), []).append(row)
    return by_bucket(model, reference, batch, members, found.std.tolist(), advantage, c, token_weight, policy_loss)


def by_bucket(model, reference, batch, members, std, advantage, c, token_weight, policy_loss) -> dict[str, float]:
    """members {group: rows of the batch}; std [G] of each group's rewards; advantage [B, T].

    grad_norm/<bucket>/task, entropy, kl  norms of the three gradients. The KL's is 0 where policy and reference agree, except
                                          for --kl k1, whose gradient is 0 in expectation only
    grad_norm/<bucket>/snr                above; left out with fewer than two episodes, 0 where the task gradient is 0
    grad_norm/<bucket>/groups             groups in it
    grad_norm/<bucket>/std_min, std_max   lowest and highest in-group reward std in it
    """
    found, names = {}, sorted(members)
    for n, bucket in enumerate(buckets([std[g] for g in names])):
        bucket = [names[i] for i in bucket]
        halves = [[row for g in bucket for row in members[g][half::2]] for half in (0, 1)]
        grads = gradients(model, reference, batch, halves, advantage, c, token_weight, policy_loss)
        norms = {"task": norm(add(grads["a"], grads["b"])), "entropy": norm(grads["entropy"])}
        if reference is not None:
            norms["kl"] = norm(grads["kl"])
        if all(halves):
            norms["snr"] = signal_to_noise(grads["a"], grads["b"], *map(len, halves))
        norms.update(groups=len(bucket), std_min=std[bucket[0]], std_max=std[bucket[-1]])
        found.update({f"grad_norm/{n}/{k}": v for k, v in norms.items()})
    return found


def gradients(model, reference, batch, halves, advantage, c, token_weight, policy_loss) -> dict[str, list]:
    """Gradients of the parts of policy_loss over the episodes of both halves, aggregated as a minibatch of training is.

    halves: two lists of rows of the batch; advantage [B, T]. Returns "a" and "b", each half's terms of the task gradient (it is
    their sum), "entropy" and "kl": lists of tensors, one a trained parameter.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    both = torch.tensor(halves[0] + halves[1], dtype=torch.long)
    weight = torch.zeros(len(batch.mask), dtype=advantage.dtype, device=model.device)
    weight[both] = token_weight(batch.mask.sum(1)[both].to(advantage.dtype), c)
    task_only, entropy_only, kl_only = (replace(c, entropy_coef=e, beta=b) for e, b in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))

    def scored(model, rows):  # the prefix's graph is not cut off: autograd.grad goes through it
        with autocast(model.device, c.dtype):
            micro = micro_batch(model, batch, rows, prefix_cache(model, batch, rows, c.dtype, detach=False))
            return micro, *token_logprobs(model, micro, c.temperature)

    found = {part: [torch.zeros_like(p) for p in parameters] for part in ("a", "b", "entropy", "kl")}
    for half, these in zip("ab", halves):
        for rows in split_by_length(batch, torch.tensor(these, dtype=torch.long), c.micro_batch, c.micro_tokens):
            micro, logprob, entropy = scored(model, rows)
            now, none = logprob.detach(), torch.zeros_like(logprob)  # ratio 1, advantage 0
            parts = {half: (micro.pick(advantage), None, task_only), "entropy": (none, None, entropy_only)}
            if reference is not None:  # same rows, same padding: equal models give equal bits
                with torch.no_grad():
                    parts["kl"] = none, scored(reference, rows)[1], kl_only
            for part, (a, ref, settings) in parts.items():
                loss, _ = policy_loss(logprob, now, a, weight[micro.row_of_token()], entropy, ref, settings)
                last = part == list(parts)[-1]
                grads = torch.autograd.grad(loss, parameters, retain_graph=not last, allow_unused=True)
                found[part] = [x if g is None else x + g for x, g in zip(found[part], grads)]
    return found


def signal_to_noise(a, b, n_a: int, n_b: int) -> float:
    """The ratio above from each half's share of the gradient: a = (n_a / n) mean gradient of half a, so that g = a + b."""
    noise = norm([n_b * x - n_a * y for x, y in zip(a, b)]) ** 2 / (n_a * n_b)
    power = norm(add(a, b)) ** 2
    return (power - noise) / noise if noise > 0 else (math.inf if power > 0 else 0.0)


def add(a, b) -> list:
    return [x + y for x, y in zip(a, b)]


def norm(gradient) -> float:
    """Euclidean, over all parameters together, summed in float64."""
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradient]).norm().item()
