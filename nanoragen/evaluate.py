"""Play episodes on held-out seeds and sum them up: by a model, at random, or by the environment's own solver.

`evaluate` is what train.py measures itself with and what eval.py prints. Every seed is an instance; with `samples` K, K
episodes are played of each, which gives pass@k. The 95% interval counts instances, not episodes, as far as episodes of an
instance end alike. Left out: comparison of two models (give both the same seeds, and compare the files).
"""

import itertools
import math

import numpy as np

from nanoragen.envs.base import eval_seeds
from nanoragen.envs.registry import make
from nanoragen.policy.loading import autocast
from nanoragen.rollout.episodes import EpisodeRunner, Turn, rollout
from nanoragen.run.metrics import wilson
from nanoragen.run.settings import env_options

COLLAPSE_PROMPTS = 64  # the cross matrix grows with their square


def evaluate(
    model, tokenizer, env_name, seeds, sampling, *,
    env_options=None, samples=1, policy="model", seed=0, diagnose=False, progress=None, ended=None,
):  # fmt: skip
    """Returns (metrics, episodes); episodes of one seed stand together.

    metrics: success with its 95% interval success_low to success_high, return (mean sum of rewards), turns, parse_rate, episodes
    (how many), instances, tokens (sampled, an episode), pass@k for k = 1, 2, 4, ... samples, and with `diagnose` the collapse
    metrics of the first turns and of all turns (none where there is no reasoning).

    policy: "model" (draws from torch's global random numbers, the caller seeds them), "random" or "demonstrate" (model and
    tokenizer may be None; `seed` seeds the random one). progress, ended: as in `rollout`.
    """
    groups = [g for g in range(len(seeds)) for _ in range(samples)]
    each = [seeds[g] for g in groups]
    if policy == "model":
        envs = [make(env_name, **(env_options or {})) for _ in each]
        episodes = rollout(model, tokenizer, envs, each, groups, sampling, env_name=env_name, progress=progress, ended=ended)
    else:
        env, rng = make(env_name, **(env_options or {})), np.random.default_rng(seed)
        episodes = [play_without_model(env, env_name, s, g, sampling, policy, rng) for s, g in zip(each, groups)]
    metrics = summary(episodes, samples)
    if diagnose and policy == "model":
        from nanoragen.collapse import monitor

        temperature = sampling.temperature or 1.0  # greedy play has no probabilities of its own
        metrics.update(monitor.diagnose(model, episodes, max_prompts=COLLAPSE_PROMPTS, temperature=temperature, seed=seed)[1])
    return metrics, episodes


def held_out(c, model, tokenizer, sampling, n: int):
    """`evaluate` on the first n held-out seeds under a run's settings c: the same draws each time, and training does not notice."""
    import torch

    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(c.seed)
        with autocast(model.device, c.dtype):
            return evaluate(model, tokenizer, c.env, eval_seeds(n), sampling, env_options=env_options(c))


def summary(episodes, samples: int = 1) -> dict:
    """The figures of episodes that lie in blocks of `samples` for each instance."""
    turns = [t for e in episodes for t in e.turns]
    solved = np.array([e.success for e in episodes], dtype=float).reshape(-1, samples)  # [instances, K]
    low, high = interval(solved)
    ks = sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
    return {
        "success": float(solved.mean()),
        "success_low": low,
        "success_high": high,
        "return": float(np.mean([e.reward for e in episodes])),
        "turns": len(turns) / len(episodes),
        "parse_rate": sum(t.parsed for t in turns) / max(1, len(turns)),
        "episodes": len(episodes),
        "instances": len(solved),
        "actions": sum(len(t.actions) for t in turns) / len(episodes),
        "tokens": sum(e.num_tokens for e in episodes) / len(episodes),
        "truncated_by_turns": sum(e.truncated == "turns" for e in episodes) / len(episodes),
        "truncated_by_context": sum(e.truncated == "context" for e in episodes) / len(episodes),
        **({f"pass@{k}": pass_at(solved, k) for k in ks} if samples > 1 else {}),
    }


def interval(solved) -> tuple[float, float]:
    """95% interval of the success rate from solved [instances, K] of 0 and 1.

    Wilson's, on the number of independent episodes that would spread as much as the instances' means do (the design
    effect of a cluster sample): instances * K if episodes of an instance are independent, instances if they end alike.
    """
    n, K = solved.shape
    p, effective = solved.mean(), float(n * K)
    if K > 1:
        spread = solved.mean(1).var(ddof=1) / n if n > 1 else 0.0
        independent = p * (1 - p) / spread if spread > 0 else n * K
        effective = min(max(independent, n), n * K) if 0 < p < 1 else n
    return wilson(p * effective, effective)


def pass_at(solved, k: int) -> float:
    """Chance that one of k episodes of an instance succeeds (unbiased, Chen et al. 2021, eq. 1). solved [instances, K]."""
    K = solved.shape[1]
    return float(np.mean([1 - math.comb(K - int(c), k) / math.comb(K, k) for c in solved.sum(1)]))


def play_without_model(env, env_name, seed, group, sampling, policy, rng):
    """One episode at random or by the environment's solver, under the limits and charges of `rollout`: an `Episode` without ids."""
    runner = EpisodeRunner(env, env_name, seed, group, sampling)
    actions = env.demonstrate() if policy == "demonstrate" else (env.random_action(rng) for _ in itertools.count())
    while not runner.over:
        turn = Turn(0, 0, 0, runner.observation, "")
        runner.act(turn, actions)
        turn.reply = f"</think><answer>{' || '.join(turn.actions)}</answer>"
    return runner.episode
