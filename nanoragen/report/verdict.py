"""What is said of a run in words: whether it is healthy and why, what happened in it, and which of several did better."""

from nanoragen.report.runs import Run, number
from nanoragen.run import console, metrics, regimes, stops

FIRST, TRAJECTORY = "collapse_first_turn_sample/", "collapse_trajectory_sample/"


class View:
    """What the charts and sentences of one run have in common."""

    def __init__(self, run: Run):
        self.run, self.name, self.config, self.history = run, run.name, run.config, run.history()
        self.keys = sorted({k for m in self.history for k in m})
        ends = [k[: -len("/success")] for k in self.keys if k.endswith("/success") and not k.startswith("eval/")]
        env = self.config.get("env")
        self.env = env if env in ends or not ends else ends[0]
        self.sample = TRAJECTORY if FIRST + "mi_seq_estimate" not in self.keys and TRAJECTORY + "mi_seq_estimate" in self.keys else FIRST
        steps, entropy = run.series(self.sample + "conditional_entropy_est")
        mi, bound = (dict(zip(*run.series(self.sample + key))) for key in ("mi_seq_estimate", "mi_upper_bound"))
        self.measured = [  # [(step, H(Z|X), MI / H(X))]; with one prompt only there is nothing to tell apart
            (s, h, mi[s] / bound[s]) for s, h in zip(steps, entropy) if None not in (h, mi.get(s), bound.get(s)) and bound[s] > 0
        ]
        pairs = [(h, share) for _, h, share in self.measured]
        self.recent = [regimes.recent(pairs[max(0, i + 1 - regimes.RECENT) : i + 1]) for i in range(len(pairs))]
        self.regimes = [(m[0], regimes.regime(*judged, *pairs[0])) for m, judged in zip(self.measured, self.recent)]
        self.evaluations = []  # [(step, {"success": , "success_low": , ...})]; step 0: before training
        for m in self.history:
            for at, prefix in ((0, "eval/before/"), (m.get("step"), "eval/")):
                result = {k: m.get(f"{prefix}{self.env}/{k}") for k in ("success", "success_low", "success_high", "episodes")}
                if number(result["success"]) is not None:
                    self.evaluations.append((at, result))

    def ends(self, key) -> tuple[float, float] | None:
        """Mean of the first and of the last few values (a quarter of them, at most 5)."""
        values = self.run.values(key)
        few = max(1, min(5, len(values) // 4))
        return (sum(values[:few]) / few, sum(values[-few:]) / few) if values else None


def percent(x) -> str:
    return f"{x:.1%}" if 0 < x < 1 else f"{x:.0%}"


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


def verdict(view) -> tuple[str, str, list[str]]:
    """(good | watch | bad | unknown, the headline, why and what to do)."""
    if not view.history:
        return "unknown", "Nothing to judge yet: no step has been logged.", ["Come back when the first step is done."]
    change, why, success = learned(view), [], "whether it learns was not measured"
    if change == "unknown":
        why.append("Held-out success was not measured twice with its interval (--eval_every, --final_episodes).")
    else:
        first, last = view.evaluations[0][1], view.evaluations[-1][1]
        success = f"held-out success {'went' if change == 'unclear' else change} from {percent(first['success'])} to {percent(last['success'])}"
        success += ", which may be chance" if change == "unclear" else ""
    if change == "rose":
        why.append(f"Success: {spoken(first)} at first, {spoken(last)} at last, on held-out episodes. The intervals do not overlap.")
    elif change != "unknown":
        rows = [m for m in view.history if m.get("reward") is not None]
        known = [r for _, r in view.evaluations if None not in (r["success_low"], r["success_high"])]
        why += console.diagnosis(rows, known[0], known[-1], view.env) if rows else []
    level = {"rose": "good", "fell": "bad", "unclear": "watch", "unknown": "unknown"}[change]
    if not view.measured:
        head = f"{success}; whether the reasoning depends on its prompt was not measured"
        todo = "measure the reasoning (--mi_every 1)"
        if view.run.values(view.sample + "mi_upper_bound"):
            todo = "train on several prompts a step (--groups 2 or more)"
        elif view.config.get("mi_every") == 1:  # it was tried
            todo = "start from a model whose replies hold reasoning"
        level = "watch" if level == "good" else level
    else:
        name, near = view.regimes[-1][1], at_chance(view)
        todo = regimes.advice(name, view.config)
        found = regimes.regime_sentence(*view.recent[-1], *view.measured[0][1:], view.config)
        why.append(f"Reasoning: {found.removesuffix(f'; {todo}')}. {over_time(view.regimes)}")
        if name == "diverse" and not near:
            head = f"{success}; the reasoning still depends on its prompt"
            better = {"good": "nothing; more --steps if success still rises", "unknown": "run on, or evaluate more often"}
            todo = better.get(level, "first what is named above")
        else:
            head = f"{name if name != 'diverse' else 'the reasoning ignores its prompt'}; {success}"
            level = "bad" if "collapse" in name or level == "bad" else "watch"
        if near:
            why.append(near)
            todo = "start from a model whose reasoning names what it sees" if name == "diverse" else todo
    why += [f"What to do: {todo}.", *incidents(view)]
    word = {"good": "Healthy", "watch": "Keep an eye on it", "bad": "Not healthy", "unknown": "Too early to say"}[level]
    return level, f"{word}: {head}.", why


def at_chance(view) -> str | None:
    """A sentence where the mean retrieval of the last few measurements is not above its chance level, with 95% certainty."""
    keys = ("retrieval_accuracy", "retrieval_chance_level", "retrieval_accuracy_se")
    rows = [[view.run.steps[s].get(view.sample + k) for k in keys] for s, *_ in view.measured[-regimes.RECENT :]]
    rows = [(found, chance, error or 0.0) for found, chance, error in rows if None not in (found, chance)]
    if not rows:
        return None
    found, chance = (sum(r[i] for r in rows) / len(rows) for i in (0, 1))
    error = sum(e * e for _, _, e in rows) ** 0.5 / len(rows)
    if chance >= 1 or found - metrics.Z95 * error > chance:
        return None
    return f"The prompt cannot be told from the reasoning better than by chance ({percent(found)} against {percent(chance)})."


def over_time(named) -> str:
    """The regimes [(step, name)] as stretches in which nothing changes, or counted where there are many stretches."""
    spells = []
    for step, name in named:
        if not spells or spells[-1][2] != name:
            spells.append([step, step, name])
        spells[-1][1] = step
    if len(spells) > 6:
        names = [name for _, name in named]
        return "Of all measurements: " + ", ".join(f"{names.count(n)} {n}" for n in dict.fromkeys(names)) + "."
    return "Over time: " + "; ".join((f"steps {a} to {b}" if a < b else f"step {a}") + f": {name}" for a, b, name in spells) + "."


def incidents(view) -> list[str]:
    """What happened that no chart shows, and what of the files could not be read."""
    out, run = [], view.run
    bad, skipped = sum(run.values("nonfinite_updates")), sum(run.values("skipped"))
    if bad:
        out.append(f"{bad:.0f} updates were not finite and were left out.")
    if skipped:
        out.append(f"{skipped:.0f} of {len(view.history)} steps updated nothing: every group was filtered out.")
    stopped = [k.split("/", 1)[1] for k in view.keys if k.startswith("early_stopped/") and view.history[-1].get(k)]
    if stopped:
        out.append(f"The run stopped early: {'; '.join(stops.WHY.get(name, name) for name in stopped)}.")
    planned, done = number(view.config.get("steps")), max(run.steps)
    if planned and done < planned and not stopped:
        out.append(f"The log ends at step {done} of {planned}: the run goes on, or was ended before its end.")
    return out


def gaps(run) -> list[str]:
    """What of the files could not be read."""
    out = [f"The last line of {name} is cut off and left out." for name in sorted(run.torn)]
    return out + [f"{n} lines of {name} cannot be read and are left out." for name, n in run.unreadable.items() if n]


# -- several runs ----------------------------------------------------------------------------------------------------------


def conclusion(views) -> list[str]:
    """Which run did best in held-out success and in MI, and whether the 95% intervals of the first two overlap."""
    success, mi = [], []
    for v in views:
        if v.evaluations and v.evaluations[-1][0]:  # step 0 is no end
            last = v.evaluations[-1][1]
            success.append((last["success"], last["success_low"], last["success_high"], v.name))
        if found := mean_mi(v):
            mi.append((*found, v.name))
    return [
        best("held-out success after training", success, len(views), percent),
        best(f"MI (mean of the last {regimes.RECENT} measurements)", mi, len(views), lambda x: f"{x:.2f}"),
    ]


def mean_mi(view) -> tuple | None:
    """(mean, low, high) of the last few MI in nats; low and high are None where an error was not logged."""
    key = view.sample + "mi_seq_estimate"
    rows = [(m[key], m.get(key + "_se")) for m in view.history if m.get(key) is not None][-regimes.RECENT :]
    if not rows:
        return None
    mean, errors = sum(x for x, _ in rows) / len(rows), [e for _, e in rows]
    if None in errors:
        return mean, None, None
    half = metrics.Z95 * sum(e * e for e in errors) ** 0.5 / len(rows)
    return mean, mean - half, mean + half


def best(what, found, of, words) -> str:
    """A sentence on [(value, low, high, name)] of `of` runs."""
    if len(found) < 2:
        return f"The runs cannot be compared in {what}: it is known of {len(found)} of {of}."
    said = lambda x: words(x[0]) + (f" (95%: {words(x[1])} to {words(x[2])})" if None not in x[1:3] else "")
    (a, low, _, name), (b, _, high, other) = first, second = sorted(found, key=lambda x: -x[0])[:2]
    against = f"{other} has {said(second)}" if of == 2 else f"the next, {other}, has {said(second)}"
    if a == b:
        return f"{name} and {other} have the same {what}: {said(first)}."
    if low is None or high is None:
        sure = "without intervals that may be chance"
    else:
        sure = "the intervals do not overlap" if low > high else "the intervals overlap, so that this may be chance"
    return f"{name} has the {'highest' if of > 2 else 'higher'} {what}, {said(first)}; {against}; {sure}."
