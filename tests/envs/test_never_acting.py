"""Standing still must not pay. Policies are played through the rollout's own reward rules, with a scripted model."""

import functools

import numpy as np
import pytest
from helpers import byte_tokenizer, play, script, tiny_model
from playable import make

from nanoragen.envs.registry import names
from nanoragen.rollout.episodes import Sampling, rollout

TOKENIZER = byte_tokenizer()
MODEL = tiny_model(TOKENIZER, positions=8192)  # never asked: the script answers in its place
SEEDS = range(4)
SILENT = "I wait and see"


def answer(*actions):
    return f"so</think><answer>{' || '.join(actions)}</answer>"


@functools.cache
def episodes(name, reply):
    """An episode a seed of a policy that always gives the same reply (text after the prompt's "<think>")."""
    model, seeds = script(MODEL, play(*[reply] * 99, tokenizer=TOKENIZER)), list(SEEDS)
    sampling = Sampling(max_tokens=200, keep_cache=False)
    return rollout(model, TOKENIZER, [make(name) for _ in seeds], seeds, seeds, sampling, env_name=name)


def episode(name, seed, reply):
    return episodes(name, reply)[seed]


@functools.cache
def failing(name, seed):
    """Rewards of episodes that act and fail: whatever fixed answer, as long as it names actions."""
    env = make(name)
    env.reset(seed=seed)
    if hasattr(env, "random_action"):
        rng = np.random.default_rng(0)
        choices = [[env.random_action(rng)] for _ in range(6)]
    elif name == "bandit":
        choices = [[a] for a in env.actions]
    else:
        choices = [[a, b] for a, b in zip(env.actions, env.actions[1:] + env.actions[:1])] + [[a] for a in env.actions]
    played = [episode(name, seed, answer(*c)) for c in choices]
    assert all(t.parsed for e in played for t in e.turns)
    return [e.reward for e in played if not e.success]


@pytest.mark.parametrize("name", names())
def test_never_acting_is_worse_than_trying_and_failing(name):
    env = make(name)
    unused = env.max_turns * env.max_actions_per_turn * env.step_reward
    for seed in SEEDS:
        silent = episode(name, seed, SILENT)
        assert not silent.success and not any(t.parsed or t.actions for t in silent.turns)
        assert silent.reward == pytest.approx(-0.1 * env.max_turns + unused)  # a penalty a turn, and nothing saved
        tried = failing(name, seed)
        assert tried and min(tried) > silent.reward


@pytest.mark.parametrize("name", names())
def test_answering_without_acting_is_not_better_than_failing(name):
    for seed in SEEDS:
        for n in (1, 2, 3):
            idle = episode(name, seed, answer(*["wait"] * n))
            assert not idle.success and all(t.parsed for t in idle.turns)
            assert max(failing(name, seed)) >= idle.reward - 1e-9


@pytest.mark.parametrize("name", names())
def test_an_invalid_action_in_the_last_turn_ends_the_episode_as_the_environment_says(name):
    """Out of turns only where the environment is not over: in countdown any answer ends the game."""
    over = episode(name, 0, answer("not an action"))
    env = make(name)
    env.reset(seed=0)
    terminated = env.step("not an action")[2]
    assert (over.terminated, over.truncated) == ((True, "") if terminated else (False, "turns"))
    assert terminated == (name == "countdown") and not over.success


def test_sokoban_costs_the_same_however_the_turns_are_left_unused():
    """Ten actions, five, or none that count: -1 from the steps in each case; sparing actions saves nothing."""
    costs = [episode("sokoban", 0, answer(*["wait"] * n)).reward for n in (1, 2)]
    assert costs == pytest.approx([-1.0, -1.0])
    assert episode("sokoban", 0, SILENT).reward == pytest.approx(-1.5)
