"""The report: its numbers are the log's, nothing of a run is markup, broken logs are a sentence, and a browser draws it."""

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
import warnings
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch
from helpers import byte_tokenizer, encode

from nanoragen import charts, collapse, report
from nanoragen.runs import Run, spread, visible

S = "collapse_first_turn_sample/"
NASTY = "</script><img src=x onerror=alert(1)><!-- &lt;b&gt; \u202eevil\u202c \U0001f680 \ud83d \x00 {data} $& \u2028"


def metrics_line(step, **more):
    """A step as train.py logs it; every number is another one."""
    return {
        "step": step, "time/rollout": 2.0 + step / 7, "time/diagnosis": 0.25, "reward": 0.1 * step + 1 / 3, "reward_std": 0.4,
        "lake/success": min(1.0, 0.3 + step / 50), f"{S}conditional_entropy_est": 0.6 - step / 100,
        f"{S}mi_seq_estimate": 2.0 - step / 90, f"{S}mi_seq_estimate_se": 0.05, f"{S}mi_upper_bound": math.log(8),
        f"{S}retrieval_accuracy": 0.9, f"{S}retrieval_accuracy_se": 0.05, f"{S}retrieval_chance_level": 0.125,
        "rollout/in_group_reward_std": 0.5 + step / 30, "rollout/zero_variance_ratio": 0.2, "rollout/filter_kept_ratio": 0.5,
        "rollout/kept_groups": 4, "nonfinite_updates": 0, "skipped": 0.0, "step_time": 4.0 + step / 7, **more,
    }  # fmt: skip


def evaluation(prefix, p, half=0.05):
    return {f"{prefix}/lake/success": p, f"{prefix}/lake/success_low": p - half, f"{prefix}/lake/success_high": p + half}


def rollout_line(step, n=0, text="go on", **more):
    reply = f"I see {text}</think><answer>up</answer>"
    return {
        "step": step, "env": "lake", "seed": 7, "group": n // 2, "success": n % 2 == 0, "reward": float(n), "terminated": True,
        "truncated": "", "advantage": n - 0.5, "kept": True,
        "messages": [{"role": "system", "content": f"Rules {text}"}, {"role": "user", "content": "map"},
                     {"role": "assistant", "content": f"<think>{reply}"}],
        "turns": [{"start": 3, "end": 6, "think_end": 5, "reply": reply, "actions": ["up"], "parsed": True, "reward": float(n)}],
        "ids": [1, 2, 3, 4, 5, 6], "mask": [0, 0, 0, 1, 1, 1],
    }  # fmt: skip


def cross_line(step):
    return {"step": step, "size": [2, 2], "own": [0, 1], "posterior": [[0.75, 0.25], [0.125, 0.875]]}


def lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def make(tmp_path):
    """make(name, steps, change(step) -> more metrics, **config) -> the folder of a run of a lake."""

    def make(name="run", steps=8, change=None, **config):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"env": "lake", "model": "nano", "steps": steps, "groups": 8, "group_size": 4, "lr": 1e-3, **config}
        (folder / "config.json").write_text(json.dumps(settings))
        first, last = evaluation("eval/before", 0.4), evaluation("eval", 0.7)
        lines(folder / "metrics.jsonl", [
            metrics_line(s, **(first if s == 1 else {}), **(last if s == steps else {}), **(change(s) if change else {}))
            for s in range(1, steps + 1)
        ])  # fmt: skip
        lines(folder / "cross.jsonl", [cross_line(s) for s in range(1, steps + 1)])
        lines(folder / "rollouts.jsonl", [rollout_line(s, n) for s in range(1, steps + 1) for n in range(4)])
        return folder

    return make


def page_of(*folders) -> str:
    return report.page([Run(f).read() for f in folders])


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def words(page: str) -> str:
    """The text of the page without scripts and styles."""
    body = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


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


def test_posterior_against_bayes():
    """Three rows, prompts of weight 2/3 and 1/3; the row of prompt 1 comes last, whatever its place."""
    L = torch.tensor([[0.2, 0.7], [0.5, 0.1], [0.4, 0.4]]).log()
    found = collapse.Measurement({}, L, [1, 0, 0], [1, 1, 1], None)
    record = report.cross_record(5, found)
    want = [[0.5 * 2, 0.1], [0.4 * 2, 0.4], [0.2 * 2, 0.7]]
    assert record == {
        "step": 5, "size": [3, 2], "own": [0, 0, 1],
        "posterior": [[pytest.approx(p / sum(row), abs=6e-4) for p in row] for row in want],
    }  # fmt: skip
    big = collapse.Measurement({}, torch.zeros(80, 40), [i // 2 for i in range(80)], [1] * 80, None)
    record = report.cross_record(1, big)
    assert (len(record["posterior"]), len(record["posterior"][0]), record["size"]) == (32, 32, [80, 40])
    assert record["posterior"][0] == [0.025] * 32 and record["own"] == [i // 2 for i in range(32)]


# -- the verdict -----------------------------------------------------------------------------------------------------------


def verdict(folder):
    level, head, why = report.verdict(charts.View(Run(folder).read()))
    return level, head, " ".join(why)


def test_verdict_of_a_healthy_run(make):
    level, head, why = verdict(make())
    assert level == "good" and "rose from 40.0% to 70.0%" in head and "depends on its prompt" in head
    assert "intervals do not overlap" in why and "What to do: nothing" in why


def test_verdict_of_template_collapse(make):
    """Success rises, entropy stays, MI falls to a tenth: not healthy, and it says since when and what to do."""
    folder = make(change=lambda s: {S + "mi_seq_estimate": 2.0 if s < 5 else 0.2})
    level, head, why = verdict(folder)
    assert level == "bad" and "template collapse" in head and "--filter top_p" in why
    # means of five: (4 x 2 + 0.2) / 5 = 1.64 at step 5, 1.28, then 0.92, under half
    assert "steps 1 to 6: diverse; steps 7 to 8: template collapse" in words(page_of(folder))


@pytest.mark.parametrize(
    "last, level, said",
    [(0.2, "bad", "fell from 40.0% to 20.0%"), (0.45, "watch", "went from 40.0% to 45.0%, which may be chance")],
)
def test_verdict_of_success_that_does_not_rise(make, last, level, said):
    folder = make(change=lambda s: {})
    rows = [metrics_line(s) for s in range(1, 9)]
    rows[0].update(evaluation("eval/before", 0.4))
    rows[7].update(evaluation("eval", last))
    lines(folder / "metrics.jsonl", rows)
    found = verdict(folder)
    assert found[0] == level and said in found[1] and "The signals are there" in found[2]


def test_verdict_of_reasoning_that_never_depended_on_its_prompt(make):
    """The regime compares with the first measurement, so it is "diverse" here; retrieval at chance tells."""
    level, head, why = verdict(make(change=lambda s: {S + "mi_seq_estimate": 0.05, S + "retrieval_accuracy": 0.15}))
    assert level == "watch" and "ignores its prompt" in head and "15.0% against 12.5%" in why


def test_mi_is_judged_as_a_share_of_its_bound(make):
    """Two prompts instead of eight: MI falls to a third in nats, and is still all that there is to know. And the other way round."""
    bound = lambda s: {S + "mi_upper_bound": math.log(8 if s < 3 else 2), S + "mi_seq_estimate": math.log(8 if s < 3 else 2)}
    assert verdict(make(change=bound))[0] == "good"
    grown = lambda s: {S + "mi_upper_bound": math.log(2 if s < 3 else 64), S + "mi_seq_estimate": math.log(2)}
    level, head, why = verdict(make("grown", change=grown))
    assert level == "bad" and "template collapse" in head and "MI 17% of its bound, first 100%" in why


def test_with_one_prompt_there_is_no_regime(make):
    one = {S + "mi_seq_estimate": 0.0, S + "mi_upper_bound": 0.0, S + "retrieval_accuracy": 1.0, S + "retrieval_chance_level": 1.0}
    folder = make(change=lambda s: one, groups=1)
    level, head, why = verdict(folder)
    assert level == "watch" and "was not measured" in head and "--groups 2 or more" in why
    page = page_of(folder)
    assert "regimes" not in data_of(page)["charts"] and not re.search("collapse\\b|diverse", words(page).split("Settings of")[0])


def test_verdict_names_what_happened(make):
    folder = make(
        steps=8, change=lambda s: {"nonfinite_updates": int(s == 3), "skipped": float(s > 6), "early_stopped/success": s == 8}
    )
    _, _, why = verdict(folder)
    assert "1 updates were not finite" in why and "2 of 8 steps updated nothing" in why
    assert "stopped early: held-out success under 1% in 5 evaluations running" in why
    (folder / "config.json").write_text('{"env": "lake", "steps": 20}')
    lines(folder / "metrics.jsonl", [metrics_line(s) for s in (1, 2)])
    level, _, why = verdict(folder)
    assert level == "unknown" and "ends at step 2 of 20" in why


def test_one_measurement_that_jumps_is_not_the_verdict(make):
    """A run whose reasoning collapsed, and a last measurement of a few prompts that looks well by chance."""
    folder = make(change=lambda s: {S + "mi_seq_estimate": 2.0 if s in (1, 8) else 0.1})
    assert "template collapse" in verdict(folder)[1]
    assert verdict(make("other", change=lambda s: {S + "mi_seq_estimate": 0.1 if s == 8 else 2.0}))[0] == "good"


def test_one_retrieval_that_jumps_is_not_the_verdict(make):
    """A standard error of 0.1 alone reaches chance; the mean of five has 0.1 / sqrt(5), and lies well above it."""
    jump = lambda s: {S + "retrieval_accuracy": 0.25 if s == 8 else 0.9, S + "retrieval_accuracy_se": 0.1}
    assert verdict(make(change=jump))[0] == "good"
    low = lambda s: {S + "retrieval_accuracy": 0.9 if s in (1, 8) else 0.0}  # mean of the last five: 18.0%
    level, _, why = verdict(make("low", change=lambda s: {**low(s), S + "retrieval_accuracy_se": 0.2}))
    assert level == "watch" and "18.0% against 12.5%" in why


def test_sentences_on_mi_and_chance(make):
    """MI: the mean of the last five, as in the regime. Chance of unequal prompts: (2/3)^2 + (1/3)^2, what ignoring them gives."""
    folder = make(change=lambda s: {S + "mi_seq_estimate": 1.0 if s < 8 else 2.0})
    row = [0.667, 0.333]
    lines(folder / "cross.jsonl", [{"step": 8, "size": [3, 2], "own": [0, 0, 1], "posterior": [row, row, row]}])
    text = words(page_of(folder))
    assert f"is 1.20 in the mean of the last 5, {1.2 / math.log(8):.0%} of its bound" in text
    assert "own prompt has 55.6% of the probability on average; chance is 55.6%" in text


def test_one_evaluation_and_one_step(make):
    a, b = make("a", steps=1), make("b")
    rows = [metrics_line(1, **evaluation("eval/before", 0.4))]
    lines(a / "metrics.jsonl", rows)
    text = words(page_of(a))
    assert ", 1 step " in text and "40.0% (95%: 35.0% to 45.0%), measured once" in text and "8 steps" in words(page_of(b))
    assert "a 1 40.0% \u2013 95.6%" in words(page_of(a, b))


def test_the_thresholds_are_those_of_collapse(make, monkeypatch):
    folder = make(change=lambda s: {S + "mi_seq_estimate": 2.0 if s < 4 else 1.6})
    assert data_of(page_of(folder))["charts"]["regimes"]["low"] == collapse.LOW == 0.5 and verdict(folder)[0] == "good"
    monkeypatch.setattr(collapse, "LOW", 0.85)
    assert data_of(page_of(folder))["charts"]["regimes"]["low"] == 0.85 and "template collapse" in verdict(folder)[1]


# -- nothing of a run is markup ---------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [k for k, _ in attrs]


def nasty_run(make):
    """A run that says NASTY wherever a run can say anything."""
    folder = make("a<b>&'\u202ex", model=NASTY, env=NASTY)
    (folder / "config.json").write_text(json.dumps({"env": "lake", "model": NASTY, NASTY: NASTY, "steps": 8}))
    name = NASTY.replace("/", "")
    odd = {f"grad_norm/{name}/task": 1.0, f"time/{name}": 1.0, "regime": NASTY, f"early_stopped/{name}": True}
    lines(folder / "metrics.jsonl", [metrics_line(s, **odd) for s in range(1, 9)])
    records = [rollout_line(s, n, NASTY) for s in (1, 8) for n in range(4)]
    for r in records:
        r.update(env=NASTY, truncated=NASTY)
        r["turns"][0]["actions"] = [NASTY, {"deep": NASTY}]
        r["messages"][1] = {"role": NASTY, "content": NASTY}
    lines(folder / "rollouts.jsonl", records)
    return folder


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


def coloured_run(make):
    """Two tokens of reasoning, two of the answer; log-probs 0, -1, -5, -9 and entropies 0, 0.5, 1, 2."""
    folder, tokenizer = make(), byte_tokenizer()
    tokenizer.save_pretrained(folder / "step_000008")
    ids = encode(tokenizer, "map" + "hm" + "up")
    record = rollout_line(8)
    record.update(ids=ids, mask=[0, 0, 0, 1, 1, 1, 1], logprobs=[0.0, -1.0, -5.0, -9.0], entropies=[0.0, 0.5, 1.0, 2.0])
    record["turns"] = [{"start": 3, "think_end": 5, "end": 7, "reward": 1.0}]
    lines(folder / "rollouts.jsonl", [rollout_line(1), rollout_line(1, 1), record, rollout_line(8, 1)])
    return folder


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
    for args in ([str(tmp_path / "none")], [str(make()), "--out", str(tmp_path / "no" / "folder.html")]):
        with pytest.raises(SystemExit) as stop:
            report.main(args)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and "valid: " in error
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
    from nanoragen import model as models

    c = train.Config(env="bandit", steps=2, groups=2, group_size=2, final_episodes=4, eval_every=0, max_tokens=40, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    train.run(c, *models.load("nano", device="cpu"), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page == page_of(tmp_path)  # written when all else was
    held = data_of(page)["charts"]["success"]["series"][1]
    assert held["x"] == [0, 2] and None not in held["low"] + held["high"] and "episodes are in this page" in words(page)
    frames = data_of(page)["charts"]["cross"]["runs"][0]["frames"]
    assert [f["step"] for f in frames] == [1, 2] and all(sum(row) == pytest.approx(1, abs=0.02) for f in frames for row in f["p"])


# -- how it looks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(dark):
    """WCAG 2.2: text 4.5 to 1 against what is behind it, lines and marks 3 to 1."""
    css = (report.ASSETS / "report.css").read_text()
    block = css.split("prefers-color-scheme: dark")[1] if dark else css.split("@media")[0]
    paint = dict(re.findall(r"--(\w+): #(\w{6})", block))

    def luminance(name):
        rgb = [int(paint[name][i : i + 2], 16) / 255 for i in (0, 2, 4)]
        return sum(w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), rgb))

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    pairs = [
        ("text", "back"),
        ("text", "raised"),
        ("muted", "back"),
        ("muted", "raised"),
        ("text", "reasoning"),
        ("text", "answer"),
        ("back", "deep"),
    ]
    assert all(contrast(a, b) >= 4.5 for a, b in pairs), [(p, contrast(*p)) for p in pairs]
    marks = [*(f"c{i}" for i in range(6)), "good", "watch", "bad", "late"]
    assert all(contrast(m, "back") >= 3 for m in marks), [(m, contrast(m, "back")) for m in marks]


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
PROBE = """<!DOCTYPE html><meta charset="utf-8"><pre id="result">none</pre>
<iframe id="phone" width="390" height="844" srcdoc="{page}"></iframe><iframe id="desk" width="1280" height="800" srcdoc="{page}"></iframe>
<script>
function look(frame) {
  const w = frame.contentWindow, d = frame.contentDocument, box = d.getElementById("viewer"), shown = () => box.querySelector(".facts").textContent;
  const key = (name, shift) => box.dispatchEvent(new w.KeyboardEvent("keydown", { key: name, shiftKey: shift, bubbles: true, cancelable: true }));
  const out = { wide: d.documentElement.scrollWidth, inner: w.innerWidth, charts: {}, pwned: w.pwned === undefined && window.pwned === undefined ? 0 : 1 };
  for (const s of d.querySelectorAll("section")) out.charts[s.id] = s.querySelectorAll("svg[role=img] > *").length;
  out.images = d.querySelectorAll("img").length;
  out.bad = [...d.querySelectorAll("svg *")].filter((n) => [...n.attributes].some((a) => /NaN|Infinity|undefined/.test(a.value))).length;
  out.start = shown(); key("ArrowRight", false); out.right = shown(); key("ArrowLeft", true); out.step = shown();
  out.text = box.querySelector(".text").textContent;
  key("ArrowRight", true); // to the first episode of the last step
  out.colours = {};
  for (const name of ["mask", "logprobs", "entropies"]) {
    const radio = box.querySelector(`input[value=${name}]`);
    if (!radio) continue;
    radio.click();
    const tokens = [...box.querySelectorAll(".text span[title]")];
    const alpha = (t) => { const c = w.getComputedStyle(t).backgroundColor, a = c.match(/[\\/,] *([\\d.]+)\\)$/); return c.startsWith("rgb(") ? 1 : a ? Number(a[1]) : 1; };
    out.colours[name] = { alpha: tokens.map(alpha), said: d.getElementById("colours").textContent, scale: box.querySelectorAll(".scale").length, title: tokens[3].title };
  }
  const slider = d.querySelector("#cross input");
  slider.value = 0; slider.dispatchEvent(new w.Event("input"));
  out.cross = d.querySelector("#cross output").textContent;
  const details = d.querySelector("#information details");
  details.open = true; details.dispatchEvent(new w.Event("toggle"));
  out.rows = details.querySelectorAll("tr").length;
  return out;
}
addEventListener("load", () => {
  let found;
  try { found = ["phone", "desk"].map((id) => look(document.getElementById(id))); } catch (e) { found = String(e.stack); }
  document.getElementById("result").textContent = JSON.stringify(found);
});
</script>"""


def browse(page, folder):
    """What PROBE finds in the page on a phone and on a desk, in a headless browser; the page itself is unchanged."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if not browser:
        pytest.skip(f"no browser on the PATH (looked for {', '.join(BROWSERS)})")
    probe = folder / "probe.html"
    probe.write_text(PROBE.replace("{page}", html.escape(page)))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000",
         "--dump-dom", probe.as_uri()],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    text = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text, done.stderr[-2000:]
    found = json.loads(html.unescape(text[1]))
    assert isinstance(found, list), found
    return found


def test_a_browser_draws_it(make, tmp_path):
    folder = nasty_run(make)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    log[3]["reward"] = None
    lines(folder / "metrics.jsonl", log)
    for seen, width in zip(browse(page_of(folder), tmp_path), (390, 1280)):
        assert seen["inner"] == width and seen["wide"] <= width  # nothing to scroll sideways
        drawn = {k: n for k, n in seen["charts"].items() if k != "episodes"}
        assert set(drawn) == set(charts.CHARTS) and min(drawn.values()) > 8, drawn
        assert (seen["pwned"], seen["images"], seen["bad"]) == (0, 0, 0)
        assert (
            "step 8" in seen["start"] and "reward 0" in seen["start"] and "reward 1" in seen["right"] and "step 1" in seen["step"]
        )
        assert seen["colours"] == {}  # no values, no choice
        assert "</script><img src=x" in seen["text"] and seen["cross"] == "step 1" and seen["rows"] == 9


def test_a_browser_colours_tokens_by_mask_log_prob_or_entropy(make, tmp_path):
    for seen in browse(page_of(coloured_run(make)), tmp_path):
        found = seen["colours"]
        assert found["mask"]["alpha"] == [0, 0, 0, 0] and "blue is sampled reasoning" in found["mask"]["said"]
        # full colour is 0.6 opaque: at -5 nats and below, and at the highest entropy
        assert found["logprobs"]["alpha"] == pytest.approx([0, 0.12, 0.6, 0.6], abs=0.01) and "0.7%" in found["logprobs"]["said"]
        assert found["entropies"]["alpha"] == pytest.approx([0, 0.15, 0.3, 0.6], abs=0.01)
        assert "2 nats" in found["entropies"]["said"] and found["entropies"]["title"] == "log-prob -9, entropy 2"
        assert [found[k]["scale"] for k in ("mask", "logprobs", "entropies")] == [0, 1, 1] and seen["wide"] <= seen["inner"]


def test_a_browser_draws_next_to_nothing_too(make, tmp_path):
    """One step, one of everything: no range is empty, nothing is divided by zero."""
    folder = make(steps=1)
    lines(folder / "rollouts.jsonl", [rollout_line(1), rollout_line(1, 1)])
    for seen in browse(page_of(folder), tmp_path):
        assert seen["bad"] == 0 and seen["wide"] <= seen["inner"] and seen["rows"] == 2
