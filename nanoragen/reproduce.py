"""The claims of RAGEN-2 (arXiv 2604.06268), put to the test with the bundled model on a laptop.

    python -m nanoragen.reproduce --quick          # 18 short runs of bandit, whose single turn is cheap enough for many steps
    python -m nanoragen.reproduce                  # 64 longer ones of frozen_lake; leave it overnight
    python -m nanoragen.reproduce --quick          # again after Ctrl-C or a crash: goes on where it stopped

A grid of runs: {no filter, top-p 0.9} x {plain, KL, entropy bonus, reward noise, each of several strengths} x seeds. Each is a
`train.py` process of one thread; their logs are all that is analysed. Writes results.json, results.md and figures (SVG).

What is asked, and of which numbers. MI: `mi_seq_estimate`, its share: of the bound H(X) of that step; entropy: `conditional_entropy_est`,
H(Z|X) a token; "final": mean over the last quarter of the steps, "first": the first measurement, of the starting model; success:
held-out, after the last step.

    (a) does MI go with success across runs, and more strongly than entropy?   Spearman, bootstrap over runs
    (b) does the filter raise success and MI, and what does a step cost?       differences of pairs that differ in nothing else, t
    (c) does MI's share fall by more than half where entropy stays within 10%, the runs are listed
        or where it does not fall?
    (d) does the task gradient grow with in-group reward variance?             top less bottom bucket, t over runs without noise

A claim is "reproduced" where its 95% interval lies above 0, "not reproduced" where it lies below, else "undecided"; of (c) it is said
in how many runs it was seen, with Wilson's interval of that share. Left out: a correction for asking several questions, and
independence of runs that share a seed (their prompts are the same).
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanoragen import cli, metrics
from nanoragen.intervals import bootstrap, spearman, t_interval, verdict

ROOT = Path(metrics.__file__).resolve().parent.parent
FIRST_TURN = "collapse_first_turn_sample/"
MEASURED = {"mi": "mi_seq_estimate", "entropy": "conditional_entropy_est"}
FILTERS = {"none": {"filter": "none"}, "top_p": {"filter": "top_p", "filter_value": 0.9}}
# All runs are as long as each other, and what acts on them acts to the end: no decay of the learning rate, as in the paper's runs.
COMMON = {"early_stop": "none", "eval_every": 0, "keep": 1, "lr_schedule": "constant"}
QUICK = {
    "env": "bandit",
    "lr": 3e-4,
    "steps": 100,
    "groups": 8,
    "group_size": 4,
    "final_episodes": 256,
    "grad_every": 20,
    "save_every": 50,
}
FULL = {"env": "frozen_lake", "steps": 32, "groups": 16, "group_size": 8, "final_episodes": 256, "grad_every": 8, "save_every": 8}
STRENGTHS = {
    "kl": ("beta", (0.1, 0.01, 1.0)),
    "entropy": ("entropy_coef", (0.01, 0.003, 0.03)),
    "noise": ("reward_noise", (1.0, 0.3, 3.0)),
}


@dataclass
class Config:
    quick: bool = field(default=False, metadata={"help": "18 short runs (aimed at a quarter of an hour on two cores)"})
    out: str = field(default="", metadata={"help": "folder; default runs/reproduce or runs/reproduce-quick"})
    jobs: int = field(default=0, metadata={"help": "runs at a time, each of one thread; 0: one a core"})


# -- the sweep ---------------------------------------------------------------------------------------------------------


def grid(quick: bool) -> dict[str, dict]:
    """{"<filter>-<intervention>-<seed>": settings of train.py}; runs of one seed and intervention differ in the filter only."""
    found, size = {}, QUICK if quick else FULL
    interventions = {"plain": ({}, 3 if quick else 5)}
    for name, (key, values) in STRENGTHS.items():
        interventions |= {f"{name}_{v:g}": ({key: v}, 2 if quick else 3) for v in (values[:1] if quick else values)}
    for intervention, (more, seeds) in interventions.items():
        for seed in range(seeds):
            for filter, settings in FILTERS.items():
                found[f"{filter}-{intervention}-{seed}"] = {**COMMON, **size, **settings, **more, "seed": seed}
    return found


def read(folder) -> list[dict]:
    """The whole lines of a run's metrics.jsonl; a run that is being written may end in half a line."""
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [found for found in map(metrics.whole_record, lines) if found]


def finished(lines, settings) -> bool:
    return bool(lines) and lines[-1]["step"] == settings["steps"] and lines[-1].get(f"eval/{settings['env']}/success") is not None


def arguments(folder: Path, settings: dict) -> list[str] | None:
    """What train.py needs to be told to finish a run: start it, or go on. None: it is finished.

    ValueError where the folder holds a run of other settings, which must not be taken for this one.
    """
    if (folder / "config.json").is_file():
        there = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key, value in settings.items():
            if there.get(key) != value:
                raise ValueError(f"out: {folder} holds a run with {key} {there.get(key)}, not {value}; valid: a new folder")
        if finished(read(folder), settings):
            return None
        from nanoragen.checkpoint import newest

        if newest(folder):
            return ["--resume", str(folder)]
        for name in metrics.FILES:  # of a run that never saved
            (folder / name).unlink(missing_ok=True)
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))] + ["--out", str(folder)]


def sweep(runs: dict, out: Path, jobs: int, command=(sys.executable, "-m", "nanoragen.train")) -> list[str]:
    """Finish all runs, `jobs` at a time; what each prints goes to its output.txt. Returns the names of those that did not end well.

    Ctrl-C and SIGTERM ask the running ones to save, wait for them, and are raised; a second one changes nothing.
    """
    todo = {name: arguments(out / name, settings) for name, settings in runs.items()}
    waiting, active, failed = [name for name, args in todo.items() if args is not None], {}, []
    where = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": where}
    bar = tqdm(total=sum(s["steps"] for s in runs.values()), unit="step", dynamic_ncols=True, smoothing=0.02)
    done = {name: len(read(out / name)) for name in runs}
    bar.update(sum(done.values()))
    before = {s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                name = waiting.pop(0)
                (out / name).mkdir(parents=True, exist_ok=True)
                with open(out / name / "output.txt", "a") as file:
                    active[name] = subprocess.Popen(
                        [*command, *todo[name]], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                        env={**os.environ, **one}, start_new_session=True,  # Ctrl-C is passed on below, once
                    )  # fmt: skip
            bar.set_description_str(" ".join(active))
            time.sleep(0.5)
            for name, process in list(active.items()):
                ended = process.poll() is not None
                steps = len(read(out / name))
                bar.update(max(0, steps - done[name]))
                done[name] = max(steps, done[name])
                if ended:
                    del active[name]
                    if not finished(read(out / name), runs[name]):
                        failed.append(name)
                        bar.write(f"{name} did not end well: see {out / name / 'output.txt'}")
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave running what was asked to stop
        bar.close()
        if active:
            print("the running ones finish their step and save it", flush=True)
        for process in active.values():
            process.terminate()
        for process in active.values():
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return failed


# -- the questions -----------------------------------------------------------------------------------------------------


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


def main(argv=None):
    c = cli.parse(Config, argv, "nanoragen.reproduce", __doc__.split("\n\n")[0])
    out, runs = Path(c.out or ("runs/reproduce-quick" if c.quick else "runs/reproduce")).resolve(), grid(c.quick)
    try:
        if c.jobs < 0:
            raise ValueError(f"jobs: {c.jobs}; valid: 0 or more")
        failed = sweep(runs, out, c.jobs or os.cpu_count() or 1)
    except ValueError as e:
        cli.fail("nanoragen.reproduce", e)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with what is in {out}")
        raise SystemExit(130) from None
    report(runs, out, failed)
    if failed:
        raise SystemExit(1)


def report(runs: dict, out: Path, failed: list[str]):
    """results.json, results.md and the figures, from the logs of the runs that finished; prints the table."""
    logs = {name: read(out / name) for name in runs if name not in failed}
    summaries = [summary(name, lines, runs[name]["env"]) for name, lines in logs.items()]
    results = {"settings": runs, "unfinished": failed, "runs": summaries, **analyse(summaries)}
    drawn = figures(results)
    for name, text in drawn.items():
        (out / name).write_text(text)
    (out / "results.json").write_text(json.dumps(json.loads(metrics.dumps(results)), indent=1) + "\n")
    text = markdown(results)
    (out / "results.md").write_text(text + "\n" + " ".join(f"![{name}]({name})" for name in drawn) + "\n")
    print(f"\n{text}\n{out / 'results.md'}")


if __name__ == "__main__":
    main()
