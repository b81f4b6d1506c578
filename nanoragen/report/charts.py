"""The charts of the report, drawn by matplotlib: what each shows, what healthy looks like, and what this run looks like.

All numbers are the log's; of a long run a line has at most MAX_POINTS of them. A chart is drawn in marker colours that
`as_svg` replaces by the style sheet's variables, so that it follows the page into dark mode.
"""

import io
import math
import re
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nanoragen.collapse import regimes
from nanoragen.report.runs import number, spread, visible
from nanoragen.report.verdict import percent, spoken
from nanoragen.run import metrics

MAX_POINTS = 300  # of a line of a chart
MAX_BARS = 40
COLOURS = ("text", "muted", "grid", "c0", "c1", "c2", "c3", "c4", "c5")
MARKERS = {name: f"#fe{i:02x}fd" for i, name in enumerate(COLOURS)}
CSS = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w{6})", CSS.split("@media")[0]))
LOOK = {"svg.fonttype": "none", "text.parse_math": False, "font.family": ["DejaVu Sans"], "font.size": 11, "path.simplify": True}


class Chart(NamedTuple):
    """lines: (metric, its label, style) of each; {env} and {sample} in a metric are the run's. percent: the axis is 0 to 100%."""

    section: str
    title: str
    healthy: str
    lines: tuple
    unit: str = ""
    percent: bool = False


S = "{sample}"
CHARTS = {
    "success": Chart("Learning", "Success", "rises, on held-out episodes too; intervals that overlap prove nothing. Training episodes are "
                     "new every step, so they jump.", (("{env}/success", "training episodes", "thin"),), "", True),
    "reward": Chart("Learning", "Reward", "rises with success; reward without success means the reward is gamed.",
                    (("reward", "mean reward, 95% as if episodes were independent", "-"),)),
    "information": Chart("Reasoning", "Mutual information of prompt and reasoning", "MI stays near its upper bound, the entropy of the "
                         "prompts: knowing the reasoning, one knows the prompt. At 0 the reasoning ignores the prompt.",
                         ((S + "mi_seq_estimate", "MI, 95%", "-"), (S + "mi_upper_bound", "upper bound H(X)", "--")), "nats"),
    "entropy_of_reasoning": Chart("Reasoning", "Entropy of the reasoning for a prompt, H(Z|X)", "stays well above 0. It cannot see template "
                                  "collapse: that is H(Z|X) that stays while MI falls.",
                                  ((S + "conditional_entropy_est", "H(Z|X), 95%", "-"),), "nats a token"),
    "retrieval": Chart("Reasoning", "Can the prompt be told from the reasoning?", "far above chance: the prompt under which a reasoning is "
                       "most probable is the one that it was written for.",
                       ((S + "retrieval_accuracy", "retrieval, 95%", "-"), (S + "retrieval_chance_level", "chance", "--")), "", True),
    "spread": Chart("Groups", "Reward spread inside a group", "well above 0: what differs inside a group is the only signal to learn from.",
                    (("rollout/in_group_reward_std", "in-group reward std", "-"),)),
    "kept": Chart("Groups", "Groups that train", "most groups differ inside and many are kept; none kept means too easy, too hard, or a "
                  "filter too strict.", (("rollout/filter_kept_ratio", "groups kept", "-"),
                                         ("rollout/zero_variance_ratio", "groups without variance", "--")), "", True),
    "loss": Chart("Optimisation", "Loss", "stays of one size. It need not fall: advantages are relative, so that its mean is near 0.",
                  (("loss", "loss", "-"),)),
    "kl": Chart("Optimisation", "KL divergence", "small and slow. To the policy that sampled: far under 1. To the reference model (--beta): "
                "grows slowly.", (("approx_kl", "to the policy that sampled", "-"), ("kl", "to the reference", "--")), "nats a token"),
    "gradient": Chart("Optimisation", "Gradient norm", "of one size, without jumps of a factor of ten.",
                      (("grad_norm", "norm before clipping", "-"),)),
    "clipped": Chart("Optimisation", "Clipped tokens", "a few per cent at most; much more means that --lr is too high.",
                     (("clip_ratio/region_mean", "share of tokens whose ratio is clipped", "-"),), "", True),
    "entropy": Chart("Optimisation", "Entropy of the policy", "falls slowly. At 0 nothing is explored any more; a rise while success falls "
                     "means that the policy comes apart.", (("entropy", "entropy", "-"),), "nats a token"),
    "length": Chart("Replies", "Length", "settles. Growth without success is padding.",
                    (("completions/mean_length", "sampled tokens an episode", "-"), ("completions/max_length", "longest reply", "--")), "tokens"),
    "parse": Chart("Replies", "Replies that parse", "near 100%.", (("rollout/parse_rate", "parse rate", "-"),
                   ("completions/clipped_ratio", "cut at --max_tokens", "--")), "", True),
}  # fmt: skip
SECTIONS = ("Learning", "Reasoning", "Groups", "Optimisation", "Replies", "Time")


def short(x) -> str:
    return f"{x:.3g}" if x and abs(x) < 1 else f"{x:.2f}"


def error_of(view, key, m):
    """The standard error of a metric in a step, or None."""
    if key == "reward":
        episodes = (number(view.config.get("groups")) or 0) * (number(view.config.get("group_size")) or 0)
        return m["reward_std"] / episodes**0.5 if episodes > 0 and m.get("reward_std") is not None else None
    return m.get(key + "_se")


def line(view, key, label, style, colour) -> dict | None:
    """A metric over the steps with value +- 1.96 standard errors where they are known; None without any number."""
    x, y = view.run.series(key)
    if all(v is None for v in y):
        return None
    errors = [None if v is None else error_of(view, key, view.run.steps[s]) for s, v in zip(x, y)]
    half = [None if e is None else abs(metrics.Z95 * e) for e in errors]
    kept = spread(range(len(x)), MAX_POINTS)
    pick = lambda values: [values[i] for i in kept]
    return {"label": label, "style": style, "colour": colour, "x": pick(x), "y": pick(y), "half": pick(half)}


def held_out(view, colour) -> dict | None:
    if not view.evaluations:
        return None
    x, results = [s for s, _ in view.evaluations], [r for _, r in view.evaluations]
    ends = [(r["success_low"], r["success_high"]) for r in results]
    half = [None if None in (low, high) else (r["success"] - low, high - r["success"]) for r, (low, high) in zip(results, ends)]
    label = "held-out episodes, 95%"
    return {"label": label, "style": "o", "colour": colour, "x": x, "y": [r["success"] for r in results], "half": half}


def lines_of(key, views) -> list[list[dict]]:
    """The lines of a chart, a list for each run. One run: a colour a line; several: a colour a run."""
    out = []
    for n, v in enumerate(views):
        found = [
            line(v, k.replace("{env}", str(v.env), 1).replace("{sample}", v.sample), label, style, n if len(views) > 1 else i)
            for i, (k, label, style) in enumerate(CHARTS[key].lines)
        ]
        found += [held_out(v, n if len(views) > 1 else 1)] if key == "success" else []
        out.append([x for x in found if x])
    return out


def sentence(key, view) -> str:
    """What a chart shows of a run."""
    name, label, _ = CHARTS[key].lines[0]
    ends = view.ends(name.replace("{env}", str(view.env), 1).replace("{sample}", view.sample))
    if key == "success" and view.evaluations:
        first, last = view.evaluations[0][1], view.evaluations[-1][1]
        at_last = f" at first, {spoken(last)} at last" if len(view.evaluations) > 1 else ", measured once"
        training = f" Training episodes: {percent(ends[0])} at first, {percent(ends[1])} at last." if ends else ""
        return f"Held out: {spoken(first)}{at_last}.{training}"
    if ends is None:
        return f"{label.split(',')[0].capitalize()}: not measured."
    words = percent if CHARTS[key].percent else short
    if key == "information":
        few = view.run.values(view.sample + "mi_seq_estimate")[-regimes.RECENT :]
        share = f", {view.recent[-1][1]:.0%} of its bound" if view.measured else ""
        return f"MI was {short(view.run.values(view.sample + 'mi_seq_estimate')[0])} nats at the first measurement and is {short(sum(few) / len(few))} in the mean of the last {len(few)}{share}."
    text = f"{words(ends[0])} in the first steps, {words(ends[1])} in the last"
    chance = view.ends(view.sample + "retrieval_chance_level") if key == "retrieval" else None
    return text + (f", where chance is {percent(chance[1])}." if chance else ".")


def time_of(views) -> tuple[list, list]:
    """([[lines]], [sentence]) on the seconds of a step: each time/<part> and the rest, or of several runs the whole."""
    names = list(dict.fromkeys(k for v in views for k in v.keys if k.startswith("time/")))
    labels = [visible(n.split("/", 1)[1]) for n in names] + ["the rest"]
    drawn, said = [], []
    for n, v in enumerate(views):
        rows = [m for m in v.history if m.get("step_time")]
        parts = [[max(0.0, m.get(k) or 0.0) for k in names] for m in rows]
        parts = [p + [max(0.0, m["step_time"] - sum(p))] for p, m in zip(parts, rows)]
        total = [sum(c) for c in zip(*parts)]
        if not rows or not sum(total):
            drawn.append([])
            said.append("Step times were not logged.")
            continue
        shares = ", ".join(f"{name} {t / sum(total):.0%}" for t, name in sorted(zip(total, labels), reverse=True))
        said.append(f"A step takes {short(sum(m['step_time'] for m in rows) / len(rows))} s on average: {shares}.")
        if len(views) > 1:
            drawn.append([line(v, "step_time", "seconds a step", "-", n)])
            continue
        size = -(-len(rows) // MAX_BARS)
        x = [rows[i]["step"] for i in range(0, len(rows), size)]
        bars = [[sum(c) / len(c) for c in zip(*parts[i : i + size])] for i in range(0, len(rows), size)]
        drawn.append([{"label": name, "style": "bar", "colour": i, "x": x, "y": [b[i] for b in bars]} for i, name in enumerate(labels)])
    return drawn, said


def gradients_of(views) -> tuple[list, list, list]:
    """([[lines]], [sentence], buckets): means over the steps of grad_norm/<bucket>/{task,entropy,kl}, of several runs the task's."""
    parts = ("task", "entropy", "kl") if len(views) == 1 else ("task",)
    natural = lambda text: [(0, int(t), "") if t.isdecimal() else (1, 0, t) for t in re.split(r"(\d+)", text)]
    found = []  # of each run: part -> bucket -> mean
    for v in views:
        found.append({})
        for key in v.keys:
            name = key.split("/")
            if len(name) == 3 and name[0] == "grad_norm" and name[2] in parts and (values := v.run.values(key)):
                found[-1].setdefault(name[2], {})[name[1]] = sum(values) / len(values)
    buckets = sorted({b for run in found for part in run.values() for b in part}, key=natural)[:12]
    drawn, said = [], []
    for n, run in enumerate(found):
        y = {p: [run[p].get(b) for b in buckets] for p in parts if p in run}
        x = list(range(len(buckets)))
        drawn.append([{"label": f"{p} gradient", "style": "-", "colour": n if len(views) > 1 else i, "x": x, "y": y[p]} for i, p in enumerate(y)])
        low, high = (y["task"][0], y["task"][-1]) if "task" in y else (None, None)
        text = "The task gradient was not measured in the first and last bucket."
        if None not in (low, high):
            text = f"The task gradient's norm is {short(low)} in the bucket of least variance and {short(high)} in that of most."
        said.append(text)
    return drawn, said, [visible(b) for b in buckets]


# -- drawing ---------------------------------------------------------------------------------------------------------------


def plot(ax, lines, paint, *, percent=False, labels=None):
    """Lines, dots with intervals and stacked bars into axes. paint: the colours by name."""
    bottom = [0.0] * len(lines[0]["x"])
    for s in lines:
        colour, x, y = paint[f"c{s['colour'] % 6}"], s["x"], [math.nan if v is None else v for v in s["y"]]
        half = s.get("half") or []
        if s["style"] == "bar":
            wide = 0.8 * min((b - a for a, b in zip(x, x[1:])), default=1)
            ax.bar(x, y, wide, bottom, color=colour)
            bottom = [a + b for a, b in zip(bottom, y)]
        elif s["style"] == "o":
            known = [(a, b, h) for a, b, h in zip(x, y, half) if h is not None]
            if known:
                low, high = ([max(0.0, h[i]) for _, _, h in known] for i in (0, 1))
                ax.errorbar([a for a, _, _ in known], [b for _, b, _ in known], [low, high], fmt="none", ecolor=colour, elinewidth=1.5)
            ax.plot(x, y, "o", color=colour, markersize=4)
        else:
            alone = [i for i, v in enumerate(y) if not math.isnan(v) and all(math.isnan(w) for w in (y[i - 1 : i] + y[i + 1 : i + 2]))]
            thin, style = s["style"] == "thin", "--" if s["style"] == "--" else "-"
            ax.plot(x, y, style, color=colour, linewidth=1 if thin else 1.6, marker="o", markersize=3, markevery=alone or [])
            if any(h is not None for h in half):
                h = [math.nan if h is None else h for h in half]
                ax.fill_between(x, [a - b for a, b in zip(y, h)], [a + b for a, b in zip(y, h)], color=colour, alpha=0.16, linewidth=0)
    numbers = [v for s in lines for v in s["y"] if v is not None]
    if percent:
        low, high = min([0.0, *numbers]), max([1.0, *numbers])
        ax.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    elif min(numbers) >= 0 and min(numbers) < max(numbers) / 2:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.yaxis.set_major_formatter(FuncFormatter((lambda v, _: f"{100 * v:.3g}%") if percent else (lambda v, _: f"{v:.4g}")))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if labels:
        ax.set_xticks(range(len(labels)), [b[:8].encode("ascii", "replace").decode() for b in labels])
    ax.set_xlabel("bucket of in-group reward std" if labels else "step", loc="right", color=paint["muted"])
    ax.tick_params(length=0, labelcolor=paint["muted"])
    ax.grid(axis="y", color=paint["grid"], linewidth=1)
    ax.set_axisbelow(True)
    for side in ("top", "left", "right"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(paint["muted"])


def as_svg(key, lines, **how) -> str:
    """A chart for the page: an <svg> without size, whose colours are the style sheet's and whose ids begin with those of no other."""
    with rc_context({**LOOK, "svg.hashsalt": key}):
        figure = Figure(figsize=(340 / 72, 190 / 72))  # matplotlib has 72 units an inch
        plot(figure.add_axes((0.16, 0.22, 0.82, 0.73)), lines, MARKERS, **how)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 340 190" role="img" aria-labelledby="{key}-title" aria-describedby="{key}-here">', text, count=1)
    text = re.sub(r"<style.*?</style>| transform=\"rotate\(-?0 [^\"]*\"|(?<=<g) id=\"[^\"]*\"|\n *", lambda m: " " if m[0][0] == "\n" else "", text)
    text = text.replace("xlink:href", "href").replace("font-family: 'DejaVu Sans'; ", "")
    text = re.sub(r' d="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    return re.sub(r"#fe([0-9a-f]{2})fd", lambda m: f"var(--{COLOURS[int(m[1], 16) % len(COLOURS)]})", text)


def picture(views, file):
    """Success, MI and H(Z|X) of one or several runs side by side, in a file of its own: .svg or .png."""
    keys = [k for k in ("success", "information", "entropy_of_reasoning") if any(lines_of(k, views))]
    if not keys:
        raise ValueError("picture: neither success nor the reasoning was logged; valid: a run of train.py with at least one step")
    filters = [str(v.config.get("filter", "none")) for v in views]
    names = [f"filter: {f}" for f in filters] if len(set(filters)) == len(views) > 1 else [v.name for v in views]
    with rc_context({**LOOK, "font.size": 10, "svg.hashsalt": "picture"}):
        figure = Figure(figsize=(3.6 * len(keys), 3.1), layout="constrained", facecolor=LIGHT["back"])
        for ax, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys):
            lines = lines_of(key, views)
            plot(ax, [s for run in lines for s in run], LIGHT, percent=CHARTS[key].percent)
            unit = f" ({CHARTS[key].unit})" if CHARTS[key].unit else ""
            ax.set_title(CHARTS[key].title.split(",")[-1].strip() + unit, color=LIGHT["text"], fontsize=10, loc="left")
            ax.set_facecolor(LIGHT["back"])
            for name, run in zip(names, lines):
                for s in run:
                    style = {"o": "o", "--": "--"}.get(s["style"], "-")
                    label = s["label"] if len(views) == 1 else f"{name}: {s['label']}"
                    ax.plot([], [], style, color=LIGHT[f"c{s['colour'] % 6}"], label=label, markersize=4)
            ax.legend(frameon=False, fontsize=7.5, labelcolor=LIGHT["text"])
        figure.savefig(file, dpi=150, metadata={"Date": None} if str(file).endswith(".svg") else None)
