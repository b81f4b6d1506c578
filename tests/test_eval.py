"""eval.py: the figures, the intervals, the baselines, the files, and one line for what cannot work."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import Ladder, byte_tokenizer, play, saved_model, script, tiny_model

import eval as program
from nanoragen import evaluate as module
from nanoragen.envs.base import EVAL_SEEDS
from nanoragen.evaluate import evaluate, interval, pass_at
from nanoragen.rollout.episodes import Sampling
from nanoragen.run.metrics import wilson

ENVS = ("sokoban", "frozen_lake", "bandit", "countdown")
SEEDS = list(range(12))


@pytest.fixture
def folder(tmp_path):
    return str(saved_model(tmp_path / "m"))


def run(capsys, *argv):
    program.main(list(argv))
    return capsys.readouterr().out


def error(capsys, *argv):
    with pytest.raises(SystemExit) as e:
        program.main(list(argv))
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and err.startswith("eval.py: error: ")
    return err.removeprefix("eval.py: error: ")


# -- figures -----------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_enumeration():
    from itertools import combinations

    solved = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]])
    for k in (1, 2, 3, 4):
        expected = np.mean([np.mean([max(c) for c in combinations(row, k)]) for row in solved.tolist()])
        assert pass_at(solved, k) == pytest.approx(expected, abs=1e-12)


def test_the_interval_counts_instances_as_far_as_their_episodes_end_alike():
    alike = np.repeat(np.array([[1], [0], [1], [0], [0]] * 10), 8, axis=1).astype(float)  # 50 instances x 8
    one = wilson(20, 50)
    assert interval(alike) == pytest.approx(one, abs=0.01) and interval(alike[:, :1]) == pytest.approx(one, abs=1e-12)
    rng = np.random.default_rng(0)
    mixed = (rng.random((50, 8)) < 0.4).astype(float)
    low, high = interval(mixed)
    assert high - low < 0.7 * (one[1] - one[0])
    n = mixed.size
    assert high - low >= np.subtract(*wilson(mixed.sum(), n)[::-1]) - 1e-12  # never narrower than independent episodes
    assert interval(np.zeros((50, 8))) == wilson(0, 50)  # nothing is known of how they vary: instances count


def test_the_interval_covers(seed=0):
    """Simulated: instances with their own chance of success; the interval holds the true mean about 95 times in 100."""
    rng, hits = np.random.default_rng(seed), 0
    for _ in range(400):
        chance = rng.beta(0.5, 0.5, size=(40, 1))
        low, high = interval((rng.random((40, 4)) < chance).astype(float))
        hits += low <= 0.5 <= high
    assert 0.91 <= hits / 400 <= 0.99


def test_a_model_is_counted_right(monkeypatch):
    """A scripted model that climbs where it should: success, return, turns and parse rate by hand."""
    monkeypatch.setattr(module, "make", lambda name, **options: Ladder(height=3))
    tokenizer = byte_tokenizer()
    replies = ["a</think><answer>up || up</answer>", "no tags", "b</think><answer>up</answer>"]
    model = script(tiny_model(tokenizer), play(*replies, tokenizer=tokenizer))
    found, episodes = evaluate(model, tokenizer, "ladder", [4, 5], Sampling(), samples=2)
    assert [e.seed for e in episodes] == [4, 4, 5, 5] and [e.group for e in episodes] == [0, 0, 1, 1]
    assert (found["success"], found["episodes"], found["instances"], found["turns"]) == (1.0, 4, 2, 3.0)
    assert found["parse_rate"] == pytest.approx(2 / 3) and found["return"] == pytest.approx(3 * -0.1 + 1.0 - 0.1)
    assert found["pass@1"] == found["pass@2"] == 1.0 and "collapse_first_turn_sample/mi_seq_estimate" not in found


# -- baselines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ENVS)
def test_the_solver_solves_and_chance_does_not(env):
    solver, _ = evaluate(None, None, env, SEEDS, Sampling(), policy="demonstrate")
    chance, played = evaluate(None, None, env, SEEDS, Sampling(), policy="random", samples=2)
    assert solver["success"] == 1.0 and chance["success"] < 1.0 and chance["return"] < solver["return"]
    again, replayed = evaluate(None, None, env, SEEDS, Sampling(), policy="random", samples=2)
    assert again == chance and [e.messages for e in replayed] == [e.messages for e in played]
    _, other = evaluate(None, None, env, SEEDS, Sampling(), policy="random", samples=2, seed=1)
    assert [e.messages for e in other] != [e.messages for e in played]


@pytest.mark.parametrize("policy", ["random", "demonstrate"])
def test_baselines_keep_to_the_limits_and_pay_for_unused_actions(policy):
    sampling = Sampling(max_turns=2, max_actions_per_turn=1)
    _, episodes = evaluate(None, None, "sokoban", SEEDS, sampling, policy=policy, env_options={"min_moves": 3})
    for e in episodes:
        assert len(e.turns) == 2 and all(len(t.actions) == 1 for t in e.turns) and e.truncated == "turns" and not e.success
    _, free = evaluate(None, None, "sokoban", SEEDS, Sampling(), policy=policy)
    assert max(len(t.actions) for e in free for t in e.turns) == 2


def test_a_plan_that_ends_early_is_charged_like_a_rollout(monkeypatch):
    class Lazy(Ladder):
        def demonstrate(self):
            yield "up"

    monkeypatch.setattr(module, "make", lambda name, **options: Lazy())
    found, episodes = evaluate(None, None, "lazy", [0], Sampling(), policy="demonstrate")
    assert episodes[0].truncated == "turns" and found["return"] == pytest.approx(3 * 2 * -0.1)  # 1 used, 5 not


def test_a_plan_is_paid_and_ended_as_the_same_actions_of_a_model_are(monkeypatch):
    class Climber(Ladder):
        def demonstrate(self):
            for n in range(self.max_turns * self.max_actions_per_turn):
                assert self.acted == ["up"] * n  # each is asked for when those before were executed
                yield "up"

    tokenizer, answer = byte_tokenizer(), "</think><answer>up || up</answer>"
    model = script(tiny_model(tokenizer), play(*[answer] * 3, tokenizer=tokenizer))
    for height, end in ((4, ""), (100, "turns")):
        monkeypatch.setattr(module, "make", lambda name, height=height, **options: Climber(height))
        (theirs,), (ours,) = (
            evaluate(model, tokenizer, "ladder", [4], Sampling(), policy=policy)[1] for policy in ("model", "demonstrate")
        )
        assert ours.messages == theirs.messages and ours.truncated == theirs.truncated == end and ours.ids == []
        assert [(t.reward, t.actions) for t in ours.turns] == [(t.reward, t.actions) for t in theirs.turns]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_last_line_is_json_and_the_episodes_are_in_the_file(tmp_path, capsys, folder):
    out = tmp_path / "deep" / "e.jsonl"
    shown = run(capsys, "--env", "bandit", "--model", folder, "--episodes", "6", "--max_tokens", "8", "--json", "--show", "2",
                "--out", str(out), "--device", "cpu")  # fmt: skip
    found = json.loads(shown.splitlines()[-1])
    assert list(found)[:7] == ["success", "success_low", "success_high", "return", "turns", "parse_rate", "episodes"]
    assert found["episodes"] == 6 and 0 <= found["success_low"] <= found["success"] <= found["success_high"] <= 1
    assert not any(isinstance(v, float) and math.isnan(v) for v in found.values())
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["seed"] for r in records] == list(EVAL_SEEDS[:6]) and all(len(r["ids"]) == len(r["mask"]) for r in records)
    assert found["success"] == np.mean([r["success"] for r in records])
    assert shown.count("===== bandit, seed ") == 2 and "You stand before two slot machines" in shown and str(out) in shown


def test_the_same_seed_gives_the_same_figures(tmp_path, capsys, folder):
    argv = ["--env", "bandit", "--model", folder, "--episodes", "4", "--max_tokens", "6", "--json", "--out", str(tmp_path / "e")]
    first, second = run(capsys, *argv), run(capsys, *argv)
    assert first == second
    text = (tmp_path / "e").read_text()
    run(capsys, *argv, "--seed", "1")
    assert (tmp_path / "e").read_text() != text


def test_collapse_metrics_where_there_is_reasoning(tmp_path, capsys, folder, monkeypatch):
    tokenizer = byte_tokenizer()
    model = script(tiny_model(tokenizer), play("hm</think><answer>Gold</answer>", tokenizer=tokenizer))
    monkeypatch.setattr("nanoragen.policy.loading.load", lambda name, device: (model, tokenizer))
    argv = ["--env", "bandit", "--model", folder, "--episodes", "4", "--json", "--out", str(tmp_path / "e")]
    found = json.loads(run(capsys, *argv).splitlines()[-1])
    assert found["parse_rate"] == 1.0 and 0 < found["collapse_first_turn_sample/mi_upper_bound"] <= math.log(4) + 1e-6
    assert found["collapse_first_turn_sample/mi_seq_estimate"] <= found["collapse_first_turn_sample/mi_upper_bound"] + 1e-5


def test_default_file_names(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    run(capsys, "--env", "bandit", "--policy", "random", "--episodes", "2")
    run(capsys, "--env", "bandit", "--model", "./m", "--episodes", "2", "--max_tokens", "2")
    assert sorted(p.name for p in (tmp_path / "runs" / "eval").iterdir()) == ["bandit-m.jsonl", "bandit-random.jsonl"]


@pytest.mark.parametrize(
    "argv, starts, holds",
    [
        (["--env", "sokobann"], "env: ", "did you mean 'sokoban'?"),
        (["--env_options", "boxen=2"], "env: ", "boxes"),
        (["--env_options", "boxes"], "env_options: ", "key=value"),
        (["--model", "./none"], "model: ", "there is no folder"),
        (["--episodes", "0"], "episodes: ", "valid: 1 or more"),
        (["--samples", "-1"], "samples: ", "valid: 1 or more"),
        (["--max_turns", "-1"], "max_turns: ", "valid: 0 or more"),
        (["--temperature", "nan"], "temperature: ", "valid: 0"),
        (["--temperature", "-1"], "temperature: ", "valid: 0"),
        (["--policy", "randm"], "policy: ", "did you mean 'random'?"),
        (["--device", "cuda:99", "--policy", "model"], "device: ", "valid: auto, cpu"),
        (["--modle", "x"], "--modle: ", "did you mean --model?"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, folder, argv, starts, holds):
    model = [] if "--model" in argv else ["--model", folder]
    text = error(capsys, "--out", str(tmp_path / "e"), *model, *argv)
    assert text.startswith(starts) and holds in text


def test_an_unwritable_file_and_a_game_without_solver_are_one_line(capsys, tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("")
    assert error(capsys, "--model", folder, "--out", str(tmp_path / "file" / "e")).startswith("out: ")
    monkeypatch.setattr("nanoragen.envs.registry.make", lambda name, **options: Ladder())
    text = error(capsys, "--policy", "demonstrate", "--out", str(tmp_path / "e"))
    assert text.startswith("policy: ") and "no solver" in text


def test_a_broken_model_is_one_line(capsys, tmp_path, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    model.save_pretrained(folder)
    text = error(capsys, "--env", "bandit", "--model", folder, "--episodes", "2", "--max_tokens", "4", "--out", str(tmp_path / "e"))
    assert "NaN" in text


def test_a_seed_that_torch_cannot_take_is_refused():
    with pytest.raises(ValueError, match="^seed: 9223372036854775808; valid: 0 or more, below 2.63"):
        program.check(program.Config(seed=2**63))
