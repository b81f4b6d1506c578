"""The report: its numbers are the log's, nothing of a run is markup, broken logs are a sentence, long runs make a small page.

Left out: the verdict (test_report_verdict.py), and what a browser makes of it (test_report_looks.py).
"""

import base64
import hashlib
import html
import json
import math
import re
import warnings
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import report_runs
from helpers import byte_tokenizer, encode
from report_runs import NASTY, S, data_of, lines, metrics_line, nasty_run, page_of, rollout_line, words

from nanoragen.report import charts
from nanoragen.report import page as report
from nanoragen.report.runs import Run, spread, visible

make = report_runs.make  # the fixture


# -- the numbers -----------------------------------------------------------------------------------------------------------


def test_the_numbers_are_the_logs(make):
    folder = make(change=lambda s: {"grad_norm/q2/task": 0.5 * s, "grad_norm/q10/task": 1.0, "grad_norm/q2/kl": 0.25})
    page = page_of(folder)
    drawn = data_of(page)["charts"]
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def check(chart, index, key):
        series = drawn[chart]["series"][index]
        assert series["x"] == [m["step"] for m in log] and series["y"] == pytest.approx([m[key] for m in log], rel=1e-5)
        return series

    check("success", 0, "lake/success")
    check("information", 1, S + "mi_upper_bound")
    check("retrieval", 0, S + "retrieval_accuracy")
    check("spread", 0, "rollout/in_group_reward_std")
    check("kept", 0, "rollout/filter_kept_ratio")
    mi = check("information", 0, S + "mi_seq_estimate")
    assert mi["low"][0] == pytest.approx(2 - 1 / 90 - 1.96 * 0.05, abs=1e-5)
    reward = check("reward", 0, "reward")
    assert reward["high"][2] - reward["y"][2] == pytest.approx(1.96 * 0.4 / math.sqrt(32), abs=1e-5)
    held = drawn["success"]["series"][1]
    assert (held["x"], held["y"]) == ([0, 8], [0.4, 0.7]) and held["high"] == pytest.approx([0.45, 0.75])
    found = drawn["regimes"]["runs"][0]  # over the first measurement; the last point is the mean of steps 4 to 8
    assert found["x"][0] == found["y"][0] == 1 and found["y"][-1] == pytest.approx((2 - 6 / 90) / (2 - 1 / 90), rel=1e-5)
    assert drawn["cross"]["runs"][0]["frames"][-1] == {
        "step": 8,
        "p": [[0.75, 0.25], [0.125, 0.875]],
        "own": [0, 1],
        "size": [2, 2],
    }
    assert drawn["gradients"]["labels"] == ["q2", "q10"]  # in natural order
    assert [s["y"] for s in drawn["gradients"]["series"]] == [[2.25, 1.0], [0.25, None]]
    assert drawn["time"]["bars"][0][0] == "1" and drawn["time"]["bars"][0][1] == pytest.approx([2 + 1 / 7, 0.25, 1.75], rel=1e-5)
    text = words(page)
    assert "Held out: 40.0% (95%: 35.0% to 45.0%) at first, 70.0% (95%: 65.0% to 75.0%) at last" in text
    assert "a reasoning's own prompt has 81.2% of the probability on average; chance is 50.0%" in text
    assert "rollout 57%, the rest 38%, diagnosis 5%" in text  # (2 + 4.5/7, 1.75, 0.25) of 4 + 4.5/7
    assert text.count("Healthy:") >= 10 and text.count("This run:") == len(drawn) + 1  # each chart, and the episodes


def test_what_was_not_logged_is_left_out(make):
    folder = make()
    keep = ("step", "reward", "lake/success")
    lines(folder / "metrics.jsonl", [{k: metrics_line(s)[k] for k in keep} for s in (1, 2)])
    (folder / "cross.jsonl").unlink()
    page = page_of(folder)
    assert set(data_of(page)["charts"]) == {"success", "reward"} and "was not measured" in words(page)


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
    assert found.tags.count("script") == 2 and set(found.tags) <= set(Tags(plain).tags) and "onerror" not in found.attributes
    assert not set("<>&") & set(re.search(r'id="data">(.*)</script>\n<script>', page, re.DOTALL)[1])
    assert page.encode("utf-8") and "\u202e" not in page and "\x00" not in page
    shown = visible(NASTY)
    assert "\u27e8U+202E\u27e9evil" in shown and "\u27e8U+D83D\u27e9" in shown and "\U0001f680" in shown
    episode = data_of(page)["runs"][0]["episodes"][0]
    assert ["prompt", f"system: Rules {shown}"] == episode["parts"][0][1:] and episode["turns"][0]["actions"][0] == shown
    assert html.escape(shown) in page  # in the settings, as text


def test_the_page_needs_nothing_and_runs_only_its_own_script(make):
    page = page_of(make())
    found, script = Tags(page), re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert len(script) == 1 and f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert not {"src", "href", "srcset", "action"} & set(found.attributes) and not {"link", "img", "iframe"} & set(found.tags)
    assert (
        set(re.findall(r"https?://[^\"'\s<]*", page)) == {"http://www.w3.org/2000/svg"}
        and "@import" not in page
        and "url(" not in page
    )


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
    data_of(page)  # is JSON: no NaN


def test_gaps_of_a_series_stay_gaps(make):
    folder = make()
    rows = [metrics_line(s) for s in range(1, 6)]
    rows[2]["reward"] = math.nan
    del rows[3]["reward"]
    lines(folder / "metrics.jsonl", rows)
    series = data_of(page_of(folder))["charts"]["reward"]["series"][0]
    assert series["x"] == [1, 2, 3, 5] and series["y"][2] is None and series["low"][2] is None


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
    assert len(page) < 5e6
    data = data_of(page)
    shown = sorted({e["step"] for e in data["runs"][0]["episodes"]})
    assert len(shown) == report.MAX_STEPS and shown[0] == 1 and shown[-1] == 2000 and max(b - a for a, b in pairwise(shown)) < 90
    assert re.search(r"\d+ of 20008 episodes are in this page: the first ones of 24 of 2000 steps", words(page))
    x = data["charts"]["success"]["series"][0]["x"]
    assert len(x) == charts.MAX_POINTS and (x[0], x[-1]) == (1, 2000)
    assert len(data["charts"]["time"]["bars"]) == 40 and len(data["charts"]["cross"]["runs"][0]["frames"]) == 24
    (folder / "rollouts.jsonl").unlink()


def test_spread_keeps_both_ends():
    assert spread(range(10), 4) == [0, 3, 6, 9] and spread([3, 5], 4) == [3, 5] and spread([], 4) == []


def test_a_long_text_is_cut_and_says_so(make):
    folder = make()
    lines(folder / "rollouts.jsonl", [rollout_line(1, text="x" * 50_000)])
    parts = data_of(page_of(folder))["runs"][0]["episodes"][0]["parts"]
    assert sum(len(p[2]) for p in parts) < 20_200 and "more characters)" in parts[0][2]


# -- episodes ----------------------------------------------------------------------------------------------------------------


def test_an_episode_is_cut_into_what_was_read_reasoned_and_answered(make):
    folder = make()
    record = rollout_line(1, 1)
    record["messages"] += [{"role": "user", "content": "next"}, {"role": "assistant", "content": "<think>no tag"}]
    record["turns"].append({"reply": "no tag", "actions": [], "parsed": False, "reward": -0.1, "advantage": 0.25})
    record["messages"].append({"role": "user", "content": "the end"})
    lines(folder / "rollouts.jsonl", [record])
    found = data_of(page_of(folder))["runs"][0]["episodes"][0]
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
    found = data_of(page_of(folder))["runs"][0]["episodes"][0]
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
    part = data_of(page_of(folder))["runs"][0]["episodes"][0]["parts"][0]
    assert part == [0, "answer", ["a", "", "", "", "\U0001f680", "b", "\ufffd"], {"logprobs": [-1.0] * 7}]


# -- several runs, the command, and a run that goes on ----------------------------------------------------------------------


def test_two_runs_are_compared(make, capsys, tmp_path):
    a, b = make("a", seed=0, filter="top_p"), make("b", seed=1, filter="none", change=lambda s: {S + "mi_seq_estimate": 2 / s})
    report.main([str(a), str(b)])
    assert capsys.readouterr().out.strip() == str(a / "compare.html")
    page = (a / "compare.html").read_text()
    series = data_of(page)["charts"]["information"]["series"]
    assert [(s["name"], s["color"]) for s in series[::2]] == [("a: MI, 95%", 0), ("b: MI, 95%", 1)]
    assert series[2]["y"] == pytest.approx([2 / s for s in range(1, 9)], rel=1e-5)
    text = words(page)
    assert "2 runs compared" in text and "regime seed filter" in text
    assert "a 8 40.0% 70.0% 95.6% 91.9% diverse 0 top_p" in text  # MI 2 - 1/90 and 2 - 8/90 of log 8
    assert "b 8 40.0% 70.0% 96.2% 12.0% template collapse 1 none" in text
    assert [r["name"] for r in data_of(page)["runs"]] == ["a", "b"] and not (a / "report.html").exists()
    report.main([str(a), "--out", str(tmp_path / "one.html")])
    assert "1 runs" not in (tmp_path / "one.html").read_text()


def test_bad_commands_are_one_line(make, tmp_path, capsys):
    twice = [str(tmp_path), "--out", "a.html", "--out", "b.html"]
    for args in (twice, [str(tmp_path / "none")], [str(make()), "--out", str(tmp_path / "no" / "folder.html")]):
        with pytest.raises(SystemExit) as stop:
            report.main(args)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and "valid: " in error
        assert ("out: is given twice" in error) == (args is twice)
    assert f"out: {tmp_path / 'no' / 'folder.html'} cannot be written" in error  # that name, not the one of the file beside it


def test_refreshing_stays_under_its_share_of_the_time(make, monkeypatch):
    folder, clock, written = make(), [100.0], []
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])

    def slow(text, path):
        clock[0] += 2.0
        written.append(clock[0])

    monkeypatch.setattr(report, "write", slow)
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
    held = data_of(page)["charts"]["success"]["series"][1]
    assert held["x"] == [0, 2] and None not in held["low"] + held["high"] and "episodes are in this page" in words(page)
    frames = data_of(page)["charts"]["cross"]["runs"][0]["frames"]
    assert [f["step"] for f in frames] == [1, 2] and all(sum(row) == pytest.approx(1, abs=0.02) for f in frames for row in f["p"])
