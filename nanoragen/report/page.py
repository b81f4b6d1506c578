"""One HTML file that shows whether a run is healthy, and why.

    python -m nanoragen.report runs/x                          # writes runs/x/report.html
    python -m nanoragen.report runs/x runs/y                   # compares them: runs/x/compare.html, or --out FILE
    python -m nanoragen.report runs/x runs/y --picture p.svg   # success and the collapse metrics as one picture, .svg or .png

The file needs nothing else: no network, no fonts. Charts are SVG by matplotlib, sentences and episodes are HTML; the one
script chooses which episode is seen. Nothing of a run is ever markup: all its text is escaped, and the page's content
policy runs no script but its own.

Of a long run the page holds a bounded part (MAX_* in charts.py and episodes.py, and it says so), so that it opens on a phone.
"""

import argparse
import base64
import hashlib
import json
import re
import time
import warnings
from datetime import timedelta
from pathlib import Path

from nanoragen.report import charts
from nanoragen.report.episodes import chosen, escape
from nanoragen.report.runs import MAX_SIDE, Run, number, spread, visible
from nanoragen.report.verdict import View, conclusion, gaps, percent, verdict
from nanoragen.run import cli
from nanoragen.run.files import write_whole

SHARE = 1 / 200  # of a run's time that refreshing the page may take
MATRICES = 3  # cross matrices shown of a run

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
    parts = {name: [] for name in charts.SECTIONS}  # section -> figures
    for key, chart in charts.CHARTS.items():
        parts[chart.section].append(figure(key, chart, views, charts.lines_of(key, views)))
    parts["Reasoning"] += matrices(views)
    sections = {name: f'<div class="grid">{"".join(found)}</div>' for name, found in parts.items() if any(found)}
    sections |= {"Episodes": viewer(views), "Settings": settings(views)}
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in sections)
    body = [header(views), f'<nav aria-label="Sections">{links}</nav>']
    body += [f'<section id="{name.lower()}"><h2>{name}</h2>{content}</section>' for name, content in sections.items()]
    js = Path(__file__).with_name("report.js").read_text(encoding="utf-8")
    fill = {
        "hash": base64.b64encode(hashlib.sha256(js.encode()).digest()).decode(), "title": escape("Report: " + ", ".join(names)),
        "css": charts.CSS, "js": js, "body": "\n".join(body),
    }  # fmt: skip
    return re.sub(r"\{(\w+)\}", lambda m: fill[m[1]], PAGE)  # one pass: a {word} in a run's text stays as it is


def explained(key, title, healthy, views, said, content) -> str:
    """A titled figure with what healthy looks like, and a sentence on each run."""
    here = f"<b>This run:</b> {escape(said[0])}"
    if len(views) > 1:
        here = "<br>".join(f"<b>{escape(v.name)}:</b> {escape(text)}" for v, text in zip(views, said))
    return f"""<figure id="{key}"><h3 id="{key}-title">{escape(title)}</h3>{content}
<figcaption><p id="{key}-here">{here}</p><p class="muted"><b>Healthy:</b> {escape(healthy)}</p></figcaption></figure>"""


def figure(key, chart, views, lines) -> str:
    """A chart with its legend; nothing where no run has a line."""
    flat = [(f"{v.name}: {s['label']}" if len(views) > 1 else s["label"], s) for v, run in zip(views, lines) for s in run]
    if not flat:
        return ""
    kinds = {"--": "dash", "o": "dot"}
    keys = "".join(f'<li class="{kinds.get(s["style"], "line")}" style="--k:var(--{s["colour"]})">{escape(name)}' for name, s in flat)
    said = [charts.sentence(key, v, run) for v, run in zip(views, lines)]
    title = f"{chart.title} ({chart.unit})" if chart.unit not in ("", "%") else chart.title
    content = f"<ul class=legend>{keys}</ul>{charts.as_svg(key, [s for _, s in flat])}"
    return explained(key, title, chart.healthy, views, said, content)


def matrices(views) -> list[str]:
    """The cross matrix of each run as a table, at the first, a middle and the last step; of several runs at the last."""
    said, tables = [], []
    for v in views:
        steps = spread(v.run.has("cross.jsonl"), MATRICES)[-MATRICES if len(views) == 1 else -1 :]
        records = [list(v.run.records("cross.jsonl", step))[-1:] for step in steps]
        frames = [(step, f) for step, found in zip(steps, records) for r in found if (f := frame(r))]
        said.append("No cross matrix was logged.")
        if not frames:
            continue
        step, (p, own, size) = frames[-1]
        known = [row[j] for row, j in zip(p, own) if row[j] is not None]
        mean = f"{percent(sum(known) / len(known))} of the probability on average" if known else "no finite probability"
        # reasoning that ignores its prompt leaves each prompt its weight, the share of rows that are its own
        chance = sum(own.count(j) for j in own) / (len(own) * size[0])
        said[-1] = f"At step {step} a reasoning's own prompt has {mean}; chance is {percent(chance)}."
        tables += [heat(f"{v.name}, step {s}" if len(views) > 1 else f"step {s}", *f) for s, f in frames]
    healthy = (
        "strong on the outlined cells, faint elsewhere. Row: a reasoning. Column: a prompt. Number: how probable it is, in per cent, "
        "that the reasoning was written for that prompt. Collapsed reasoning makes all rows alike."
    )
    content = f'<div class="grid">{"".join(tables)}</div>'
    return [explained("cross", "Which prompt was this written for?", healthy, views, said, content)] if tables else []


def frame(record) -> tuple | None:
    """(posterior, own column of each row, [M, N]) of a line of cross.jsonl; None where it is damaged."""
    p, own, size = (record.get(k) for k in ("posterior", "own", "size"))
    if not isinstance(p, list) or not p or not isinstance(own, list) or len(own) != len(p):
        return None
    p = [[number(x) for x in row[:MAX_SIDE]] for row in p[:MAX_SIDE] if isinstance(row, list) and row and len(row) == len(p[0])]
    own = own[:MAX_SIDE]
    if len(p) != len(own) or not all(type(j) is int and 0 <= j < len(p[0]) for j in own):
        return None
    right = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    return p, own, size if right else [len(p), len(p[0])]


def heat(title, p, own, size) -> str:
    rows = []
    for row, j in zip(p, own):
        cells = []
        for k, x in enumerate(row):
            share = 0 if x is None else round(100 * min(1.0, max(0.0, x)))
            text = "" if len(row) > 12 else "\u2013" if x is None else str(share)
            cells.append(f'<td{" class=own" * (j == k)} style="--p:{share}">{text}')
        rows.append(f"<tr>{''.join(cells)}")
    cut = f", {len(p)} by {len(p[0])} of {size[0]} by {size[1]}" if size[0] > len(p) or size[1] > len(p[0]) else ""
    return f"<table class=heat><caption>{escape(title)}{cut}</caption>{''.join(rows)}</table>"


SIGNS = {"good": "\u2713", "watch": "!", "bad": "\u2715", "unknown": "?"}


def header(views) -> str:
    out, tag = [], "h1" if len(views) == 1 else "h2"
    for v in views:
        level, head, why = verdict(v)
        steps = max(v.run.steps, default=0)
        name = f"{v.name}: {v.env}, {v.config.get('model', 'model unknown')}, {steps} step{'s' * (steps != 1)}"
        why = "".join(f"<li>{escape(text[:1].upper() + text[1:])}" for text in why + gaps(v.run))
        made = f'<p class="muted">{escape(made_with(v))}</p>' if made_with(v) else ""
        out.append(f"""<div class="verdict {level}"><p class="muted">{escape(name)}</p>
<{tag}><span aria-hidden="true">{SIGNS[level]}</span> {escape(head)}</{tag}><ul>{why}</ul>{made}</div>""")
    if len(views) == 1:
        return f"<header>{out[0]}</header>"
    said = "".join(f"<p>{escape(text)}</p>" for text in conclusion(views))
    return f"<header><h1>{len(views)} runs compared</h1>{said}{table(views)}{''.join(out)}</header>"


def made_with(view) -> str:
    """Date, duration, commit and versions as far as run.json has them (nanoragen/run/provenance.py), and what the steps took."""
    about, steps, whole = view.run.about, sum(view.run.values("step_time")), number(view.run.about.get("duration")) or 0
    said = [f"{key} {about[key]}" for key in ("started", "commit") if isinstance(about.get(key), str) and about[key]]
    said += [f"the run took {timedelta(seconds=round(whole))}"] if 0 < whole < 1e9 else []
    said += [f"steps took {timedelta(seconds=round(steps))} in all"] if 0 < steps < 1e9 else []
    versions = about.get("versions")
    return "; ".join(said + [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else said)


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
    head, *body = ["<tr>" + "".join(f"<{tag}>{escape(x)}" for x in row) for row, tag in zip(rows, ["th"] + ["td"] * len(views))]
    return f'<div class="scroll" tabindex="0" role="region" aria-label="The runs"><table>{head}{"".join(body)}</table></div>'


def viewer(views) -> str:
    """All episodes of the page, one of them to be seen: of the last step that has one, the first one that was kept."""
    said, articles, values = [], [], False
    for v in views:
        held, there = chosen(v.run, len(views)), v.run.has("rollouts.jsonl")
        total, steps = sum(v.run.count("rollouts.jsonl", s) for s in there), len({e["step"] for e in held})
        text = f"{len(held)} of {total} episodes are in this page, of {steps} of {len(there)} steps; groups that trained come first."
        text = "No episodes were logged." if not total else f"All {total} episodes are in this page." if len(held) == total else text
        said.append(f"<p>{escape(v.name + ': ' if len(views) > 1 else '')}{escape(text)}</p>")
        values = values or any(e.get("values") for e in held)
        for n, e in enumerate(held):
            label = f"{n + 1}: {'success' if e.get('success') is True else 'failure'}, reward {e.get('reward', 0)}"
            group = f"{e.get('group')}{' (dropped)' if e.get('kept') is False else ''}"
            articles.append((v.name, e["step"], group, label, e))
    if not articles:
        return "".join(said)
    first = articles[0][0]
    order = lambda i: (articles[i][0] == first, articles[i][1], articles[i][4].get("kept") is not False, -i)
    begin = max(range(len(articles)), key=order)
    names = ("run", "step", "group", "episode")
    pick = "".join(f"<label>{k.capitalize()} <select name={k}></select></label>" for k in names[len(views) == 1 :])
    if values:
        kinds = {"mask": "read or sampled", "logprobs": "log-prob", "entropies": "entropy"}
        pick += f"<label>Colour <select name=colour>{''.join(f'<option value={k}>{t}' for k, t in kinds.items())}</select></label>"
    shown = []
    for i, (*at, e) in enumerate(articles):
        data = " ".join(f'data-{k}="{escape(x)}"' for k, x in zip(names, at))
        shown.append(f"<article {data}{' hidden' * (i != begin)}>{e['html']}</article>")
    return f"""{"".join(said)}<p class="muted"><b>Healthy:</b> the reasoning names what this prompt shows, and the answer follows from it.
Grey was read, <span class=reasoning>blue is sampled reasoning</span>, <span class=answer>orange the sampled answer</span>. By log-prob or
entropy: full colour at a log-prob of -5 or below and at an entropy of 2.5 nats or above. Keys: left and right.</p>
<div id="viewer" class="mask" tabindex="0" role="group" aria-label="Episode viewer"><div class="controls">{pick}
<button type="button" value="-1">\u2190 previous</button><button type="button" value="1">next \u2192</button></div>{"".join(shown)}</div>"""


def settings(views) -> str:
    out = []
    for v in views:
        rows = "".join(f"<tr><th>{escape(k)}<td>{escape(x)}" for k, x in v.config.items())
        content = f"<table>{rows}</table>" if rows else "<p>config.json is not there.</p>"
        out.append(f"<details><summary>Settings of {escape(v.name)}</summary>{content}</details>")
    return "".join(out)


# -- writing it ----------------------------------------------------------------------------------------------------------


class Report:
    """folder/report.html of a run that is going on."""

    def __init__(self, folder):
        self.run, self.path, self.warned = Run(folder), Path(folder) / "report.html", False
        self.due = time.monotonic() + 20  # a short run writes its page once, at its end

    def refresh(self):
        """Write the page if that is cheap: when the last writing took under SHARE of the time since then."""
        if time.monotonic() >= self.due:
            self.write()

    def write(self):
        """Write the page. A disk that fails costs the page, never the training: it warns once."""
        start = time.monotonic()
        try:
            write_whole(self.path, page([self.run.read()]))
        except OSError as e:
            if not self.warned:
                warnings.warn(f"{self.path} cannot be written ({e.strerror}); the run goes on without", stacklevel=2)
            self.warned = True
        self.due = time.monotonic() + (time.monotonic() - start) / SHARE


@cli.quiet_when_unread
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanoragen.report", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="folders of runs; several are compared")
    parser.add_argument("--out", help="file to write; default report.html, for several runs compare.html, in the first folder")
    parser.add_argument("--picture", metavar="FILE", help="write success, MI and H(Z|X) as one picture instead: .svg or .png")
    a = parser.parse_args(argv)
    out = Path(a.picture or a.out or Path(a.runs[0]) / ("report.html" if len(a.runs) == 1 else "compare.html"))
    try:
        if a.picture and out.suffix not in (".svg", ".png"):
            raise ValueError(f"picture: {out} has no format that is known; valid: a name that ends in .svg or .png")
        for folder in map(Path, a.runs):
            if not any((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
                raise ValueError(f"runs: {folder} holds no run; valid: a folder with metrics.jsonl, as train.py makes it")
        try:
            runs = [Run(folder).read() for folder in a.runs]
            text = None if a.picture else page(runs)
        except OSError as e:
            raise ValueError(f"runs: {e.filename} cannot be read ({e.strerror}); valid: a folder whose files can") from e
        try:
            if a.picture:
                charts.picture([View(r) for r in runs], out)
            else:
                write_whole(out, text)
        except OSError as e:
            raise ValueError(f"{'picture' if a.picture else 'out'}: {out} cannot be written ({e.strerror}); valid: a file that can") from e
    except ValueError as e:
        cli.fail("nanoragen.report", e)
    print(out)
