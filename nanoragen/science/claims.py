"""What the runs of a sweep (reproduce.py) say about the claims of RAGEN-2: claims with intervals, a table, figures.

What is asked, and of which numbers. MI: `mi_seq_estimate`, its share: of the bound H(X) of that step; entropy:
`conditional_entropy_est`, H(Z|X) a token; "final": mean over the last quarter of the steps, "first": the first measurement, of the
starting model; success: held-out, after the last step.

    (a) does MI go with success across runs, and more strongly than entropy?   Spearman, bootstrap over runs
    (b) does the filter raise success and MI, and what does a step cost?       differences of pairs that differ in nothing else, t
    (c) does MI's share fall by more than half where entropy stays within 10%, the runs are listed
        or where it does not fall?
    (d) does the task gradient grow with in-group reward variance?             top less bottom bucket, t over runs without noise

A claim is "reproduced" where its 95% interval lies above 0, "not reproduced" where it lies below, else "undecided"; of (c) it is
said in how many runs it was seen, with Wilson's interval of that share.

Left out: a correction for asking several questions, and independence of runs that share a seed (their prompts are the same).
"""

import math

import numpy as np

from nanoragen.run import metrics
from nanoragen.science.statistics import bootstrap, spearman, t_interval, verdict

FIRST_TURN = "collapse_first_turn_sample/"
MEASURED = {"mi": "mi_seq_estimate", "entropy": "conditional_entropy_est"}


def mean(values) -> float:
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else math.nan


def summary(name: str, lines: list[dict], env: str) -> dict:
    """A run in a few numbers, from its metrics.jsonl; NaN where nothing was measured."""
    filter, intervention, seed = name.split("-")
    found = {"name": name, "filter": filter, "intervention": intervention, "seed": int(seed)}
    found["success"] = lines[-1][f"eval/{env}/success"]
    of = {short: [m.get(FIRST_TURN + key) for m in lines] for short, key in MEASURED.items()}
    bound = [m.get(FIRST_TURN + "mi_upper_bound") for m in lines]
    of["share"] = [mi / b if mi is not None and b else None for mi, b in zip(of["mi"], bound)]  # H(X) differs from step to step
    for short, values in of.items():
        found[f"{short}_first"] = next((v for v in values if v is not None), math.nan)
        found[short] = mean(values[-max(1, len(values) // 4) :])
    times = [m["step_time"] - m.get("time/gradients", 0.0) for m in lines]  # what the run would take without measuring them
    found["step_time"] = float(np.median(times))
    found["kept"] = mean(m.get("rollout/filter_kept_ratio") for m in lines)
    found["buckets"] = bucket_means(lines)
    return found


def bucket_means(lines) -> list[dict]:
    """Norms of each bucket of in-group reward std, lowest first, averaged over the measured steps; of task also noise and power."""
    count = max((int(k.split("/")[1]) + 1 for m in lines for k in m if k.startswith("grad_norm/")), default=0)
    found = []
    for n in range(count):
        rows = [{k.split("/")[2]: v for k, v in m.items() if k.startswith(f"grad_norm/{n}/")} for m in lines]
        one = {part: mean(r.get(part) for r in rows) for part in ("task", "entropy", "kl", "std_min", "std_max", "groups")}
        split = [(r["task"] ** 2, r["task"] ** 2 / (1 + r["snr"])) for r in rows if r.get("snr") is not None]
        found.append({**one, "power": mean(p for p, _ in split), "noise": mean(n for _, n in split)})
    return found


def collapsed(run: dict, most=math.inf) -> bool:
    """Template collapse that entropy does not see: over half of MI / H(X) goes, and entropy stays above 90% (and at most `most`) of its start."""
    return 0.9 * run["entropy_first"] <= run["entropy"] <= most * run["entropy_first"] and run["share"] < 0.5 * run["share_first"]


def analyse(runs: list[dict]) -> dict:
    """runs: summaries. Returns the claims with value, interval and verdict, and the tables behind them."""
    claims = []

    def claim(text, value, low, high, n, unit="", judged=True):
        said = verdict(low, high, n) if judged else "measured"
        claims.append({"claim": text, "value": value, "low": low, "high": high, "n": n, "unit": unit, "verdict": said})

    rows = [(r["mi"], r["entropy"], r["success"]) for r in runs if math.isfinite(r["mi"]) and math.isfinite(r["entropy"])]
    of = {"mi": lambda x: spearman(x[:, 0], x[:, 2]), "entropy": lambda x: spearman(x[:, 1], x[:, 2])}
    table = np.array(rows, dtype=float).reshape(-1, 3)

    def stronger(x):
        return abs(of["mi"](x)) - abs(of["entropy"](x))

    for text, statistic, judged in (
        ("final MI goes with success (rank correlation)", of["mi"], True),
        ("final entropy and success (rank correlation)", of["entropy"], False),
        ("MI goes with success more strongly than entropy does (difference of absolute rank correlations)", stronger, True),
    ):
        claim(text, statistic(table) if len(rows) else math.nan, *bootstrap(statistic, table), len(rows), judged=judged)

    pairs = paired(runs)
    for text, key, unit in (
        ("the filter raises held-out success", "success", "points"),
        ("the filter keeps more MI", "mi", "nats"),
    ):
        scale = 100 if unit == "points" else 1
        gained = [scale * (a[key] - b[key]) for a, b in pairs if math.isfinite(a[key] - b[key])]
        claim(text, *t_interval(gained), len(gained), unit)
    value, *around = t_interval([100 * (a["step_time"] / b["step_time"] - 1) for a, b in pairs])
    claim("time a step with the filter, against none", value, *around, len(pairs), "%", judged=False)

    known = [r for r in runs if all(math.isfinite(r[k]) for k in ("share", "share_first", "entropy", "entropy_first"))]
    for text, most in (("entropy stays within 10%", 1.1), ("entropy does not fall (by over 10%)", math.inf)):
        names, n = [r["name"] for r in known if collapsed(r, most)], len(known)
        low, high = metrics.wilson(len(names), n)
        one = {"value": 100 * len(names) / n if n else math.nan, "low": 100 * low, "high": 100 * high, "n": n, "unit": "% of runs"}
        one["verdict"] = f"seen in {len(names)} of {n}"
        claims.append({"claim": f"runs whose MI, as a share of its bound, falls by more than half while {text}", **one})

    clean = [r for r in runs if not r["intervention"].startswith("noise") and len(r["buckets"]) > 1]
    ends = [(r["buckets"][-1], r["buckets"][0]) for r in clean]
    task = [top["task"] - bottom["task"] for top, bottom in ends]
    lead = [a["task"] / a["entropy"] - b["task"] / b["entropy"] for a, b in ends if a["entropy"] > 0 and b["entropy"] > 0]
    for text, found in (
        ("the task gradient is larger where rewards vary most than where they vary least (norms)", task),
        ("so is its ratio to the entropy gradient, where there is one", lead),
    ):
        found = [x for x in found if math.isfinite(x)]
        claim(text, *t_interval(found), len(found))
    return {"claims": claims, "collapsed": names, "buckets": pooled([r["buckets"] for r in clean])}


def paired(runs: list[dict]) -> list[tuple[dict, dict]]:
    """(run with the filter, run without): the same intervention and seed."""
    without = {(r["intervention"], r["seed"]): r for r in runs if r["filter"] == "none"}
    keyed = [(r, without.get((r["intervention"], r["seed"]))) for r in runs if r["filter"] != "none"]
    return [(a, b) for a, b in keyed if b]


def pooled(runs: list[list[dict]]) -> list[dict]:
    """Buckets averaged over runs; snr from the mean signal and the mean noise, which averages better than ratios do."""
    found = []
    for n in range(max(map(len, runs), default=0)):
        here = [b[n] for b in runs if len(b) > n]
        one = {k: mean(b[k] for b in here if math.isfinite(b[k])) for k in here[0]}
        power, noise = one.pop("power"), one.pop("noise")
        found.append({**one, "snr": (power - noise) / noise if noise else 0.0})
    return found


# -- words and pictures ------------------------------------------------------------------------------------------------


def number(x, digits=2) -> str:
    return "–" if x is None or not math.isfinite(x) else f"{x:.{digits}f}" if isinstance(x, float) else str(x)


def markdown(results: dict) -> str:
    runs, claims = results["runs"], results["claims"]
    out = ["| claim | measured | 95% interval | n | verdict |", "|---|---|---|---|---|"]
    for c in claims:
        said = c["verdict"] if c["verdict"] == "measured" else f"**{c['verdict']}**"
        interval = "–" if c["low"] is None else f"{number(c['low'])} to {number(c['high'])}"
        out.append(f"| {c['claim']} | {number(c['value'])} {c['unit']} | {interval} | {c['n']} | {said} |".replace("  ", " "))
    lost = results["collapsed"]
    out += ["", "Template collapse that entropy does not see: " + (", ".join(lost) if lost else "there was no such run") + "."]
    if results["unfinished"]:
        out += ["", f"Not finished, and not in any figure: {', '.join(results['unfinished'])}."]
    out += ["", "| filter | intervention | seeds | success (range) | MI, first → final | H(Z\\|X), first → final | s a step | kept |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for filter, intervention in dict.fromkeys((r["filter"], r["intervention"]) for r in sorted(runs, key=lambda r: r["filter"])):
        these = [r for r in runs if (r["filter"], r["intervention"]) == (filter, intervention)]
        of = {k: mean(r[k] for r in these) for k in ("success", "mi", "mi_first", "entropy", "entropy_first", "step_time", "kept")}
        low, high = (f(r["success"] for r in these) for f in (min, max))
        out.append(
            f"| {filter} | {intervention.replace('_', ' ')} | {len(these)} | {of['success']:.1%} ({low:.1%} to {high:.1%}) | "
            f"{number(of['mi_first'])} → {number(of['mi'])} | {number(of['entropy_first'])} → {number(of['entropy'])} | "
            f"{number(of['step_time'])} | {number(of['kept'])} |"
        )
    out += ["", "| bucket | in-group reward std | task | entropy | KL | SNR of task |", "|---|---|---|---|---|---|"]
    for n, b in enumerate(results["buckets"]):
        edges = f"{number(b['std_min'])} to {number(b['std_max'])}"
        out.append(
            f"| {n} | {edges} | {number(b['task'], 3)} | {number(b['entropy'], 3)} | {number(b['kl'], 3)} | {number(b['snr'])} |"
        )
    return "\n".join(out) + "\n"


COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed")


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from at or under low to at or over high."""
    raw = (high - low) / 4 or abs(low) or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= raw * (1 - 1e-9))
    return [step * n for n in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def svg(series: dict[str, list], title: str, x: str, y: str, *, lines=False, diagonal=False) -> str:
    """Points (x, y), or lines through them, of each named series; non-finite points are left out. White ground, for dark pages."""
    series = {k: [p for p in v if all(map(math.isfinite, p))] for k, v in series.items()}
    points = [p for v in series.values() for p in v] or [(0.0, 0.0)]
    across, up = ([p[i] for p in points] + ([q[1 - i] for q in points] if diagonal else []) for i in (0, 1))
    xs, ys = ticks(min(across), max(across)), ticks(min(up), max(up))

    def at(px, py):
        right, high = (xs[-1] - xs[0]) or 1.0, (ys[-1] - ys[0]) or 1.0
        return f"{70 + 380 * (px - xs[0]) / right:.1f}", f"{300 - 250 * (py - ys[0]) / high:.1f}"

    def text(px, py, words, more=""):
        words = str(words).replace("&", "&amp;").replace("<", "&lt;")
        return f'<text x="{px}" y="{py}" {more}>{words}</text>'

    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 380" font-family="sans-serif" font-size="12" fill="#222">',
           '<rect width="480" height="380" fill="#fff"/>', text(240, 24, title, 'text-anchor="middle" font-size="14"')]  # fmt: skip
    for v in xs:
        px, _ = at(v, ys[0])
        out += [f'<path d="M{px} 50V300" stroke="#ddd"/>', text(px, 316, f"{v:.3g}", 'text-anchor="middle"')]
    for v in ys:
        _, py = at(xs[0], v)
        out += [f'<path d="M70 {py}H450" stroke="#ddd"/>', text(64, py, f"{v:.3g}", 'text-anchor="end" dy="4"')]
    if diagonal:
        out.append('<path d="M{} {}L{} {}" stroke="#888" stroke-dasharray="4"/>'.format(*at(xs[0], xs[0]), *at(xs[-1], xs[-1])))
    for n, (name, these) in enumerate(series.items()):
        color, spots = COLORS[n % len(COLORS)], [at(*p) for p in these]
        if lines and spots:
            out.append(f'<path d="M{"L".join(" ".join(p) for p in spots)}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{px}" cy="{py}" r="4" fill="{color}" fill-opacity="0.7"/>' for px, py in spots]
        out += [f'<circle cx="{80 + 95 * n}" cy="364" r="4" fill="{color}"/>', text(88 + 95 * n, 368, name)]
    out += [
        text(260, 340, x, 'text-anchor="middle"'),
        text(20, 175, y, 'text-anchor="middle" transform="rotate(-90 20 175)"'),
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def figures(results: dict) -> dict[str, str]:
    """{file name: SVG}."""
    runs, found = results["runs"], {}
    kinds = list(dict.fromkeys(r["intervention"].split("_")[0] for r in runs))
    for key, label in (("mi", "MI (nats)"), ("entropy", "H(Z|X) (nats a token)")):
        series = {k: [(r[key], r["success"]) for r in runs if r["intervention"].split("_")[0] == k] for k in kinds}
        found[f"{key}.svg"] = svg(series, f"Final {label} and success, one point a run", label, "held-out success")
    pairs = {k: [(b["success"], a["success"]) for a, b in paired(runs) if a["intervention"].split("_")[0] == k] for k in kinds}
    found["filter.svg"] = svg(pairs, "Success with and without the filter", "no filter", "top-p 0.9", diagonal=True)
    norms = {p: [(float(n), b[p]) for n, b in enumerate(results["buckets"])] for p in ("task", "entropy", "kl")}
    found["gradients.svg"] = svg(norms, "Gradient norms by reward variance", "bucket of in-group reward std", "norm", lines=True)
    return found
