"""The charts of the report: what each shows, what healthy looks like, and a sentence that says what this run looks like.

A chart is a function of the runs that are compared (`View`s, usually one) and returns None where nothing of it was logged, or

    (title, what healthy looks like, [(run, sentence)], what assets/report.js draws)

All numbers are the log's, to 6 digits; of a long run a line has at most MAX_POINTS of them.
"""

import re

from nanoragen.report.runs import Run, number, spread, tidy, visible
from nanoragen.run import metrics, regimes

MAX_POINTS = 1000  # of a line of a chart
MAX_STEPS = 24  # of which cross matrices are shown, all runs of a page together
MAX_SIDE = 32  # rows and columns of a cross matrix
FIRST, TRAJECTORY = "collapse_first_turn_sample/", "collapse_trajectory_sample/"


class View:
    """What the charts and sentences of one run have in common."""

    def __init__(self, run: Run):
        self.run, self.name, self.config, self.history = run, run.name, run.config, run.history()
        keys = {k for m in self.history for k in m}
        self.keys = sorted(keys)
        ends = [k[: -len("/success")] for k in self.keys if k.endswith("/success") and not k.startswith("eval/")]
        env = self.config.get("env")
        self.env = env if env in ends or not ends else ends[0]
        self.sample = TRAJECTORY if FIRST + "mi_seq_estimate" not in keys and TRAJECTORY + "mi_seq_estimate" in keys else FIRST
        steps, entropy = run.series(self.sample + "conditional_entropy_est")
        mi, bound = (dict(zip(*run.series(self.sample + key))) for key in ("mi_seq_estimate", "mi_upper_bound"))
        self.measured = measured = [  # [(step, H(Z|X), MI / H(X))]; with one prompt only there is nothing to tell apart
            (s, h, mi[s] / bound[s]) for s, h in zip(steps, entropy) if None not in (h, mi.get(s), bound.get(s)) and bound[s] > 0
        ]
        pairs = [(h, share) for _, h, share in measured]
        self.recent = [
            (s, *regimes.recent(pairs[max(0, i + 1 - regimes.RECENT) : i + 1])) for i, (s, _, _) in enumerate(measured)
        ]
        self.regimes = [(s, regimes.regime(h, share, *pairs[0])) for s, h, share in self.recent]
        self.evaluations = []  # [(step, {"success": , "success_low": , ...})]; step 0: before training
        for m in self.history:
            for at, prefix in ((0, "eval/before/"), (m.get("step"), "eval/")):
                result = {k: m.get(f"{prefix}{self.env}/{k}") for k in ("success", "success_low", "success_high", "episodes")}
                if number(result["success"]) is not None:
                    self.evaluations.append((at, result))

    def lines(self, key, label, style="line", low=None, high=None) -> dict | None:
        """A series of a chart, or None without any number."""
        x, y = self.run.series(key)
        if all(v is None for v in y):
            return None
        found = {"name": label, "style": style, "x": x, "y": y}
        if low and high:
            found.update(low=[number(low(self.run.steps[s])) for s in x], high=[number(high(self.run.steps[s])) for s in x])
        return found

    def around(self, key, label, error):
        """A series with the band value +- 1.96 `error` of a step's metrics."""

        def edge(sign):
            return lambda m: m[key] + sign * metrics.Z95 * e if m[key] is not None and (e := error(m)) is not None else None

        return self.lines(key, label, low=edge(-1), high=edge(1))

    def ends(self, key) -> tuple[float, float] | None:
        """Mean of the first and of the last few values (a quarter of them, at most 5)."""
        values = self.run.values(key)
        few = max(1, min(5, len(values) // 4))
        return (sum(values[:few]) / few, sum(values[-few:]) / few) if values else None


def percent(x) -> str:
    return f"{x:.1%}" if 0 < x < 1 else f"{x:.0%}"


def short(x) -> str:
    return f"{x:.3g}" if x and abs(x) < 1 else f"{x:.2f}"


def spoken(result) -> str:
    """An evaluation in words."""
    low, high = result["success_low"], result["success_high"]
    return percent(result["success"]) + (f" (95%: {percent(low)} to {percent(high)})" if None not in (low, high) else "")


def learned(view) -> str:
    """rose, fell, unclear (the 95% intervals overlap) or unknown: the last held-out success against the first."""
    found = [r for _, r in view.evaluations if None not in (r["success_low"], r["success_high"])]
    if len(found) < 2:
        return "unknown"
    first, last = found[0], found[-1]
    if last["success_low"] > first["success_high"]:
        return "rose"
    return "fell" if last["success_high"] < first["success_low"] else "unclear"


def several(views, series, sentence) -> tuple[list, list]:
    """(sentences, series) of all runs; `series(view)` gives a list with None where there is nothing."""
    said, drawn = [], []
    for n, view in enumerate(views):
        found = [s for s in series(view) if s]
        for s in found:
            kept = spread(range(len(s["x"])), MAX_POINTS)
            s.update({k: [tidy(s[k][i]) for i in kept] for k in ("x", "y", "low", "high") if k in s}, color=s.get("color", n))
            if len(views) > 1:
                s["name"] = f"{view.name}: {s['name']}"
        drawn += found
        said.append((view.name, sentence(view) if found else "This was not measured."))
    return said, drawn


def lines_chart(title, healthy, views, series, sentence, **more):
    said, drawn = several(views, series, sentence)
    return (title, healthy, said, {"kind": "lines", "series": drawn, **more}) if drawn else None


def success_chart(views):
    def series(v):
        x = [s for s, _ in v.evaluations]
        y, low, high = ([r[k] for _, r in v.evaluations] for k in ("success", "success_low", "success_high"))
        held = {"name": "held-out episodes, 95%", "style": "dots", "x": x, "y": y, "low": low, "high": high} if x else None
        return [v.lines(f"{v.env}/success", "training episodes"), held]

    def sentence(v):
        ends = v.ends(f"{v.env}/success")
        text = f"Training episodes succeed in {percent(ends[0])} at first and {percent(ends[1])} at last." if ends else ""
        if v.evaluations:
            last = f" at first, {spoken(v.evaluations[-1][1])} at last" if len(v.evaluations) > 1 else ", measured once"
            text = f"Held out: {spoken(v.evaluations[0][1])}{last}. {text}"
        return text

    healthy = (
        "rises, on held-out episodes too; intervals that overlap prove nothing. Training episodes are new every step, so they jump."
    )
    return lines_chart("Success", healthy, views, series, sentence, range=[0, 1], percent=True, y="success")


def reward_chart(views):
    def series(v):
        episodes = (number(v.config.get("groups")) or 0) * (number(v.config.get("group_size")) or 0)
        error = lambda m: m["reward_std"] / episodes**0.5 if episodes and m.get("reward_std") is not None else None
        return [v.around("reward", "mean reward, 95% as if episodes were independent", error)]

    def sentence(v):
        first, last = v.ends("reward")
        return f"The mean reward went from {short(first)} in the first steps to {short(last)} in the last."

    return lines_chart(
        "Reward", "rises with success; reward without success means the reward is gamed.", views, series, sentence, y="reward"
    )


def regime_chart(views):
    """H(Z|X) against MI / H(X), each over the run's first measurement; where that is not above 0, as it is."""
    said, drawn, strips = [], [], []
    for n, v in enumerate(views):
        if not v.measured:
            said.append((v.name, unmeasured(v)))
            continue
        h0, share0 = v.measured[0][1:]
        kept = spread(range(len(v.measured)), MAX_POINTS)
        points = [v.recent[i] for i in kept]
        scale = [h0 if h0 > 0 else 1.0, share0 if share0 > 0 else 1.0]
        drawn.append({
            "name": v.name, "color": n, "step": [p[0] for p in points],
            "x": [tidy(p[1] / scale[0]) for p in points], "y": [tidy(p[2] / scale[1]) for p in points],
            "regime": [v.regimes[i][1] for i in kept],
        })  # fmt: skip
        strips.append({"name": v.name, "spells": spells(v.regimes)})
        text = f"Last: {found_and_todo(v)[0]}. {over_time(v.regimes)}"
        if min(h0, share0) <= 0:
            text += " A first measurement is not above 0, so that axis is not relative to it."
        said.append((v.name, text))
    healthy = (
        "stays in the upper right corner: the reasoning varies (H(Z|X), to the right) and depends on its prompt (MI as a share of its bound, up). Falling "
        "down is template collapse, which entropy alone does not show. 1 is the run's first measurement, a point the mean of "
        f"the last {regimes.RECENT}."
    )
    spec = {
        "kind": "map",
        "low": regimes.LOW,
        "runs": drawn,
        "strips": strips,
        "x": "H(Z|X) / first",
        "y": "MI of its bound / first",
    }
    return ("Reasoning regimes", healthy, said, spec) if drawn else None


def unmeasured(view) -> str:
    """Why there is no regime."""
    if view.run.values(view.sample + "mi_upper_bound"):
        return "With one prompt a step there is nothing to tell apart (--groups)."
    return "Neither was measured (--mi_every)."


def found_and_todo(view) -> tuple[str, str]:
    """The last regime with its numbers and what it means, and what to do about it (both from regimes.py)."""
    todo = regimes.advice(view.regimes[-1][1], view.config)
    found = regimes.regime_sentence(*view.recent[-1][1:], *view.measured[0][1:], view.config)
    return found.removesuffix(f"; {todo}"), todo


def spells(regimes) -> list:
    """[(step, name)] -> [[first step, last step, name]] of the stretches in which nothing changes."""
    out = []
    for step, name in regimes:
        if out and out[-1][2] == name:
            out[-1][1] = step
        else:
            out.append([step, step, name])
    return out


def over_time(regimes) -> str:
    stretches = [(f"steps {a} to {b}" if a < b else f"step {a}") + f": {name}" for a, b, name in spells(regimes)]
    if len(stretches) > 6:
        names = [name for _, name in regimes]
        return "Of all measurements: " + ", ".join(f"{names.count(n)} {n}" for n in dict.fromkeys(names)) + "."
    return "Over time: " + "; ".join(stretches) + "."


def information_chart(views):
    def series(v):
        key = v.sample + "mi_seq_estimate"
        mi = v.around(key, "MI, 95%", lambda m: m.get(key + "_se"))
        return [mi, v.lines(v.sample + "mi_upper_bound", "upper bound H(X)", "dash")]

    def sentence(v):
        mi = v.run.values(v.sample + "mi_seq_estimate")
        if not mi:
            return "MI was not measured."
        last = mi[-regimes.RECENT :]
        text = f"MI was {short(mi[0])} nats at the first measurement and is {short(sum(last) / len(last))} in the mean of the last {len(last)}"
        return text + (f", {v.recent[-1][2]:.0%} of its bound." if v.measured else ".")

    healthy = "MI stays near its upper bound, the entropy of the prompts: knowing the reasoning, one knows the prompt. At 0 it ignores the prompt."
    return lines_chart("What the reasoning knows of its prompt", healthy, views, series, sentence, y="nats", zero=True)


def retrieval_chart(views):
    def series(v):
        key = v.sample + "retrieval_accuracy"
        found = v.around(key, "retrieval, 95%", lambda m: m.get(key + "_se"))
        return [found, v.lines(v.sample + "retrieval_chance_level", "chance", "dash")]

    def sentence(v):
        found, chance = v.ends(v.sample + "retrieval_accuracy"), v.ends(v.sample + "retrieval_chance_level")
        if not found or not chance:
            return "Retrieval or its chance level was not measured."
        return (
            f"Retrieval was {percent(found[0])} at first and is {percent(found[1])} at last, where chance is {percent(chance[1])}."
        )

    healthy = "far above chance: the prompt under which a reasoning is most probable is the one that it was written for."
    more = {"range": [0, 1], "percent": True, "y": "retrieval"}
    return lines_chart("Can the prompt be told from the reasoning?", healthy, views, series, sentence, **more)


def cross_chart(views):
    said, drawn = [], []
    for v in views:
        frames = []
        for step in spread(v.run.has("cross.jsonl"), max(2, MAX_STEPS // len(views))):
            frames += [f for r in list(v.run.records("cross.jsonl", step))[-1:] if (f := frame(step, r))]
        if not frames:
            said.append((v.name, "No cross matrix was logged."))
            continue
        drawn.append({"name": v.name, "frames": frames})
        last = frames[-1]
        own = [row[j] for row, j in zip(last["p"], last["own"]) if row[j] is not None]
        mean = f"{percent(sum(own) / len(own))} of the probability on average" if own else "no finite probability"
        # reasoning that ignores its prompt leaves each prompt its weight, the share of rows that are its own
        chance = sum(last["own"].count(j) for j in last["own"]) / (len(last["own"]) * last["size"][0])
        said.append((v.name, f"At step {last['step']} a reasoning's own prompt has {mean}; chance is {percent(chance)}."))
    healthy = (
        "strong on the outlined cells, faint elsewhere. Row: a reasoning. Column: a prompt. Colour: how probable it is that the reasoning "
        "was written for that prompt. Collapsed reasoning makes all rows alike."
    )
    return ("Which prompt was this written for?", healthy, said, {"kind": "heat", "runs": drawn}) if drawn else None


def frame(step, record) -> dict | None:
    """A checked line of cross.jsonl for the page."""
    p, own, size = (record.get(k) for k in ("posterior", "own", "size"))
    if not isinstance(p, list) or not p or not isinstance(own, list) or len(own) != len(p):
        return None
    p = [[number(x) for x in row[:MAX_SIDE]] for row in p[:MAX_SIDE] if isinstance(row, list) and len(row) == len(p[0])]
    own = own[:MAX_SIDE]
    if len(p) != len(own) or not p[0] or not all(type(j) is int and 0 <= j < len(p[0]) for j in own):
        return None
    right = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    return {"step": step, "p": p, "own": own, "size": size if right else [len(p), len(p[0])]}


def spread_chart(views):
    def sentence(v):
        std = v.ends("rollout/in_group_reward_std")
        return f"In-group reward std was {short(std[0])} in the first steps and is {short(std[1])} in the last." if std else ""

    healthy = "well above 0: what differs inside a group is the only signal there is to learn from."
    series = lambda v: [v.lines("rollout/in_group_reward_std", "in-group reward std")]
    return lines_chart("Reward spread inside a group", healthy, views, series, sentence, y="std of rewards", zero=True)


def kept_chart(views):
    def sentence(v):
        kept, flat = v.ends("rollout/filter_kept_ratio"), v.ends("rollout/zero_variance_ratio")
        text = f"In the last steps {percent(kept[1])} of the groups trained" if kept else "What was kept was not logged"
        return text + (f"; in {percent(flat[1])} all episodes earned the same." if flat else ".")

    healthy = "most groups differ inside and many are kept; none kept means too easy, too hard, or a filter too strict."
    series = lambda v: [
        v.lines("rollout/filter_kept_ratio", "groups kept"),
        v.lines("rollout/zero_variance_ratio", "groups without variance", "dash"),
    ]
    return lines_chart("Groups that train", healthy, views, series, sentence, range=[0, 1], percent=True, y="share of groups")


def gradient_chart(views):
    """Mean norm over the logged steps of grad_norm/<bucket>/{task,entropy,kl}, buckets in natural order; absent: no section."""
    parts = ("task", "entropy", "kl")
    natural = lambda text: [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", text)]
    found = {}  # run -> part -> bucket -> mean
    for n, v in enumerate(views):
        for key in v.keys:
            name = key.split("/")
            if len(name) == 3 and name[0] == "grad_norm" and name[2] in parts and (values := v.run.values(key)):
                found.setdefault(n, {}).setdefault(name[2], {})[name[1]] = sum(values) / len(values)
    buckets = sorted({b for run in found.values() for part in run.values() for b in part}, key=natural)
    if not buckets:
        return None

    def series(v):
        run = found.get(views.index(v), {})
        kinds = [p for p in parts if p in run]
        return [
            {"name": p, "style": "line", "x": list(range(len(buckets))), "y": [run[p].get(b) for b in buckets], "color": i}
            for i, p in enumerate(kinds)
        ]

    def sentence(v):
        task = found[views.index(v)].get("task", {})
        low, high = task.get(buckets[0]), task.get(buckets[-1])
        if low is None or high is None:
            return "The task gradient was not measured in the first and last bucket."
        return f"The task gradient's norm is {short(low)} in the bucket of least variance and {short(high)} in that of most."

    healthy = (
        "the task gradient grows with reward variance and stands above entropy's and KL's; where it does not, regularisers win."
    )
    more = {
        "labels": [visible(b) for b in buckets],
        "y": "norm, mean over steps",
        "xlabel": "bucket of in-group reward std",
        "zero": True,
    }
    return lines_chart("Gradients by reward variance", healthy, views, series, sentence, **more)


def time_chart(views):
    """Seconds of a step: each time/<part>, and the rest of step_time. Several runs, or many steps: means."""
    said, drawn = [], []
    names = list(dict.fromkeys(k for v in views for m in v.history for k in m if k.startswith("time/")))
    for v in views:
        rows = [m for m in v.history if m.get("step_time")]
        if not rows:
            said.append((v.name, "Step times were not logged."))
            continue
        parts = [[m.get(k) or 0.0 for k in names] for m in rows]
        parts = [p + [max(0.0, m["step_time"] - sum(p))] for p, m in zip(parts, rows)]
        mean = lambda several: [tidy(sum(c) / len(several)) for c in zip(*several)]
        size = -(-len(rows) // 40) if len(views) == 1 else len(rows)
        for i in range(0, len(rows), size):
            first, last = rows[i]["step"], rows[min(i + size, len(rows)) - 1]["step"]
            label = v.name if len(views) > 1 else str(first) if first == last else f"{first} to {last}"
            drawn.append([label, mean(parts[i : i + size])])
        total, whole = mean(parts), sum(m["step_time"] for m in rows) / len(rows)
        shares = sorted(zip(total, [n.split("/", 1)[1] for n in names] + ["the rest"]), reverse=True)
        text = ", ".join(f"{name} {t / sum(total):.0%}" for t, name in shares) if sum(total) else "nothing"
        said.append((v.name, f"A step takes {short(whole)} s on average: {text}."))
    healthy = "rollouts take most of it, the diagnosis under 10%. The rest is scoring and updates; evaluations are not in it."
    parts = [visible(n.split("/", 1)[1]) for n in names] + ["the rest"]
    label = "" if len(views) > 1 else "step"
    spec = {"kind": "bars", "parts": parts, "bars": drawn, "y": "seconds a step", "xlabel": label}
    return ("Where the time goes", healthy, said, spec) if drawn else None


CHARTS = {
    "success": success_chart, "reward": reward_chart, "regimes": regime_chart, "information": information_chart,
    "retrieval": retrieval_chart, "cross": cross_chart, "spread": spread_chart, "kept": kept_chart,
    "gradients": gradient_chart, "time": time_chart,
}  # fmt: skip
