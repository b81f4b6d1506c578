"""The sweep with a stand-in for train.py, once with train.py itself, and the analysis on logs whose answers are known."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from nanoragen.run import checkpoint
from nanoragen.science import claims, reproduce
from nanoragen.science.claims import analyse, figures, markdown, summary
from nanoragen.science.reproduce import arguments, grid, read, report, sweep
from nanoragen.science.statistics import bootstrap, spearman, t_interval, verdict

STAND_IN = """
import json, os, signal, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = args.get("--out") or args["--resume"]
open(os.path.join(out, "..", "started"), "a").write(os.path.basename(out) + (" resumed" if "--resume" in args else "") + "\\n")
if "--steps" in args:
    settings = {k[2:]: int(v) if v.isdigit() else v for k, v in args.items()}
    json.dump(settings, open(os.path.join(out, "config.json"), "w"))
steps = json.load(open(os.path.join(out, "config.json")))["steps"]
assert os.environ["OMP_NUM_THREADS"] == "1" and os.getsid(0) == os.getpid()  # a Ctrl-C at the terminal does not reach it
if "bad" in out:
    sys.exit("no such luck")
def stop(*_):
    open(os.path.join(out, "asked"), "a").write("x")
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.3)
    open(os.path.join(out, "saved"), "w")
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
for step in range(1, steps + 1):
    if "slow" in out:
        open(os.path.join(out, "ready"), "w"); time.sleep(60)
    end = {"eval/lake/success": 0.5} if step == steps else {}
    open(os.path.join(out, "metrics.jsonl"), "a").write(json.dumps({"step": step, **end}) + "\\n")
"""


@pytest.fixture
def stand_in(tmp_path):
    script = tmp_path / "train_stand_in.py"
    script.write_text(STAND_IN)
    (tmp_path / "out").mkdir()
    return tmp_path / "out", (sys.executable, str(script))


def small(*names, steps=2):
    return {name: {"env": "lake", "steps": steps} for name in names}


def test_a_finished_run_is_not_run_again_and_a_failed_one_is_named(stand_in, capfd):
    out, command = stand_in
    runs = small("a", "b", "bad")
    assert sweep(runs, out, 2, command) == ["bad"]
    assert sorted((out / "started").read_text().split()) == ["a", "b", "bad"]
    assert "no such luck" in (out / "bad" / "output.txt").read_text() and "bad did not end well" in capfd.readouterr().out
    assert sweep(small("a", "b", "c"), out, 1, command) == []
    assert Counter((out / "started").read_text().split()) == {"a": 1, "b": 1, "bad": 1, "c": 1}


def test_what_a_run_is_told(stand_in, monkeypatch):
    out, command = stand_in
    settings = {"env": "lake", "steps": 2}
    start = ["--env", "lake", "--steps", "2", "--out", str(out / "a")]
    assert arguments(out / "a", settings) == start
    sweep({"a": settings}, out, 1, command)
    assert arguments(out / "a", settings) is None
    with pytest.raises(ValueError, match="out: .*a holds a run with steps 2, not 3; valid: a new folder"):
        arguments(out / "a", {**settings, "steps": 3})
    (out / "a" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "eval/la')  # killed in the middle of a line
    assert read(out / "a") == [{"step": 1}]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "newest", lambda folder: folder / "step_000001")
        assert arguments(out / "a", settings) == ["--resume", str(out / "a")] and read(out / "a")
    assert arguments(out / "a", settings) == start and not (out / "a" / "metrics.jsonl").exists()  # never saved: from the start


def test_ctrl_c_asks_the_running_ones_once_and_waits(stand_in):
    out, command = stand_in

    def interrupt():
        while not all((out / n / "ready").is_file() for n in ("slow1", "slow2")):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        sweep(small("slow1", "slow2", "slow3"), out, 2, command)
    assert [(out / n / "asked").read_text() for n in ("slow1", "slow2")] == ["x", "x"] and not (out / "slow3").exists()
    assert [(out / n / "saved").is_file() for n in ("slow1", "slow2")] == [True, True]  # waited for, also after the second signal
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_grid_pairs_every_run_and_train_takes_every_setting():
    import train

    for quick, count in ((True, 18), (False, 64)):
        runs = grid(quick)
        assert len(runs) == count
        for name, settings in runs.items():
            train.check(train.Config(**settings))
            if settings["filter"] == "none":
                twin = runs["top_p" + name.removeprefix("none")]
                assert {k for k in twin if twin[k] != settings.get(k)} == {"filter", "filter_value"}
        assert len({s["seed"] for s in runs.values()}) >= 3


def test_two_real_runs_and_the_noise_between_them(tmp_path):
    """The whole program on one step of two small runs; the noise is the generator's, and changes advantages only."""
    more = {"env": "frozen_lake", "steps": 1, "groups": 3, "group_size": 3, "max_turns": 2, "max_tokens": 24, "final_episodes": 2,
            "eval_every": 0, "grad_every": 1, "seed": 4, "filter": "none"}  # fmt: skip
    runs = {"none-plain-4": more, "none-noise_2-4": {**more, "reward_noise": 2.0}}
    assert sweep(runs, tmp_path, 2) == []
    assert all(arguments(tmp_path / name, settings) is None for name, settings in runs.items())
    plain, noisy = ([json.loads(x) for x in (tmp_path / n / "rollouts.jsonl").read_text().splitlines()] for n in runs)
    assert [e["ids"] for e in plain] == [e["ids"] for e in noisy] and [e["reward"] for e in plain] == [e["reward"] for e in noisy]
    r = np.array([e["reward"] for e in plain]) + 2.0 * np.random.default_rng([4, 1, 1]).standard_normal(9)
    r = r.reshape(3, 3)
    want = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
    assert [e["advantage"] for e in noisy] == pytest.approx(want.flatten().tolist(), abs=1e-4)
    assert [e["advantage"] for e in plain] != pytest.approx(want.flatten().tolist(), abs=0.1)
    for e in plain:  # credit by episode: each turn has the episode's
        assert [t["advantage"] for t in e["turns"]] == pytest.approx([e["advantage"]] * len(e["turns"]), abs=1e-6)
    report(runs, tmp_path, [])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["name"] for r in results["runs"]] == list(runs) and len(results["runs"][0]["buckets"]) == 3
    assert "| claim |" in (tmp_path / "results.md").read_text()


# -- statistics --------------------------------------------------------------------------------------------------------


def test_spearman():
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1) and spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))  # 1 - 6 sum d^2 / (n (n^2 - 1))
    assert math.isnan(spearman([1, 2, 3], [5, 5, 5]))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (20, 15)), rng.normal(size=(20, 15))  # ties
    assert spearman(x, y) == pytest.approx(np.array([stats.spearmanr(a, b).statistic for a, b in zip(x, y)]), abs=1e-12)


def test_t_interval():
    mean, low, high = t_interval([1.0, 2, 3])
    assert mean == 2 and (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))  # t(2), 97.5%
    assert t_interval([7.0] * 4) == (7, 7, 7)
    assert t_interval([4.0, 6])[0] == 5 and math.isnan(t_interval([4.0, 6])[1]) and math.isnan(t_interval([])[0])


def test_the_bootstrap_covers_a_mean_as_often_as_it_says():
    rng, hits = np.random.default_rng(0), 0
    for n in range(200):
        low, high = bootstrap(np.mean, rng.normal(1, 2, size=40), resamples=200, seed=n)
        hits += low < 1 < high
    assert 176 <= hits <= 200  # 95% of 200 = 190, less what a percentile interval of 40 is known to miss, and chance
    assert all(map(math.isnan, bootstrap(np.mean, [1.0, 2, 3, 4])))
    assert bootstrap(np.mean, np.ones(8)) == (1, 1) and bootstrap(np.mean, np.arange(9)) == bootstrap(np.mean, np.arange(9))


def test_the_bootstrap_draws_rows_together_and_leaves_out_what_is_not_defined():
    x = np.arange(5.0)
    assert bootstrap(spearman, x, x**3) == pytest.approx((1, 1))  # also resamples of one row five times, which have no correlation
    assert all(map(math.isnan, bootstrap(spearman, x, np.ones(5))))


@pytest.mark.parametrize(
    "low, high, want",
    [(0.1, 2, "reproduced"), (-2, -0.1, "not reproduced"), (-1, 1, "undecided (interval contains 0)"),
     (0, 1, "undecided (interval contains 0)"),
     (math.nan, math.nan, "not defined: one of them does not vary")],
)  # fmt: skip
def test_verdict(low, high, want):
    assert verdict(low, high, 5) == want


def test_verdict_of_too_few():
    assert verdict(math.nan, math.nan, 4) == "undecided (too few runs)"
    same = [{**r, "success": 0.5} for r in known()]  # no correlation with what does not vary
    assert [c["verdict"] for c in analyse(same)["claims"][::2][:2]] == ["not defined: one of them does not vary"] * 2


# -- the questions -----------------------------------------------------------------------------------------------------


def lines(success, mi, entropy, seconds=2.0, task=(0.0, 1.0), steps=8):
    """A run that ends at these, from MI 2 and entropy 1; two buckets of variance."""
    found = []
    for step in range(1, steps + 1):
        first, end = step == 1, step > steps - steps // 4
        line = {"step": step, "step_time": seconds + 0.5, "time/gradients": 0.5, "rollout/filter_kept_ratio": 0.5,
                "collapse_first_turn_sample/mi_seq_estimate": 2.0 if first else mi if end else 77.0,
                "collapse_first_turn_sample/mi_upper_bound": 2.5 if first or end else 99.0,
                "collapse_first_turn_sample/conditional_entropy_est": 1.0 if first else entropy if end else 77.0}  # fmt: skip
        if step in (1, 5):
            for n, norm in enumerate(task):
                line |= {f"grad_norm/{n}/task": norm, f"grad_norm/{n}/entropy": 0.5, f"grad_norm/{n}/snr": 3.0 if norm else 0.0,
                         f"grad_norm/{n}/std_min": n / 2, f"grad_norm/{n}/std_max": n / 2 + 0.1,
                         f"grad_norm/{n}/groups": 2}  # fmt: skip
        found.append(line)
    return [*found[:-1], {**found[-1], "eval/lake/success": success}]


def test_summary_of_a_known_log():
    one = summary("top_p-kl_0.1-3", lines(0.75, 0.9, 1.05), "lake")
    want = {"filter": "top_p", "intervention": "kl_0.1", "seed": 3, "success": 0.75, "mi": 0.9, "mi_first": 2.0, "entropy": 1.05,
            "entropy_first": 1.0, "step_time": 2.0, "kept": 0.5}  # fmt: skip
    assert {k: one[k] for k in want} == want
    low, high = one["buckets"]
    assert (low["task"], high["task"], high["entropy"], high["power"], high["noise"]) == (0, 1, 0.5, 1, 0.25) and math.isnan(
        high["kl"]
    )


def known(kinds=("plain", "entropy_0.1", "noise_1"), seeds=4):
    """Filtered runs win by 10 points less seed, keep 0.5 nats more MI and take half the time; success rises with MI alone."""
    found, rng = [], np.random.default_rng(0)
    for kind in kinds:
        for seed in range(seeds):
            for filter in ("none", "top_p"):
                on = filter == "top_p"
                mi = 1.2 + 0.1 * seed + 0.5 * on + 0.03 * kinds.index(kind)
                success = 0.4 + 0.2 * mi - 0.001 * seed * on
                noise = (5.0, 0.0) if kind.startswith("noise") else (0.0, 1.0 + 0.1 * seed)
                name, entropy = f"{filter}-{kind}-{seed}", 1.3 + 0.1 * rng.random()
                found.append(summary(name, lines(success, mi, entropy, 1.0 if on else 2.0, noise), "lake"))
    return found


def test_known_answers_are_found():
    runs = known()
    results = analyse(runs)
    mi, entropy, stronger, success, kept_mi, seconds, lost, lost_too, task, lead = results["claims"]
    assert mi["value"] > 0.98 and mi["low"] > 0.9 and mi["verdict"] == "reproduced" and mi["n"] == 24
    assert abs(entropy["value"]) < 0.5 and entropy["verdict"] == "measured"
    assert stronger["value"] == pytest.approx(mi["value"] - abs(entropy["value"])) and stronger["verdict"] == "reproduced"
    assert success["value"] == pytest.approx(10 - 0.15) and success["verdict"] == "reproduced" and success["n"] == 12
    half = stats.t.ppf(0.975, 11) * np.std([0, 0.1, 0.2, 0.3] * 3, ddof=1) / math.sqrt(12)
    assert (success["low"], success["high"]) == pytest.approx((9.85 - half, 9.85 + half))
    assert kept_mi["value"] == pytest.approx(0.5) and seconds["value"] == pytest.approx(-50) and seconds["verdict"] == "measured"
    assert (lost["value"], lost["verdict"], lost_too["value"], results["collapsed"]) == (0, "seen in 0 of 24", 0, [])
    assert (lost["low"], lost["high"]) == (0, pytest.approx(100 * 1.96**2 / (24 + 1.96**2), abs=0.01))  # Wilson's, of none
    assert (
        task["value"] == pytest.approx(1.15) and task["n"] == 16 and task["verdict"] == "reproduced"
    )  # runs with noise are left out
    assert (
        lead["value"] == pytest.approx(2.3)
        and results["buckets"][1]["snr"] == pytest.approx(3)
        and results["buckets"][0]["snr"] == 0
    )


def test_collapse_is_judged_by_the_share_of_the_bound():
    """MI 0.6 of 2.5 is under half of 2.0 of 2.5, but not of 0.6 of 0.7; 2.0 of 6.0 is, though as many nats as at first."""
    for mi, bound, want in ((0.6, 2.5, True), (0.6, 0.7, False), (2.0, 6.0, True)):
        log = [{**m, "collapse_first_turn_sample/mi_upper_bound": bound} if m["step"] > 6 else m for m in lines(0.5, mi, 1.0)]
        one = summary("none-plain-0", log, "lake")
        assert one["share"] == pytest.approx(mi / bound) and one["share_first"] == pytest.approx(0.8)
        assert claims.collapsed(one) == want and one["mi"] == pytest.approx(mi)


def test_only_what_was_measured_counts():
    """A bucket without entropy gradient, a pair without MI: left out, and not counted."""
    runs = known()
    runs[0]["buckets"][0]["entropy"] = 0.0
    runs[2]["mi"] = math.nan
    runs[4]["share"] = math.nan
    runs[6]["buckets"][1]["task"] = math.nan
    found = [c["n"] for c in analyse(runs)["claims"]]
    assert found == [23, 23, 23, 12, 11, 12, 23, 23, 15, 14]


@pytest.mark.parametrize(
    "mi, entropy, within, above",
    [(0.99, 1.09, 1, 1), (0.99, 0.91, 1, 1), (1.01, 1.0, 0, 0), (0.5, 1.11, 0, 1), (0.5, 3.0, 0, 1), (0.5, 0.89, 0, 0)],
)
def test_template_collapse_is_listed(mi, entropy, within, above):
    runs = [*known(), summary("none-kl_1-0", lines(0.2, mi, entropy), "lake")]
    results = analyse(runs)
    assert results["collapsed"] == ["none-kl_1-0"] * above
    for claim, want in zip(results["claims"][6:8], (within, above)):
        assert (claim["value"], claim["verdict"]) == (pytest.approx(100 * want / 25), f"seen in {want} of 25")
    text = markdown({**results, "runs": runs, "unfinished": []})
    assert ("none-kl_1-0." if above else "there was no such run.") in text


def test_the_opposite_and_too_little_are_said_as_such():
    swapped = [{**r, "filter": "none" if r["filter"] == "top_p" else "top_p", "mi": -r["mi"]} for r in known()]
    results = analyse(swapped)
    assert [c["verdict"] for c in results["claims"][:1] + results["claims"][3:4]] == ["not reproduced"] * 2
    assert "**not reproduced**" in markdown({**results, "runs": swapped, "unfinished": ["x"]})
    for few in ([], known(("plain",), 1)):
        results = analyse(few)
        assert {c["verdict"] for c in results["claims"]} <= {
            "undecided (too few runs)",
            "measured",
            f"seen in 0 of {len(few)}",
        } and "nan" not in markdown({**results, "runs": few, "unfinished": []})


def test_figures_show_every_run_where_its_numbers_say():
    runs = known()
    drawn = figures({**analyse(runs), "runs": runs})
    points = {name: sorted(p for line in f.axes[0].lines for p in line.get_xydata().tolist()) for name, f in drawn.items()}
    assert points["mi.svg"] == sorted([r["mi"], r["success"]] for r in runs)
    assert points["entropy.svg"] == sorted([r["entropy"], r["success"]] for r in runs)
    pairs = [[b["success"], a["success"]] for a, b in claims.paired(runs)]
    assert points["filter.svg"] == sorted([*pairs, [0, 0], [1, 1]]) and len(pairs) == 12
    assert [0, 0.5] in points["gradients.svg"] and [1, pytest.approx(1.15)] in points["gradients.svg"]  # entropy; mean task norm


def test_the_report_of_a_sweep_is_the_same_again_and_takes_too_little(tmp_path, capsys):
    """Every file, of runs that were never measured, byte for byte."""
    runs, texts = {f"{f}-plain-0": {"env": "lake"} for f in ("none", "top_p")}, []
    for name in runs:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "step_time": 2.0, "eval/lake/success": 0.5}\n')
    for failed in ([], [], list(runs)):
        report(runs, tmp_path, failed)
        texts.append({f.name: f.read_text() for f in tmp_path.iterdir() if f.is_file()})
    assert texts[0] == texts[1] and len(texts[0]) == 6 and "nan" not in texts[0]["results.md"]
    assert "Not finished, and not in any figure: none-plain-0, top_p-plain-0." in capsys.readouterr().out
    for name, text in texts[0].items():
        assert not name.endswith(".svg") or ElementTree.fromstring(text).tag.endswith("svg")


@pytest.mark.parametrize("program", ["reproduce", "warmup"])
def test_a_reader_that_ends_ends_the_program_without_a_traceback(program, tmp_path):
    """stdout is closed before the first line: what `| head -1` does to a program that prints more."""
    code = (
        f"import nanoragen.science.{program} as p\n"
        "def work(*_): print('x' * 100_000, flush=True)\n"
        "p.sweep, p.report, p.train = lambda *_: [], work, work\n"
        f"p.main({['--out', str(tmp_path)]})\n"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", code], check=False, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert ended.returncode == 141 and "Error" not in ended.stderr and "Traceback" not in ended.stderr


def test_bad_settings_are_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["--jobs", "-1", "--quick"])
    assert stopped.value.code == 2 and capsys.readouterr().err.strip() == "nanoragen.reproduce: error: jobs: -1; valid: 0 or more"
