"""One HTML file that shows whether a run is healthy, and why.

    python -m nanoragen.report runs/x               # writes runs/x/report.html
    python -m nanoragen.report runs/x runs/y        # compares them: runs/x/compare.html, or --out FILE

The file needs nothing else: no network, no fonts, no library. Python chooses what is shown and writes the sentences, so that
they are there without scripts too; assets/report.js draws the charts from one block of JSON. Nothing of a run is ever markup:
text is escaped here and set as text there, and the page's content policy runs no script but its own.

Of a long run the page holds a bounded part (MAX_* here, in charts.py and runs.py, and it says so), so that it opens on a phone. Left out
on purpose: a charting library, a server, anything that can be changed.

In order: the cross matrix that a trainer logs, the verdict, the page, and keeping it fresh during a run. Beside this file:
runs.py reads a run's folder, charts.py says what each chart shows.
"""

import argparse
import base64
import hashlib
import html
import json
import os
import re
import time
import warnings
from pathlib import Path

from nanoragen.collapse import estimator
from nanoragen.report import charts
from nanoragen.report.charts import MAX_SIDE, MAX_STEPS, View, learned, percent, spoken
from nanoragen.report.runs import Run, episodes, number, spread, visible
from nanoragen.run import cli, metrics, stops

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MAX_BYTES = 2_000_000  # of all episodes of a page, about
SHARE = 1 / 200  # of a run's time that refreshing the page may take


# -- the verdict ---------------------------------------------------------------------------------------------------------


def verdict(view) -> tuple[str, str, list[str]]:
    """(good | watch | bad | unknown, the headline, why and what to do)."""
    if not view.history:
        return "unknown", "Nothing to judge yet: no step has been logged.", ["Come back when the first step is done."]
    change, why = learned(view), []
    if view.evaluations:
        first, last = view.evaluations[0][1], view.evaluations[-1][1]
        span = f"from {percent(first['success'])} to {percent(last['success'])}"
    success = {
        "rose": lambda: f"held-out success rose {span}",
        "fell": lambda: f"held-out success fell {span}",
        "unclear": lambda: f"held-out success went {span}, which may be chance",
        "unknown": lambda: "whether it learns was not measured",
    }[change]()
    if change == "rose":
        why.append(
            f"Success: {spoken(first)} at first, {spoken(last)} at last, on held-out episodes. The intervals do not overlap."
        )
    elif change == "unknown":
        why.append("Held-out success was not measured twice with its interval (--eval_every, --final_episodes).")
    else:
        rows = [m for m in view.history if m.get("reward") is not None]
        known = [r for _, r in view.evaluations if None not in (r["success_low"], r["success_high"])]
        why += metrics.diagnosis(rows, known[0], known[-1], view.env) if rows else []
    level = {"rose": "good", "fell": "bad", "unclear": "watch", "unknown": "unknown"}[change]
    if not view.measured:
        head = f"{success}; whether the reasoning depends on its prompt was not measured"
        one = "--groups" in charts.unmeasured(view)
        todo = "train on several prompts a step (--groups 2 or more)" if one else "measure the reasoning (--mi_every 1)"
        if view.config.get("mi_every") == 1 and not one:  # it was tried
            todo = "start from a model whose replies hold reasoning"
        level = "watch" if level == "good" else level
    else:
        name, near = view.regimes[-1][1], at_chance(view)
        found, todo = charts.found_and_todo(view)
        why.append(f"Reasoning: {found}.")
        if name == "diverse" and not near:
            head = f"{success}; the reasoning still depends on its prompt"
            todo = {"good": "nothing; more --steps if success still rises", "unknown": "run on, or evaluate more often"}.get(
                level, "first what is named above"
            )
        else:
            head = f"{name if name != 'diverse' else 'the reasoning ignores its prompt'}; {success}"
            worst = name not in ("diverse", "compressed")
            level = "bad" if worst or level == "bad" else "watch"
        if near:
            why.append(near)
            todo = "start from a model whose reasoning names what it sees" if name == "diverse" else todo
    why.append(f"What to do: {todo}.")
    why += incidents(view)
    word = {"good": "Healthy", "watch": "Keep an eye on it", "bad": "Not healthy", "unknown": "Too early to say"}[level]
    return level, f"{word}: {head}.", why


def at_chance(view) -> str | None:
    """A sentence where the mean retrieval of the last few measurements is not above its chance level, with 95% certainty."""
    keys = ("retrieval_accuracy", "retrieval_chance_level", "retrieval_accuracy_se")
    rows = [[view.run.steps[s].get(view.sample + k) for k in keys] for s, *_ in view.measured[-estimator.RECENT :]]
    rows = [(found, chance, error or 0.0) for found, chance, error in rows if None not in (found, chance)]
    if not rows:
        return None
    found, chance = (sum(r[i] for r in rows) / len(rows) for i in (0, 1))
    error = sum(e * e for _, _, e in rows) ** 0.5 / len(rows)
    if chance >= 1 or found - metrics.Z95 * error > chance:
        return None
    return f"The prompt cannot be told from the reasoning better than by chance ({percent(found)} against {percent(chance)})."


def incidents(view) -> list[str]:
    """What happened that no chart shows."""
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


# -- the page ------------------------------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hash}'">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{data}</script>
<script>{js}</script>
</body>
</html>
"""


def page(runs: list[Run]) -> str:
    """The whole file for runs that were read."""
    views = [View(r) for r in runs]
    names = [v.name for v in views]
    for n, v in enumerate(views):  # two folders of one name are told apart
        v.name = visible(v.run.folder) if names.count(names[n]) > 1 else v.name
    data, body = {"charts": {}, "runs": []}, [header(views)]
    for key, chart in charts.CHARTS.items():
        if found := chart(views):
            title, healthy, said, data["charts"][key] = found
            body.append(section(key, title, healthy, said, '<div class="chart"></div>'))
    for v in views:
        steps = spread(v.run.has("rollouts.jsonl"), max(2, MAX_STEPS // len(views)))
        data["runs"].append({"name": v.name, "episodes": episodes(v.run, steps, MAX_BYTES // len(views))})
    body.append(viewer(views, data["runs"]))
    body.append(settings(views))
    css, js = ((ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    fill = {
        "hash": base64.b64encode(hashlib.sha256(js.encode()).digest()).decode(), "title": escape("Report: " + ", ".join(names)),
        "css": css, "js": js, "body": "\n".join(body), "data": embedded(data),
    }  # fmt: skip
    return re.sub(r"\{(\w+)\}", lambda m: fill[m[1]], PAGE)  # one pass: a {word} in a run's text stays as it is


def embedded(data) -> str:
    """JSON that no HTML parser can see an end or a comment in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def escape(text) -> str:
    return html.escape(visible(text))


def section(key, title, healthy, said, content) -> str:
    here = said[0][1] if len(said) == 1 else ""
    several = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in said) if not here else ""
    here = f"<p><b>This run:</b> {escape(here)}</p>" if here else f"<ul>{several}</ul>"
    return f"""<section id="{key}" aria-labelledby="{key}-title">
<h2 id="{key}-title">{escape(title)}</h2>
<p class="healthy"><b>Healthy:</b> {escape(healthy)}</p>
<div id="{key}-here" class="here">{here}</div>
{content}
</section>"""


SIGNS = {"good": "\u2713", "watch": "!", "bad": "\u2715", "unknown": "?"}


def header(views) -> str:
    out = []
    for v in views:
        level, head, why = verdict(v)
        tag = "h1" if len(views) == 1 else "h2"
        steps = max(v.run.steps, default=0)
        name = f"{v.name}: {v.env}, {v.config.get('model', 'model unknown')}, {steps} step{'s' * (steps != 1)}"
        why = "".join(f"<li>{escape(text[:1].upper() + text[1:])}</li>" for text in why + gaps(v.run))
        out.append(f"""<div class="verdict {level}"><p class="run">{escape(name)}</p>
<{tag}><span aria-hidden="true">{SIGNS[level]}</span> {escape(head)}</{tag}><ul>{why}</ul></div>""")
    if len(views) == 1:
        return f"<header>{out[0]}</header>"
    return f"<header><h1>{len(views)} runs compared</h1>{table(views)}{''.join(out)}</header>"


def gaps(run) -> list[str]:
    """What of the files could not be read."""
    out = [f"The last line of {name} is cut off and left out." for name in sorted(run.torn)]
    return out + [f"{n} lines of {name} cannot be read and are left out." for name, n in run.unreadable.items() if n]


def table(views) -> str:
    """The compared runs, with the settings in which they differ."""
    keys = [k for k in dict.fromkeys(k for v in views for k in v.config) if k != "out"]
    differ = [k for k in keys if len({json.dumps(v.config.get(k)) for v in views}) > 1][:8]
    rows = [["run", "steps", "held-out success, first", "last", "MI of its bound, first", "last", "regime", *differ]]
    for v in views:
        known = [percent(r["success"]) for _, r in v.evaluations]
        success = [known[0] if known else "\u2013", known[-1] if len(known) > 1 else "\u2013"]
        mi = [percent(v.measured[i][2]) if v.measured else "\u2013" for i in (0, -1)]
        regime = v.regimes[-1][1] if v.regimes else "\u2013"
        rows.append([v.name, max(v.run.steps, default=0), *success, *mi, regime, *[v.config.get(k, "\u2013") for k in differ]])
    cells = lambda row, tag: "".join(f"<{tag}>{escape(x)}</{tag}>" for x in row)
    body = "".join(f"<tr>{cells(r, 'td')}</tr>" for r in rows[1:])
    return f'<div class="scroll" tabindex="0" role="region" aria-label="The runs"><table><tr>{cells(rows[0], "th")}</tr>{body}</table></div>'


def viewer(views, held) -> str:
    said = []
    for v, run in zip(views, held):
        steps, there = {e["step"] for e in run["episodes"]}, v.run.has("rollouts.jsonl")
        total = sum(map(v.run.count, there))
        text = f"{len(run['episodes'])} of {total} episodes are in this page: the first ones of {len(steps)} of {len(there)} steps."
        if not total:
            text = "No episodes were logged."
        elif len(run["episodes"]) == total:
            text = f"All {total} episodes are in this page."
        said.append((v.name, text))
    healthy = "the reasoning names what this prompt shows, and the answer follows from it. Episodes of one group share the prompt."
    content = '<div id="viewer"></div>' if any(r["episodes"] for r in held) else ""
    return section("episodes", "Episodes", healthy, said, content)


def settings(views) -> str:
    out = []
    for v in views:
        rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(x)}</td></tr>" for k, x in v.config.items())
        table = f"<table>{rows}</table>" if rows else "<p>config.json is not there.</p>"
        out.append(f"<details><summary>Settings of {escape(v.name)}</summary>{table}</details>")
    return f"<footer>{''.join(out)}<noscript><p>The charts and the episodes are drawn by a script.</p></noscript></footer>"


# -- writing it ----------------------------------------------------------------------------------------------------------


def write(text: str, path: Path):
    """Replace the file at once: who opens it sees the old page or the new one."""
    beside = path.with_name(path.name + f".{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # half a page, where the disk is full


class Report:
    """folder/report.html of a run that is going on."""

    def __init__(self, folder):
        self.run, self.path, self.due, self.warned = Run(folder), Path(folder) / "report.html", 0.0, False

    def refresh(self):
        """Write the page if that is cheap: when the last writing took under SHARE of the time since then."""
        if time.monotonic() >= self.due:
            self.write()

    def write(self):
        """Write the page. A disk that fails costs the page, never the training: it warns once."""
        start = time.monotonic()
        try:
            write(page([self.run.read()]), self.path)
        except OSError as e:
            if not self.warned:
                warnings.warn(f"{self.path} cannot be written ({e.strerror}); the run goes on without", stacklevel=2)
            self.warned = True
        self.due = time.monotonic() + (time.monotonic() - start) / SHARE


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanoragen.report", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="folders of runs; several are compared")
    parser.add_argument("--out", help="file to write; default report.html, for several runs compare.html, in the first folder")
    a = parser.parse_args(argv)
    out = Path(a.out or Path(a.runs[0]) / ("report.html" if len(a.runs) == 1 else "compare.html"))
    try:
        for folder in map(Path, a.runs):
            if not any((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
                raise ValueError(f"runs: {folder} holds no run; valid: a folder with metrics.jsonl, as train.py makes it")
        try:
            text = page([Run(folder).read() for folder in a.runs])
        except OSError as e:
            raise ValueError(f"runs: {e.filename} cannot be read ({e.strerror}); valid: a folder whose files can") from e
        try:
            write(text, out)
        except OSError as e:
            raise ValueError(f"out: {out} cannot be written ({e.strerror}); valid: a file that can") from e
    except ValueError as e:
        cli.fail("nanoragen.report", e)
    print(out)
