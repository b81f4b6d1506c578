"""Template collapse, measured: does the reasoning Z still tell the prompts X apart?

Entropy sees variety within one input only. A policy can keep it and reason in templates that ignore the input; what is
then lost is the mutual information I(X; Z) (RAGEN-2, arXiv 2604.06268). X is the context up to and including `<think>`,
Z the reasoning ids without either tag. Everything comes from one matrix of teacher-forced log-probs,

    L[i, j] = log p(z_i | x_j),   p_mix(z) = sum_j w_j p(z | x_j),   I(X; Z) ~ mean_i [ L[i, own_i] - log p_mix(z_i) ].

Parts: `cross_matrix` (matrix.py) makes L, `collapse_metrics` reads it, `first_turn_sample` and `trajectory_sample` choose the
rows, `measure` does all three. monitor.py follows a run from step to step.

Left out: corrections for the bias of small samples (N prompts can show at most H(X) <= log N nats, given as `mi_upper_bound`), and
clipping: a negative estimate is reported as it is. Shapes: M reasonings (rows), N prompts (columns).
"""

import random
from fractions import Fraction

import torch

from nanoragen.collapse.matrix import cross_matrix, distinct
from nanoragen.kernels.cross import cross_statistics
from nanoragen.policy.support import max_positions

SAMPLINGS = {"first_turn": "collapse_first_turn_sample/", "trajectory": "collapse_trajectory_sample/"}  # and their names in a log
STD_EPS = 1e-3  # the paper code's, in the z-scores


def collapse_metrics(sums, own, lengths, *, column_keys=None) -> dict[str, float]:
    """All metrics of the matrix, in float64.

    sums: [M, N] log p(z_i | x_j) in nats; own: [M] column of each row's own prompt; lengths: [M] tokens of each
    reasoning, at least 1; column_keys: N hashables, columns with equal keys are one prompt (the first one is read).

    A prompt weighs w_j = the share of rows whose own it is: X is distributed as the rows are. A prompt without rows has
    weight 0. It is no value of X, so it changes neither MI nor entropies; it stays a wrong answer that retrieval can
    give, and counts in its chance level.

    mi_seq_estimate             mean_i [ L(i, own) - log p_mix(z_i) ], nats; at most mi_upper_bound = H(X)
    conditional_entropy_seq_est H(Z|X) = -mean L(i, own), nats a sequence
    reasoning_entropy_seq_est   H(Z) = -mean log p_mix(z_i), so that H(Z) - H(Z|X) = MI
    mi_estimate, conditional_entropy_est, reasoning_entropy_est
        the same from per-token means L / length, nats a token: the paper code's length-normalised proxy.
        exp(L / length) is no probability, so the proxy estimates no information and bounds none: times the number of
        tokens it may exceed H(X), the most there is to know about X. Compare it over time, not with mi_upper_bound.
    mi_zscore, marginal_std     mi_estimate / (marginal_std + 1e-3), marginal_std the population std of the rows'
        log p_mix (per token); with _seq: from sequence sums
    retrieval_accuracy          share of rows whose own prompt scores highest; @k: among the k highest (k < N). A row
        whose own prompt ties has its share of the places left, so that a policy that ignores its input is exactly at
        retrieval_chance_level = 1 / N. Equal is: closer than float32 can tell.
    <name>_se                   standard error of the mean over prompts, rows of one prompt counting as a cluster, p_mix
        taken as given; left out where fewer than two prompts have rows

    ValueError: shapes that do not fit, no rows, an empty reasoning, a NaN, an own prompt that makes a row impossible.
    """
    L = torch.as_tensor(sums).detach().double().cpu()
    own = torch.as_tensor(own, dtype=torch.long).cpu()
    lengths = torch.as_tensor(lengths).double().cpu()
    if L.ndim != 2 or not L.numel() or own.shape != L.shape[:1] or lengths.shape != L.shape[:1]:
        shapes = f"{list(L.shape)}, own {list(own.shape)}, lengths {list(lengths.shape)}"
        raise ValueError(f"sums: {shapes}; valid: [M, N], [M], [M] with M and N at least 1")
    if own.min() < 0 or own.max() >= L.shape[1]:
        raise ValueError(f"own: {own.min()} to {own.max()}; valid: columns 0 to {L.shape[1] - 1}")
    if lengths.min() < 1:
        raise ValueError("lengths: an empty reasoning says nothing about its prompt; valid: rows of at least one token")
    if column_keys is not None:
        if len(column_keys) != L.shape[1]:
            raise ValueError(f"column_keys: {len(column_keys)}; valid: one for each of the {L.shape[1]} columns")
        first, place = {}, []
        for j, key in enumerate(column_keys):
            place.append(first.setdefault(key, (len(first), j))[0])
        L, own = L[:, [j for _, j in first.values()]], torch.tensor(place)[own]
    M, N = L.shape
    weight = torch.bincount(own, minlength=N).double() / M  # [N]
    found = cross_statistics(L, own, weight)  # [M] each
    if L.isnan().any() or not found.matched.isfinite().all():
        raise ValueError("sums: NaN, or a row impossible under its own prompt; valid: log-probs of sampled rows")
    out = {"mi_upper_bound": -torch.special.xlogy(weight, weight).sum().item() + 0.0}

    def add(name, rows):  # the mean of [M] and its standard error
        out[name] = rows.mean().item() + 0.0
        error = _standard_error(rows, own)
        if error is not None:
            out[f"{name}_se"] = error

    for scores, end in ((cross_statistics(L / lengths[:, None], own, weight), ""), (found, "_seq")):
        add(f"mi{end}_estimate", scores.matched - scores.marginal)
        add(f"conditional_entropy{end}_est", -scores.matched)
        add(f"reasoning_entropy{end}_est", -scores.marginal)
        out[f"marginal_std{end}"] = scores.marginal.std(correction=0).item()
        out[f"mi_zscore{end}"] = out[f"mi{end}_estimate"] / (out[f"marginal_std{end}"] + STD_EPS)

    above, tied = found.above.tolist(), found.tied.tolist()  # the own prompt is one of the tied
    for k in (1, 2, 4, 8):
        if k == 1 or k < N:
            credit = [min(max(Fraction(k - a, t), Fraction(0)), Fraction(1)) for a, t in zip(above, tied)]
            name = "retrieval_accuracy" if k == 1 else f"retrieval_accuracy@{k}"
            add(name, torch.tensor([float(c) for c in credit], dtype=torch.float64))
            accuracy = sum(credit) / M  # fractions: at chance means at chance, to the last bit
            out[name] = float(accuracy)
            if k == 1:
                out["retrieval_chance_level"] = 1 / N
                out["retrieval_above_chance"] = float(accuracy - Fraction(1, N))
    return out


def _standard_error(rows, cluster) -> float | None:
    """Of the mean of rows [M], with clusters [M] as the independent units; one row each: std(ddof=1) / sqrt(M)."""
    groups = len(cluster.unique())
    if groups < 2:
        return None
    sums = torch.zeros(int(cluster.max()) + 1, dtype=rows.dtype).index_add(0, cluster, rows - rows.mean())
    return (groups / (groups - 1) * sums.square().sum()).sqrt().item() / len(rows)


def _reasons(turn) -> bool:
    return turn.think_end > turn.start


def valid_thinking_rate(episodes) -> float:
    """Turns with non-empty reasoning / turns; 0 without turns."""
    turns = [t for e in episodes for t in e.turns]
    return sum(map(_reasons, turns)) / len(turns) if turns else 0.0


def _sample(pairs):
    """(episode, turn) pairs -> prompts (N different ones), reasonings [M], own [M], column_keys [N]."""
    prompts, own = distinct([e.ids[: t.start] for e, t in pairs])
    return prompts, [e.ids[t.start : t.think_end] for e, t in pairs], own, [tuple(x) for x in prompts]


def first_turn_sample(episodes):
    """Each episode's first turn, rows with empty reasoning left out. -> (prompts, reasonings, own, column_keys)"""
    return _sample([(e, e.turns[0]) for e in episodes if e.turns and _reasons(e.turns[0])])


def trajectory_sample(episodes, n, seed):
    """n rows: a trajectory uniformly, then one of its turns uniformly (of those that reason). Same returns.

    A long trajectory weighs as much as a short one. None comes a second time before all have come.
    """
    rng = random.Random(seed)
    turns = [(e, [t for t in e.turns if _reasons(t)]) for e in episodes]
    turns = [(e, ts) for e, ts in turns if ts]
    order = []
    while turns and len(order) < n:
        order += rng.sample(turns, len(turns))
    return _sample([(e, rng.choice(ts)) for e, ts in order[:n]])


class Measurement(dict):
    """Metrics by name; beside them what they come from: sums [M, N], own [M], lengths [M], column_keys [N]."""

    def __init__(self, metrics, sums, own, lengths, column_keys):
        super().__init__(metrics)
        self.sums, self.own, self.lengths, self.column_keys = sums, own, lengths, column_keys


def measure(model, episodes, *, sampling="first_turn", max_prompts=8, rows_per_prompt=2, temperature=1.0, seed=0) -> Measurement:
    """One measurement for a training step: choose rows, make the matrix, read it.

    "first_turn": max_prompts groups drawn by seed, rows_per_prompt of the episodes of each. "trajectory": max_prompts rows of
    `trajectory_sample`, whose contexts are hardly ever shared. Rows whose context leaves no room for the longest reasoning are left
    out. Where no turn reasons there is valid_thinking_rate only.
    """
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling: {sampling!r} is unknown; valid: {', '.join(map(repr, SAMPLINGS))}")
    if sampling == "trajectory":
        prompts, reasonings, own, keys = trajectory_sample(episodes, max_prompts, seed)
    else:
        rng, groups = random.Random(seed), {}
        for e in episodes:
            if e.turns and _reasons(e.turns[0]):
                groups.setdefault(e.group, []).append(e)
        chosen = rng.sample(list(groups.values()), min(max_prompts, len(groups)))
        chosen = [e for g in chosen for e in rng.sample(g, min(rows_per_prompt, len(g)))]
        prompts, reasonings, own, keys = first_turn_sample(chosen)
    room = max_positions(model) + 1 - max(map(len, reasonings), default=0)
    rows = [i for i in range(len(own)) if len(prompts[own[i]]) <= room]
    reasonings = [reasonings[i] for i in rows]
    prompts, own = distinct([prompts[own[i]] for i in rows])
    keys = [tuple(x) for x in prompts]
    lengths = [len(z) for z in reasonings]
    sums = cross_matrix(model, prompts, reasonings, temperature=temperature)
    metrics = {"valid_thinking_rate": valid_thinking_rate(episodes)}
    if rows:
        metrics.update(collapse_metrics(sums, own, lengths, column_keys=keys))
    return Measurement(metrics, sums, own, lengths, keys)
