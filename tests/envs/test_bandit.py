"""Bandit: names rank the arms, payouts have their probabilities, a group shares its luck."""

import pytest

from nanoragen.envs.bandit import ARMS, GAP, Bandit


def play(seed, arm, env=None):
    env = env or Bandit()
    env.reset(seed=seed)
    return env.step(env.better if arm == "better" else next(a for a in env.actions if a != env.better))


def test_at_least_200_prompts_and_no_arm_out_of_reach():
    env = Bandit()
    texts = {env.reset(seed=s)[0] for s in range(3_000)}
    assert len(ARMS) == len(set(ARMS)) == 24
    # pairs at least GAP places apart, in either order: 2 * (1 + 2 + ... + 18)
    assert 200 <= len(texts) <= (24 - GAP) * (24 - GAP + 1) == 342
    assert {word for text in texts for word in text.split()} - {"machines", "and"} == set(ARMS)


def test_better_arm_is_the_one_ranked_higher_and_stands_on_either_side():
    env, left = Bandit(), 0
    for seed in range(2_000):
        env.reset(seed=seed)
        worse = next(a for a in env.actions if a != env.better)
        assert ARMS.index(worse) - ARMS.index(env.better) >= GAP
        left += env.actions[0] == env.better
    assert abs(left / 2_000 - 0.5) < 0.04  # so guessing, or always the first, succeeds half the time


@pytest.mark.parametrize("arm, chance", [("better", 0.8), ("worse", 0.2)])
def test_payout_probability(arm, chance):
    env = Bandit()
    results = [play(s, arm, env) for s in range(3_000)]
    rewards = [r[1] for r in results]
    assert set(rewards) == {0.0, 1.0} and abs(sum(rewards) / 3_000 - chance) < 0.03
    # success is the choice, never the luck
    assert all(r[4]["success"] == (arm == "better") for r in results)
    assert all(r[2] for r in results)


def test_episodes_of_a_group_meet_the_same_luck():
    for seed in range(30):
        for arm in ("better", "worse"):
            assert play(seed, arm) == play(seed, arm)


def test_unknown_arm_pulls_nothing_and_a_second_pull_is_refused():
    env = Bandit(pay_better=1.0, pay_worse=0.0)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("the golden one")
    assert (reward, terminated, info["action_is_valid"]) == (0.0, False, False)
    assert env.step(env.better)[1:3] == (1.0, True)
    _, reward, terminated, _, info = env.step(env.better)
    assert (reward, terminated, info["action_is_valid"], info["success"]) == (0.0, True, False, True)


@pytest.mark.parametrize("options", [{"pay_better": 1.5}, {"pay_worse": -0.1}, {"pay_better": 0.2}, {"pay_worse": "x"}])
def test_impossible_options(options):
    with pytest.raises(ValueError, match="^pay_better: .*valid: "):
        Bandit(**options)
