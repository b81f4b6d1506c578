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

from nanoragen.report.runs import number, spread, visible
from nanoragen.report.verdict import percent, spoken
from nanoragen.run import metrics

MAX_POINTS = 300  # of a line of a chart
COLOURS = ("text", "muted", "grid", "c0", "c1", "c2", "c3", "c4", "c5")
MARKERS = {name: f"#fe{i:02x}fd" for i, name in enumerate(COLOURS)}
CSS = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w{6})", CSS.split("@media")[0]))
LOOK = {"svg.fonttype": "none", "text.parse_math": False, "font.family": ["DejaVu Sans"], "font.size": 11}


class Chart(NamedTuple):
    """lines: (metric, its label, style) of each; {env} and {sample} in a metric are the run's. unit "%": the axis is 0 to 100%."""

    section: str
    title: str
    unit: str
    healthy: str
    lines: tuple


S = "{sample}"
CHARTS = {
    "success": Chart("Learning", "Success", "%", "rises, on held-out episodes too; intervals that overlap prove nothing.",
                     (("{env}/success", "training episodes", "thin"),)),
    "reward": Chart("Learning", "Reward", "", "rises with success; reward without success means the reward is gamed.",
                    (("reward", "mean reward, 95% as if episodes were independent", "-"),)),
    "information": Chart("Reasoning", "Mutual information of prompt and reasoning", "nats", "near its bound, the entropy of the prompts; "
                         "at 0 the reasoning ignores the prompt.", ((S + "mi_seq_estimate", "MI, 95%", "-"), (S + "mi_upper_bound", "bound H(X)", "--"))),
    "entropy_of_reasoning": Chart("Reasoning", "Entropy of the reasoning given its prompt", "nats a token", "well above 0. If it stays while MI "
                                  "falls, that is template collapse.", ((S + "conditional_entropy_est", "H(Z|X), 95%", "-"),)),
    "retrieval": Chart("Reasoning", "Can the prompt be told from the reasoning?", "%", "far above chance.",
                       ((S + "retrieval_accuracy", "retrieval, 95%", "-"), (S + "retrieval_chance_level", "chance", "--"))),
    "spread": Chart("Groups", "Reward spread inside a group", "", "well above 0: it is the only signal to learn from.",
                    (("rollout/in_group_reward_std", "in-group reward std", "-"),)),
    "kept": Chart("Groups", "Groups that train", "%", "many; none kept means too easy, too hard, or a filter too strict.",
                  (("rollout/filter_kept_ratio", "groups kept", "-"), ("rollout/zero_variance_ratio", "without variance", "--"))),
    "gradients": Chart("Groups", "Gradients by reward variance", "mean norm", "the task's grows with the variance and stands above entropy's and "
                       "KL's; else regularisers win.", (("task", "task", "-"), ("entropy", "entropy", "--"), ("kl", "KL", "thin"))),
    "loss": Chart("Optimisation", "Loss", "", "of one size. It need not fall: advantages are relative.", (("loss", "loss", "-"),)),
    "kl": Chart("Optimisation", "KL divergence", "nats a token", "small; a jump means that --lr is too high.",
                (("approx_kl", "to the policy that sampled", "-"), ("kl", "to the reference", "--"))),
    "gradient": Chart("Optimisation", "Gradient norm", "", "of one size, without jumps.", (("grad_norm", "norm before clipping", "-"),)),
    "clipped": Chart("Optimisation", "Clipped tokens", "%", "a few per cent at most.", (("clip_ratio/region_mean", "share of tokens", "-"),)),
    "entropy": Chart("Optimisation", "Entropy of the policy", "nats a token", "falls slowly; at 0 nothing is explored any more.",
                     (("entropy", "entropy", "-"),)),
    "length": Chart("Replies", "Length", "tokens", "settles; growth without success is padding.",
                    (("completions/mean_length", "sampled in an episode", "-"), ("completions/max_length", "longest reply", "--"))),
    "parse": Chart("Replies", "Replies that parse", "%", "near 100%.", (("rollout/parse_rate", "parse", "-"),
                   ("completions/clipped_ratio", "cut at --max_tokens", "--"))),
    "seconds": Chart("Time", "Where the time goes", "seconds a step", "rollouts take most of it, the diagnosis under 10%.",
                  (("step_time", "whole step without evaluation", "--"),)),
}  # fmt: skip
SECTIONS = tuple(dict.fromkeys(c.section for c in CHARTS.values()))


def short(x) -> str:
    return f"{x:.3g}" if x and abs(x) < 1 else f"{x:.2f}"


def name_of(metric, view) -> str:
    """The metric's name in the run's log."""
    return metric.replace("{env}", str(view.env), 1) if metric.startswith("{env}") else metric.replace(S, view.sample)


def points(view, key) -> tuple:
    """(x, y, half-width of the 95% interval) of a metric; None where there is no number."""
    x, y = view.run.series(key)
    rows = [view.run.steps[s] for s in x]
    errors = [m.get(key + "_se") for m in rows]
    if key == "reward":
        episodes = (number(view.config.get("groups")) or 0) * (number(view.config.get("group_size")) or 0)
        errors = [m["reward_std"] / episodes**0.5 if episodes > 0 and m.get("reward_std") is not None else None for m in rows]
    kept = spread(range(len(x)), MAX_POINTS)
    half = [None if e is None else abs(metrics.Z95 * e) for e in errors]
    return tuple([values[i] for i in kept] for values in (x, y, half))


def by_bucket(view, part) -> tuple:
    """(bucket, mean over the steps of grad_norm/<bucket>/<part>, None)."""
    found = [(int(k.split("/")[1]), v) for k in view.keys if re.fullmatch(rf"grad_norm/\d{{1,3}}/{part}", k, re.ASCII) and (v := view.run.values(k))]
    found = sorted((bucket, sum(v) / len(v)) for bucket, v in found)
    return [b for b, _ in found], [v for _, v in found], [None] * len(found)


def lines_of(key, views) -> list[list[dict]]:
    """The lines of a chart, a list for each run. One run: a colour a line; several: a colour a run, and of time the whole step."""
    out = []
    for n, v in enumerate(views):
        parts, found = CHARTS[key].lines, []
        if key == "seconds" and len(views) == 1:
            parts = (*((k, visible(k.split("/", 1)[1]), "-") for k in v.keys if k.startswith("time/")), *parts)
        for metric, label, style in parts:
            x, y, half = by_bucket(v, metric) if key == "gradients" else points(v, name_of(metric, v))
            found.append({"label": label, "style": style, "x": x, "y": y, "half": half})
        if key == "success":
            results = [r for _, r in v.evaluations]
            half = [None if None in (low := r["success_low"], high := r["success_high"]) else (r["success"] - low, high - r["success"]) for r in results]
            x, y = [s for s, _ in v.evaluations], [r["success"] for r in results]
            found.append({"label": "held-out episodes, 95%", "style": "o", "x": x, "y": y, "half": half})
        for i, s in enumerate(found):
            s["colour"] = f"c{(n if len(views) > 1 else i) % 6}"
        out.append([s for s in found if any(y is not None for y in s["y"])])
    return out


def sentence(key, view, lines) -> str:
    """What a chart shows of a run."""
    if not lines:
        return "Not measured."
    if key == "success" and view.evaluations:
        first, last = view.evaluations[0][1], view.evaluations[-1][1]
        return f"Held out: {spoken(first)}{f' at first, {spoken(last)} at last' if len(view.evaluations) > 1 else ', measured once'}."
    words = percent if CHARTS[key].unit == "%" else short
    y = [v for v in lines[0]["y"] if v is not None]
    if key == "seconds" and (total := sum(view.run.values("step_time"))):
        shares = [f"{visible(k.split('/', 1)[1])} {sum(view.run.values(k)) / total:.0%}" for k in view.keys if k.startswith("time/")]
        return f"A step takes {short(total / len(view.run.values('step_time')))} s on average: {', '.join(shares)}."
    if key == "gradients":
        return f"The {lines[0]['label']} gradient's norm is {short(y[0])} in the bucket of least variance and {short(y[-1])} in that of most."
    first, last = view.ends(name_of(CHARTS[key].lines[0][0], view)) or (y[0], y[-1])
    chance = view.ends(view.sample + "retrieval_chance_level") if key == "retrieval" else None
    return f"{words(first)} in the first steps, {words(last)} in the last{f', where chance is {percent(chance[1])}' if chance else ''}."


# -- drawing ---------------------------------------------------------------------------------------------------------------


def plot(ax, key, lines, paint):
    """Lines with their 95% bands, and dots with intervals, into axes. paint: the colours by name."""
    for s in lines:
        colour, x, y = paint[s["colour"]], s["x"], [math.nan if v is None else v for v in s["y"]]
        known = [(a, b, h) for a, b, h in zip(x, y, s["half"]) if h is not None]
        if s["style"] == "o":
            ax.plot(x, y, "o", color=colour, markersize=4)
            for a, b, (down, up) in known:
                ax.plot([a, a], [b - down, b + up], color=colour, linewidth=1.5)
            continue
        alone = [i for i, v in enumerate(y) if v == v and all(w != w for w in y[max(0, i - 1) : i] + y[i + 1 : i + 2])]  # NaN != NaN
        width = 1 if s["style"] == "thin" else 1.6
        ax.plot(x, y, "--" if s["style"] == "--" else "-", color=colour, linewidth=width, marker="o", markersize=3, markevery=alone)
        if known:
            ax.fill_between(*zip(*((a, b - h, b + h) for a, b, h in known)), color=colour, alpha=0.16, linewidth=0)
    numbers, shares = [v for s in lines for v in s["y"] if v is not None], CHARTS[key].unit == "%"
    if shares:
        low, high = min(0.0, *numbers, 0.0), max(1.0, *numbers, 1.0)
        ax.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))
    elif 0 <= min(numbers) < max(numbers) / 2:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g}%" if shares else f"{v:.4g}"))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_xlabel("bucket of in-group reward std" if key == "gradients" else "step", loc="right", color=paint["muted"])
    ax.tick_params(length=0, labelcolor=paint["muted"])
    ax.grid(axis="y", color=paint["grid"], linewidth=1)
    ax.set_axisbelow(True)
    ax.spines[["top", "left", "right"]].set_visible(False)
    ax.spines["bottom"].set_color(paint["muted"])


def as_svg(key, lines) -> str:
    """A chart for the page: an <svg> without size, in the style sheet's colours, its ids those of no other chart."""
    with rc_context({**LOOK, "svg.hashsalt": key}):
        figure = Figure(figsize=(340 / 72, 190 / 72))  # matplotlib has 72 units an inch
        plot(figure.add_axes((0.16, 0.22, 0.82, 0.73)), key, lines, MARKERS)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    start = f'<svg viewBox="0 0 340 190" role="img" aria-labelledby="{key}-title" aria-describedby="{key}-here">'
    text = re.sub(r".*?<svg[^>]*>", start, file.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(r'<style.*?</style>| transform="rotate\(-?0 [^"]*"|(?<=<g) id="[^"]*"', "", text)
    text = re.sub(r"\n *", " ", text).replace("xlink:href", "href").replace("font-family: 'DejaVu Sans'; ", "")
    text = re.sub(r' d="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), text)
    return re.sub(r"#fe(0\d)fd", lambda m: f"var(--{COLOURS[int(m[1]) % len(COLOURS)]})", text)


def picture(views, file):
    """Success, MI and H(Z|X) of one or several runs side by side, in a file of its own: .svg or .png."""
    titles = {"success": "Success", "information": "MI (nats)", "entropy_of_reasoning": "H(Z|X) (nats a token)"}
    drawn = {key: lines for key in titles if any(lines := lines_of(key, views))}
    if not drawn:
        raise ValueError("picture: neither success nor the reasoning was logged; valid: a run of train.py with at least one step")
    filters = [str(v.config.get("filter", "none")) for v in views]
    names = [f"filter {f}" for f in filters] if len(set(filters)) == len(views) > 1 else [v.name for v in views]
    with rc_context({**LOOK, "font.size": 10, "svg.hashsalt": "picture"}):
        figure = Figure(figsize=(3.6 * len(drawn), 3.1), layout="constrained", facecolor=LIGHT["back"])
        for ax, (key, lines) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items()):
            plot(ax, key, [s for run in lines for s in run], LIGHT)
            ax.set_title(titles[key], color=LIGHT["text"], fontsize=10, loc="left")
            ax.set_facecolor(LIGHT["back"])
            for s, name in ((s, name) for name, run in zip(names, lines) for s in run):
                label = f"{name}: {s['label']}" if len(views) > 1 else s["label"]
                ax.plot([], [], {"thin": "-"}.get(s["style"], s["style"]), color=LIGHT[s["colour"]], label=label, markersize=4)
            ax.legend(frameon=False, fontsize=7.5, labelcolor=LIGHT["text"])
        figure.savefig(file, dpi=150, metadata={"Date": None} if str(file).endswith(".svg") else None)
