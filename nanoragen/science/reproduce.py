"""The claims of RAGEN-2 (arXiv 2604.06268), put to the test with the bundled model on a laptop.

    python -m nanoragen.reproduce --quick          # 18 short runs of bandit, whose single turn is cheap enough for many steps
    python -m nanoragen.reproduce                  # 64 longer ones of frozen_lake; leave it overnight
    python -m nanoragen.reproduce --quick          # again after Ctrl-C or a crash: goes on where it stopped

A grid of runs: {no filter, top-p 0.9} x {plain, KL, entropy bonus, reward noise, each of several strengths} x seeds. Each is a
`train.py` process of one thread; their logs are all that is analysed (claims.py). Writes results.json, results.md and SVG figures.
Left out: several machines, and another model than the bundled one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from nanoragen.run import checkpoint, cli, log, metrics, records
from nanoragen.science.claims import analyse, figures, markdown, summary

ROOT = Path(metrics.__file__).resolve().parents[2]
FILTERS = {"none": {"filter": "none"}, "top_p": {"filter": "top_p", "filter_value": 0.9}}
# Of every run. The learning rate is constant, as in the paper's runs: what acts on a run acts to its end.
COMMON = {"early_stop": "none", "eval_every": 0, "keep": 1, "lr_schedule": "constant", "final_episodes": 256}
QUICK = {"env": "bandit", "steps": 100, "groups": 8, "group_size": 4, "grad_every": 20, "save_every": 50, "lr": 3e-4}
FULL = {"env": "frozen_lake", "steps": 32, "groups": 16, "group_size": 8, "grad_every": 8, "save_every": 8}
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


def read(folder: Path) -> list[dict]:
    """The whole lines of a run's metrics.jsonl; a run that is being written may end in half a line."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [found for found in map(records.whole_record, lines) if found]


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
        if checkpoint.newest(folder):
            return ["--resume", str(folder)]
        for name in records.FILES:  # of a run that never saved
            (folder / name).unlink(missing_ok=True)
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))] + ["--out", str(folder)]


def start(folder: Path, arguments: list[str], command) -> subprocess.Popen:
    """A training process of one thread that prints to output.txt of its folder. Ctrl-C does not reach its session."""
    where = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": where}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "a") as file:
        return subprocess.Popen(
            [*command, *arguments], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **one_thread}, start_new_session=True,
        )  # fmt: skip


def sweep(runs: dict, out: Path, jobs: int, command=(sys.executable, "-m", "nanoragen.train")) -> list[str]:
    """Finish all runs, `jobs` at a time. Returns the names of those that did not end well.

    Ctrl-C and SIGTERM ask the running ones to save, wait for them, and are raised; a second one changes nothing.
    """
    todo = {name: args for name, settings in runs.items() if (args := arguments(out / name, settings)) is not None}
    waiting, active, failed = list(todo), {}, []
    done = {name: len(read(out / name)) for name in runs}  # steps
    bar = tqdm(
        total=sum(s["steps"] for s in runs.values()), initial=sum(done.values()), unit="step", dynamic_ncols=True, smoothing=0.02
    )
    before = {s: signal.signal(s, signal.default_int_handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                name = waiting.pop(0)
                active[name] = start(out / name, todo[name], command)
            bar.set_description_str(" ".join(active))
            time.sleep(0.5)
            ended = [name for name, process in active.items() if process.poll() is not None]
            done |= {name: len(read(out / name)) for name in active}
            bar.update(sum(done.values()) - bar.n)
            for name in ended:
                del active[name]
                if not finished(read(out / name), runs[name]):
                    failed.append(name)
                    bar.write(f"{name} did not end well: see {out / name / 'output.txt'}")
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave running what was asked to stop
        bar.close()
        if active:
            print("the running ones finish their step and save it", file=sys.stderr)
        for process in active.values():
            process.terminate()
        for process in active.values():
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return failed


def report(runs: dict, out: Path, failed: list[str]):
    """results.json, results.md and the figures, from the logs of the runs that finished; prints the tables."""
    import matplotlib

    summaries = [summary(name, read(out / name), settings["env"]) for name, settings in runs.items() if name not in failed]
    results = {"settings": runs, "unfinished": failed, "runs": summaries, **analyse(summaries)}
    drawn, text = figures(results), markdown(results)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanoragen"}):  # the same numbers, the same files
        for name, figure in drawn.items():
            figure.savefig(out / name, metadata={"Date": None})
    (out / "results.json").write_text(json.dumps(json.loads(log.dumps(results)), indent=1) + "\n")
    (out / "results.md").write_text(text + "\n" + " ".join(f"![{name}]({name})" for name in drawn) + "\n")
    print(f"\n{text}\n{out / 'results.md'}")


@cli.quiet_when_unread
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
