"""The report: its numbers are the log's, nothing of a run is markup, broken logs are a sentence, long runs make a small page.

Left out: the verdict (test_page_verdict.py), and what a browser makes of it (test_page_looks.py).
"""

import base64
import hashlib
import html
import json
import math
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import report_runs
from helpers import byte_tokenizer, encode
from report_runs import NASTY, S, drawn, episodes_of, lines, metrics_line, nasty_run, page_of, rollout_line, words

from nanoragen.report import charts
from nanoragen.report import page as report
from nanoragen.report.episodes import MAX_STEPS
from nanoragen.report.runs import Run, spread, visible
from nanoragen.report.verdict import View

ROOT = Path(__file__).resolve().parents[3]

make = report_runs.make  # the fixture


# -- the numbers -----------------------------------------------------------------------------------------------------------


def test_the_numbers_are_the_logs(make):
    folder = make(change=lambda s: {"grad_norm/2/task": 0.5 * s, "grad_norm/10/task": 1.0, "grad_norm/2/kl": 0.25})
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def check(chart, index, key):
        found = drawn(folder, chart)[index]
        assert found["x"] == [m["step"] for m in log] and found["y"] == pytest.approx([m[key] for m in log])
        return found

    check("success", 0, "lake/success")
    check("information", 1, S + "mi_upper_bound")
    check("retrieval", 0, S + "retrieval_accuracy")
    check("spread", 0, "rollout/in_group_reward_std")
    check("kept", 0, "rollout/filter_kept_ratio")
    assert check("information", 0, S + "mi_seq_estimate")["half"][0] == pytest.approx(1.96 * 0.05, rel=1e-4)
    assert check("reward", 0, "reward")["half"][2] == pytest.approx(1.96 * 0.4 / math.sqrt(32), rel=1e-4)
    held = drawn(folder, "success")[1]
    assert (held["x"], held["y"]) == ([0, 8], [0.4, 0.7]) and held["half"][1] == pytest.approx((0.05, 0.05))
    task, kl = drawn(folder, "gradients")
    assert (task["x"], task["y"], kl["x"], kl["y"]) == ([2, 10], [2.25, 1.0], [2], [0.25])  # in natural order
    assert [s["label"] for s in drawn(folder, "seconds")] == ["diagnosis", "rollout", "whole step without evaluation"]
    text = words(page_of(folder))
    assert "Held out: 40.0% (95%: 35.0% to 45.0%) at first, 70.0% (95%: 65.0% to 75.0%) at last" in text
    assert "a reasoning's own prompt has 81.2% of the probability on average; chance is 50.0%" in text
    assert "diagnosis 5%, rollout 57%" in text  # (0.25, 2 + 4.5/7) of 4 + 4.5/7
    assert text.count("Healthy:") == text.count("This run:") + 2 >= 10  # each chart; the verdict and the episodes


def test_what_was_not_logged_is_left_out(make):
    folder = make()
    keep = ("step", "reward", "lake/success")
    lines(folder / "metrics.jsonl", [{k: metrics_line(s)[k] for k in keep} for s in (1, 2)])
    (folder / "cross.jsonl").unlink()
    page = page_of(folder)
    assert re.findall(r'<figure id="(\w+)"', page) == ["success", "reward"] and "was not measured" in words(page)


def test_what_a_run_logs_beside_success_and_mi_is_drawn(make):
    """Loss, KL, gradient norm, clip share, entropy, length and parse rate."""
    keys = ("loss", "approx_kl", "grad_norm", "clip_ratio/region_mean", "entropy", "completions/mean_length", "rollout/parse_rate")
    folder = make(change=lambda s: {k: s / 10 for k in keys})
    found = [s["y"] for chart in ("loss", "kl", "gradient", "clipped", "entropy", "length", "parse") for s in drawn(folder, chart)]
    assert found == [[s / 10 for s in range(1, 9)]] * 7


def test_the_page_says_what_made_the_run_and_when(make):
    folder = make()
    about = {"commit": "abc1234", "started": "2026-12-01T10:00:00+0000", "duration": 61.4, "versions": {"torch": "2.13.0", "nanoragen": "0.1.0"}}
    assert "steps took 0:00:37 in all" in words(page_of(folder))  # 8 * 4 + 36 / 7
    assert "the run took" not in words(page_of(folder))
    (folder / "run.json").write_text(json.dumps(about))
    assert "started 2026-12-01T10:00:00+0000; commit abc1234" in words(page_of(folder)) and "torch 2.13.0" in words(page_of(folder))
    assert "the run took 0:01:01" in words(page_of(folder))
    (folder / "run.json").write_text('{"commit": 3, "versions": [], "started": null')
    assert "Settings of run" in words(page_of(folder))


# -- nothing of a run is markup ---------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [k for k, _ in attrs]


def test_nothing_of_a_run_becomes_markup(make):
    plain, page = page_of(make()), page_of(nasty_run(make))
    found = Tags(page)
    assert found.tags.count("script") == 1 and set(found.tags) <= set(Tags(plain).tags) and "onerror" not in found.attributes
    assert page.encode("utf-8") and "\u202e" not in page and "\x00" not in page
    shown = visible(NASTY)
    assert "\u27e8U+202E\u27e9evil" in shown and "\u27e8U+D83D\u27e9" in shown and "\U0001f680" in shown
    assert page.count(html.escape(shown)) > 8  # in the settings, the regimes and the episodes, as text


def test_the_page_needs_nothing_and_runs_only_its_own_script(make):
    page = page_of(make())
    found, script = Tags(page), re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert len(script) == 1 and f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert not {"src", "srcset", "action"} & set(found.attributes) and not {"link", "img", "iframe"} & set(found.tags)
    assert set(re.findall(r'href="(.)', page)) == {"#"}  # sections of the page, and shapes of its charts
    assert not re.findall(r"https?://", page) and "@import" not in page and set(re.findall(r"url\((.)", page)) <= {"#"}
    names = re.findall(r' id="([^"]+)"', page)
    assert len(set(names)) == len(names) and set(re.findall(r'href="#([^"]+)', page)) <= set(names)


def test_it_needs_no_torch():
    code = "import sys; from nanoragen.report import page; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# -- broken logs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("metrics.jsonl", b"", "Nothing to judge yet: no step has been logged"),
        ("metrics.jsonl", None, "Nothing to judge yet: no step has been logged"),
        ("metrics.jsonl", b'{"step": 1, "reward": 0.5}\n{"step": 2, "rew', "The last line of metrics.jsonl is cut off"),
        ("metrics.jsonl", b'{"step": 1}\n\xff\xfe\nnull\n[1]\n{"reward": 3}\n', "4 lines of metrics.jsonl cannot be read"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", "1 lines of metrics.jsonl cannot be read"),
        ("metrics.jsonl", b'{"step": 1, "reward": NaN, "lake/success": Infinity, "step_time": -Infinity}\n', "Too early to say"),
        ("metrics.jsonl", b'{"step": 1, "reward": "high", "reward_std": [1], "lake/success": null, "step_time": true}\n', "Too early"),
        ("metrics.jsonl", b'{"step": 1, "reward": 1e308, "reward_std": -1e308}\n', "Too early to say"),
        ("config.json", b'{"steps":', "config.json is not there"),
        ("config.json", b'{"groups": "many", "steps": [8], "env": {"a": 1}}', "Settings of run"),
        ("rollouts.jsonl", b"", "No episodes were logged"),
        ("rollouts.jsonl", b'{"step": 1, "messages": 3, "turns": [4], "ids": null}\n{"step": 2', "1 of 1 steps|All 1 episodes"),
        ("cross.jsonl", b'{"step": 1, "posterior": [[1, NaN], [0.5]], "own": [0, 1]}\n{"step": 2, "own": 3}\n', "No cross matrix|was logged"),
        ("cross.jsonl", b'{"step": 1, "posterior": [[NaN, 1]], "own": [0], "size": "big"}\n', "no finite probability"),
    ],
)  # fmt: skip
def test_a_broken_log_is_a_sentence(make, name, content, said):
    folder = make()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    page = page_of(folder)
    text = words(page)
    if name != "cross.jsonl" or "finite" in said:
        assert re.search(said, text), text[:600]
    assert not re.search(r"\bnan\b|inf\b", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).split("<h2>Episodes")[0])


def test_gaps_of_a_series_stay_gaps(make):
    folder = make()
    rows = [metrics_line(s) for s in range(1, 6)]
    rows[2]["reward"] = math.nan
    del rows[3]["reward"]
    lines(folder / "metrics.jsonl", rows)
    (series,) = drawn(folder, "reward")
    assert series["x"] == [1, 2, 3, 5] and series["y"][2] is None and page_of(folder)


def test_reading_goes_on_where_it_stopped(make):
    folder = make(steps=3)
    run = Run(folder).read()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics_line(4)) + "\n" + '{"step": 5, "rew')
    with open(folder / "rollouts.jsonl", "a") as file:
        file.write(json.dumps(rollout_line(4)) + "\n")
    assert sorted(run.read().steps) == [1, 2, 3, 4] and run.torn == {"metrics.jsonl"}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('ard": 2.5}\n')
    assert run.read().steps[5] == {"step": 5, "reward": 2.5} and not run.torn
    assert report.page([run]) == page_of(folder)
    lines(folder / "metrics.jsonl", [metrics_line(1)])  # cut back: everything anew
    assert sorted(run.read().steps) == [1] and report.page([run]) == page_of(folder)


# -- bounds -------------------------------------------------------------------------------------------------------------------


def test_a_long_run_makes_a_small_page(make):
    """2,000 steps and over 100 MB of episodes; some are huge, and every character needs twelve bytes in JSON."""
    folder = make(steps=2000)
    with open(folder / "rollouts.jsonl", "w") as file:
        tail = json.dumps(rollout_line(1, text="long " * 500)).split(",", 1)[1] + "\n"
        huge = json.dumps(rollout_line(1, text="\U0001f680" * 200_000)).split(",", 1)[1] + "\n"
        for step in range(1, 2001):
            file.writelines(f'{{"step": {step},{tail}' for _ in range(10))
            if step in (1, 2000):
                file.writelines(f'{{"step": {step},{huge}' for _ in range(4))
    assert (folder / "rollouts.jsonl").stat().st_size > 100e6
    page = page_of(folder)
    assert len(page.encode()) < 3e6
    shown = sorted({e["step"] for e in episodes_of(folder)})
    assert len(shown) == MAX_STEPS and shown[0] == 1 and shown[-1] == 2000 and max(b - a for a, b in pairwise(shown)) < 190
    assert re.search(r"\d+ of 20008 episodes are in this page, of 12 of 2000 steps", words(page))
    x = drawn(folder, "success")[0]["x"]
    assert len(x) == charts.MAX_POINTS and (x[0], x[-1]) == (1, 2000) and page.count("<table class=heat>") == 3
    (folder / "rollouts.jsonl").unlink()


def test_spread_keeps_both_ends():
    assert spread(range(10), 4) == [0, 3, 6, 9] and spread([3, 5], 4) == [3, 5] and spread([], 4) == []


def test_a_long_text_is_cut_and_says_so(make):
    folder = make()
    lines(folder / "rollouts.jsonl", [rollout_line(1, text="x" * 50_000)])
    parts = episodes_of(folder)[0]["parts"]
    assert sum(len(p[2]) for p in parts) < 20_200 and "more characters)" in parts[0][2]


# -- episodes ----------------------------------------------------------------------------------------------------------------


def test_an_episode_is_cut_into_what_was_read_reasoned_and_answered(make):
    folder = make()
    record = rollout_line(1, 1)
    record["messages"] += [{"role": "user", "content": "next"}, {"role": "assistant", "content": "<think>no tag"}]
    record["turns"].append({"reply": "no tag", "actions": [], "parsed": False, "reward": -0.1, "advantage": 0.25})
    record["messages"].append({"role": "user", "content": "the end"})
    lines(folder / "rollouts.jsonl", [record])
    found = episodes_of(folder)[0]
    assert found["parts"] == [
        [0, "prompt", "system: Rules go on"], [0, "prompt", "user: map"], [0, "prompt", "<think>"], [0, "reasoning", "I see go on"],
        [0, "answer", "</think><answer>up</answer>"], [1, "prompt", "user: next"], [1, "answer", "no tag"], [2, "prompt", "user: the end"],
    ]  # fmt: skip
    assert found["turns"][1] == {"reward": -0.1, "advantage": 0.25, "parsed": False, "actions": []} and found["advantage"] == 0.5
    assert "values" not in found


@pytest.mark.parametrize("everywhere", [False, True])
def test_values_of_tokens_stand_at_their_tokens(make, everywhere):
    folder, tokenizer = make(), byte_tokenizer()
    tokenizer.save_pretrained(folder / "step_000008")
    read, reasoned, answered = (encode(tokenizer, text) for text in ("map", "hm", "</think>up"))
    ids, n = read + reasoned + answered, len(reasoned) + len(answered)
    values = [-0.5 * i for i in range(n)]
    record = rollout_line(8, ids=ids, mask=[0] * len(read) + [1] * n)
    record.update(ids=ids, mask=[0] * len(read) + [1] * n, logprobs=[None] * len(read) * everywhere + values, entropies=[1.0])
    record["turns"] = [{"start": len(read), "think_end": len(read) + len(reasoned), "end": len(ids), "reward": 1.0}]
    lines(folder / "rollouts.jsonl", [record])
    found = episodes_of(folder)[0]
    assert found["values"] == ["logprobs"]  # one entropy for three tokens is no entropy
    assert found["parts"] == [
        [0, "prompt", "map"], [0, "reasoning", ["h", "m"], {"logprobs": values[:2]}],
        [0, "answer", ["</think>", "u", "p"], {"logprobs": values[2:]}],
    ]  # fmt: skip


def test_a_character_of_several_tokens_is_shown_whole(make):
    folder, tokenizer = make(), byte_tokenizer()
    tokenizer.save_pretrained(folder / "step_000008")
    ids = encode(tokenizer, "a\U0001f680b") + encode(tokenizer, "\u00e9")[:1]  # one byte of two is no character
    record = rollout_line(8)
    record.update(ids=ids, mask=[1] * len(ids), logprobs=[-1.0] * len(ids))
    record["turns"] = [{"start": 0, "think_end": 0, "end": len(ids), "reward": 1.0}]
    lines(folder / "rollouts.jsonl", [record])
    part = episodes_of(folder)[0]["parts"][0]
    assert part == [0, "answer", ["a", "", "", "", "\U0001f680", "b", "\ufffd"], {"logprobs": [-1.0] * 7}]


# -- several runs, the command, and a run that goes on ----------------------------------------------------------------------


def test_two_runs_are_compared(make, capsys, tmp_path):
    a, b = make("a", seed=0, filter="top_p"), make("b", seed=1, filter="none", change=lambda s: {S + "mi_seq_estimate": 2 / s})
    report.main([str(a), str(b)])
    assert capsys.readouterr().out.strip() == str(a / "compare.html")
    page = (a / "compare.html").read_text()
    both = charts.lines_of("information", [View(Run(f).read()) for f in (a, b)])
    assert [s["colour"] for run in both for s in run] == ["c0", "c0", "c1", "c1"]
    assert both[1][0]["y"] == pytest.approx([2 / s for s in range(1, 9)]) and "b: MI, 95%" in page
    text = words(page)
    assert "2 runs compared" in text and "regime seed filter" in text
    assert "a 8 40.0% 70.0% 95.6% 91.9% diverse 0 top_p" in text  # MI 2 - 1/90 and 2 - 8/90 of log 8
    assert "b 8 40.0% 70.0% 96.2% 12.0% template collapse 1 none" in text
    assert "a and b have the same held-out success after training: 70.0% (95%: 65.0% to 75.0%)" in text
    assert "a has the higher MI (mean of the last 5 measurements), 1.93 (95%: 1.89 to 1.98); b has 0.35" in text
    assert "the intervals do not overlap" in text and not (a / "report.html").exists()
    report.main([str(a), "--out", str(tmp_path / "one.html")])
    assert "1 runs" not in (tmp_path / "one.html").read_text()


def test_bad_commands_are_one_line(make, tmp_path, capsys):
    for args in ([str(tmp_path / "none")], [str(make()), "--out", str(tmp_path / "no" / "folder.html")]):
        with pytest.raises(SystemExit) as stop:
            report.main(args)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and "valid: " in error
    assert f"out: {tmp_path / 'no' / 'folder.html'} cannot be written" in error  # that name, not the one of the file beside it


def test_refreshing_stays_under_its_share_of_the_time(make, monkeypatch):
    folder, clock, written = make(), [100.0], []
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])

    def slow(path, text):
        clock[0] += 2.0
        written.append(clock[0])

    monkeypatch.setattr(report, "write_whole", slow)
    page = report.Report(folder)
    while clock[0] < 3000:
        page.refresh()
        clock[0] += 1.0
    assert 5 < len(written) < 10 and min(b - a for a, b in pairwise(written)) >= 2 / report.SHARE


def test_a_disk_that_fails_costs_the_page_only(make):
    folder = make()
    (folder / "report.html").mkdir()
    page = report.Report(folder)
    with pytest.warns(UserWarning, match="report.html cannot be written"):
        page.write()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page.write()  # told once
    (folder / "report.html").rmdir()  # the disk is back
    page.write()
    assert (folder / "report.html").read_text() == page_of(folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "cross.jsonl",
        "metrics.jsonl",
        "report.html",
        "rollouts.jsonl",
    ]


def test_training_writes_the_report(tmp_path):
    import train
    from nanoragen.policy import loading as models

    c = train.Config(env="bandit", steps=2, groups=2, group_size=2, final_episodes=4, eval_every=0, max_tokens=40, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    train.run(c, *models.load("nano", device="cpu"), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page == page_of(tmp_path)  # written when all else was
    steps = sum(json.loads(line)["step_time"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert json.loads((tmp_path / "run.json").read_text())["duration"] > steps > 0 and "the run took" in words(page)
    held = drawn(tmp_path, "success")[1]
    assert held["x"] == [0, 2] and None not in held["half"] and "episodes are in this page" in words(page)
    assert page.count("<table class=heat>") == 2 and len(page.encode()) < 1e6 and "torch 2." in words(page)


def test_the_picture_of_the_front_page(make, capsys, tmp_path):
    a, b = make("a", filter="top_p"), make("b", filter="none")
    for name in ("c.svg", "c.png"):
        report.main([str(a), str(b), "--picture", str(tmp_path / name)])
    text = (tmp_path / "c.svg").read_text()
    assert "filter top_p: MI, 95%" in text and "H(Z|X)" in text and (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        report.main([str(a), "--picture", str(tmp_path / "c.jpg")])
    assert capsys.readouterr().err.count("valid: a name that ends in .svg or .png") == 1
