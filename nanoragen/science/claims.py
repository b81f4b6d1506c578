"""What the runs of a sweep (reproduce.py) say about the claims of RAGEN-2: claims with intervals, tables, figures.

MI is `mi_seq_estimate`, its share is that of the bound H(X) of the same step, entropy is `conditional_entropy_est` (H(Z|X), nats a
token). "First" is the first measurement, of the starting model; "final" is the mean over the last quarter of the steps. Success is
held-out success after the last step.

    (a) does MI go with success across runs, and more strongly than entropy?     Spearman, bootstrap over runs
    (b) does the filter raise success and MI, and what does a step cost?         t interval of paired differences
    (c) in how many runs does MI's share fall by over half while entropy stays   Wilson's interval of the share of runs
        within 10% of its first value, or does not fall by over 10%?
    (d) does the task gradient grow with in-group reward variance?               t interval of top less bottom bucket, over the
                                                                                 runs without reward noise

A claim is "reproduced" where its 95% interval lies above 0, "not reproduced" where it lies below, else "undecided".

Left out: a correction for asking several questions, and the dependence of runs that share a seed (their prompts are the same).
"""

import math

import numpy as np

from nanoragen.run import metrics
from nanoragen.science.statistics import bootstrap, spearman, t_interval, verdict

FIRST_TURN = "collapse_first_turn_sample/"
WITHIN, NO_FALL = 1.1, math.inf  # the most that entropy may end at, as a multiple of its first value


def mean(values) -> float:
    """Of those that are there."""
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else math.nan


def summary(name: str, lines: list[dict], env: str) -> dict:
    """The run "<filter>-<intervention>-<seed>" in a few numbers, from its metrics.jsonl; NaN where nothing was measured."""
    filter, intervention, seed = name.split("-")
    mi, bound, entropy = (
        [m.get(FIRST_TURN + key) for m in lines] for key in ("mi_seq_estimate", "mi_upper_bound", "conditional_entropy_est")
    )
    share = [m / b if m is not None and b else None for m, b in zip(mi, bound)]  # H(X) differs from step to step
    found = {"name": name, "filter": filter, "intervention": intervention, "seed": int(seed)}
    for key, values in (("mi", mi), ("entropy", entropy), ("share", share)):
        found[f"{key}_first"] = next((v for v in values if v is not None), math.nan)
        found[key] = mean(values[-max(1, len(values) // 4) :])
    return found | {
        "success": lines[-1][f"eval/{env}/success"],
        "step_time": float(np.median([m["step_time"] - m.get("time/gradients", 0.0) for m in lines])),
        "kept": mean(m.get("rollout/filter_kept_ratio") for m in lines),
        "buckets": bucket_means(lines),
    }


def bucket_means(lines) -> list[dict]:
    """Gradient norms of each bucket of in-group reward std, lowest first, averaged over the measured steps; of task also its
    squared norm ("power") and the part of it that is sampling noise."""
    count = max((int(k.split("/")[1]) + 1 for m in lines for k in m if k.startswith("grad_norm/")), default=0)
    found = []
    for n in range(count):
        rows = [{k.split("/")[2]: v for k, v in m.items() if k.startswith(f"grad_norm/{n}/")} for m in lines]
        one = {part: mean(r.get(part) for r in rows) for part in ("task", "entropy", "kl", "std_min", "std_max", "groups")}
        split = [(r["task"] ** 2, r["task"] ** 2 / (1 + r["snr"])) for r in rows if r.get("snr") is not None]
        found.append({**one, "power": mean(p for p, _ in split), "noise": mean(n for _, n in split)})
    return found


def collapsed(run: dict, most=NO_FALL) -> bool:
    """Template collapse: MI loses over half of its share of H(X), entropy ends at 0.9 to `most` times its first value."""
    first = run["entropy_first"]
    return 0.9 * first <= run["entropy"] <= most * first and run["share"] < 0.5 * run["share_first"]


def analyse(runs: list[dict]) -> dict:
    """runs: summaries. Returns the claims with value, interval and verdict, and the tables behind them."""
    claims = []

    def claim(text, n, value, low, high, unit="", said=""):
        said = said or verdict(low, high, n)
        claims.append({"claim": text, "value": value, "low": low, "high": high, "n": n, "unit": unit, "verdict": said})

    rows = [(r["mi"], r["entropy"], r["success"]) for r in runs if math.isfinite(r["mi"] + r["entropy"])]
    columns = np.array(rows, dtype=float).reshape(-1, 3).T

    def lead_of_mi(mi, entropy, success, axis):
        return abs(spearman(mi, success, axis)) - abs(spearman(entropy, success, axis))

    for text, statistic, said in (
        ("final MI goes with success (rank correlation)", lambda mi, _, success, axis: spearman(mi, success, axis), ""),
        ("final entropy and success (rank correlation)", lambda _, h, success, axis: spearman(h, success, axis), "measured"),
        ("MI goes with success more strongly than entropy does (difference of absolute rank correlations)", lead_of_mi, ""),
    ):
        value = float(statistic(*columns, axis=-1)) if len(rows) > 1 else math.nan
        claim(text, len(rows), value, *bootstrap(statistic, *columns), said=said)

    pairs = paired(runs)
    success = [100 * (a["success"] - b["success"]) for a, b in pairs]
    mi = [a["mi"] - b["mi"] for a, b in pairs if math.isfinite(a["mi"] - b["mi"])]
    claim("the filter raises held-out success", len(pairs), *t_interval(success), "points")
    claim("the filter keeps more MI", len(mi), *t_interval(mi), "nats")
    longer = [100 * (a["step_time"] / b["step_time"] - 1) for a, b in pairs]
    claim("time a step with the filter, against none", len(pairs), *t_interval(longer), "%", "measured")

    known = [r for r in runs if math.isfinite(sum(r[k] for k in ("share", "share_first", "entropy", "entropy_first")))]
    lost = {most: [r["name"] for r in known if collapsed(r, most)] for most in (WITHIN, NO_FALL)}
    for most, text in ((WITHIN, "entropy stays within 10%"), (NO_FALL, "entropy does not fall (by over 10%)")):
        k, n = len(lost[most]), len(known)
        text = f"runs whose MI, as a share of its bound, falls by more than half while {text}"
        share = [100 * x for x in (k / n if n else math.nan, *metrics.wilson(k, n))]
        claim(text, n, *share, "% of runs", f"seen in {k} of {n}")

    clean = [r["buckets"] for r in runs if not r["intervention"].startswith("noise") and len(r["buckets"]) > 1]
    ends = [(b[-1], b[0]) for b in clean]
    task = [top["task"] - low["task"] for top, low in ends]
    lead = [a["task"] / a["entropy"] - b["task"] / b["entropy"] for a, b in ends if a["entropy"] > 0 and b["entropy"] > 0]
    for text, found in (
        ("the task gradient is larger where rewards vary most than where they vary least (norms)", task),
        ("so is its ratio to the entropy gradient, where there is one", lead),
    ):
        found = [x for x in found if math.isfinite(x)]
        claim(text, len(found), *t_interval(found))
    return {"claims": claims, "collapsed": lost[NO_FALL], "buckets": pooled(clean)}


def paired(runs: list[dict]) -> list[tuple[dict, dict]]:
    """(run with the filter, run without): the same intervention and seed."""
    without = {(r["intervention"], r["seed"]): r for r in runs if r["filter"] == "none"}
    keyed = [(r, without.get((r["intervention"], r["seed"]))) for r in runs if r["filter"] != "none"]
    return [(a, b) for a, b in keyed if b]


def pooled(runs: list[list[dict]]) -> list[dict]:
    """Buckets averaged over runs; SNR = mean signal / mean noise, which varies less than a mean of ratios."""
    found = []
    for n in range(max(map(len, runs), default=0)):
        here = [b[n] for b in runs if len(b) > n]
        one = {k: mean(b[k] for b in here if math.isfinite(b[k])) for k in here[0]}
        power, noise = one.pop("power"), one.pop("noise")
        found.append({**one, "snr": (power - noise) / noise if noise else 0.0})
    return found


# -- tables and figures ------------------------------------------------------------------------------------------------


def number(x, digits=2) -> str:
    return f"{x:.{digits}f}" if x is not None and math.isfinite(x) else "–"


def table(header: str, rows) -> str:
    """A table in Markdown. header: names with | between them; rows: lists of texts."""
    lines = [header, " | ".join(["---"] * (header.count(" | ") + 1)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def markdown(results: dict) -> str:
    claims = table(
        "claim | measured | 95% interval | n | verdict",
        ([c["claim"], f"{number(c['value'])} {c['unit']}".strip(), f"{number(c['low'])} to {number(c['high'])}", str(c["n"]),
          c["verdict"] if c["verdict"] == "measured" else f"**{c['verdict']}**"] for c in results["claims"]),
    )  # fmt: skip
    kinds = {}
    for r in sorted(results["runs"], key=lambda r: r["filter"]):
        kinds.setdefault((r["filter"], r["intervention"].replace("_", " ")), []).append(r)
    runs = []
    for kind, these in kinds.items():
        success = [r["success"] for r in these]
        of = {k: number(mean(r[k] for r in these)) for k in ("mi", "mi_first", "entropy", "entropy_first", "step_time", "kept")}
        runs.append(
            [*kind, str(len(these)), f"{mean(success):.1%} ({min(success):.1%} to {max(success):.1%})",
             f"{of['mi_first']} → {of['mi']}", f"{of['entropy_first']} → {of['entropy']}", of["step_time"], of["kept"]]
        )  # fmt: skip
    buckets = []
    for n, b in enumerate(results["buckets"]):
        norms = [number(b[part], 3) for part in ("task", "entropy", "kl")]
        buckets.append([str(n), f"{number(b['std_min'])} to {number(b['std_max'])}", *norms, number(b["snr"])])
    lost = ", ".join(results["collapsed"]) or "there was no such run"
    parts = [claims, f"Template collapse that entropy does not see: {lost}.\n"]
    if results["unfinished"]:
        parts.append(f"Not finished, and not in any figure: {', '.join(results['unfinished'])}.\n")
    head = "filter | intervention | seeds | success (range) | MI, first → final | H(Z\\|X), first → final | s a step | kept"
    parts += [table(head, runs), table("bucket | in-group reward std | task | entropy | KL | SNR of task", buckets)]
    return "\n".join(parts)


def figures(results: dict) -> dict:
    """{file name: matplotlib figure}; points that are not finite are not drawn."""
    from matplotlib.figure import Figure

    runs, found = results["runs"], {}

    def draw(name, title, x, y, series, style="o", diagonal=False):
        found[name] = Figure(figsize=(4.8, 3.8), layout="constrained")
        axes = found[name].subplots()
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        if diagonal:
            axes.plot([0, 1], [0, 1], "--", color="gray")
        for label, points in series.items():
            axes.plot(*np.array(points, dtype=float).reshape(-1, 2).T, style, label=label, alpha=0.7)
        if series:
            axes.legend(fontsize="small")

    kind = {r["name"]: r["intervention"].split("_")[0] for r in runs}
    for key, label in (("mi", "I(X; Z), nats"), ("entropy", "H(Z|X), nats a token")):
        points = {k: [(r[key], r["success"]) for r in runs if kind[r["name"]] == k] for k in kind.values()}
        draw(f"{key}.svg", f"Success and final {key}, one point a run", label, "held-out success", points)
    pairs = {k: [(b["success"], a["success"]) for a, b in paired(runs) if kind[a["name"]] == k] for k in kind.values()}
    draw("filter.svg", "Success with and without the filter", "no filter", "top-p 0.9", pairs, diagonal=True)
    norms = {part: [(n, b[part]) for n, b in enumerate(results["buckets"])] for part in ("task", "entropy", "kl")}
    draw("gradients.svg", "Gradient norms by reward variance", "bucket of in-group reward std", "norm", norms, "o-")
    return found
