"""Made-up runs for the tests of the report: folders with the logs that train.py would write, and what a page says of them."""

import html
import json
import math
import re

import pytest

from nanoragen.report import charts
from nanoragen.report import page as report
from nanoragen.report.episodes import chosen
from nanoragen.report.runs import Run
from nanoragen.report.verdict import View

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


def drawn(folder, key) -> list[dict]:
    """The lines of a chart of one run."""
    return charts.lines_of(key, [View(Run(folder).read())])[0]


def episodes_of(folder) -> list[dict]:
    """The episodes of the page of one run."""
    return chosen(Run(folder).read())


def words(page: str) -> str:
    """The text of the page without scripts and styles."""
    body = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


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
