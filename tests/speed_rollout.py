"""How much faster are rollouts that keep their KV cache than rollouts that encode every context anew each turn?

    python tests/speed_rollout.py                                    # prints one Markdown table
    python tests/speed_rollout.py --env sokoban --max_turns 12 --groups 4 --repeats 3

Both paths of nanoragen/rollout/episodes.py play the same episodes: same seeds, same random numbers, and so the same tokens (the script
stops if they differ). They take turns, first one and then the other first, after one round that does not count; of each the
median is printed, and the median of the ratios within a round. Tokens are those that the model sampled; seconds are of the whole
`rollout`, environments included. Not a test: pytest does not collect it.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from nanoragen.envs.base import train_seeds  # noqa: E402
from nanoragen.envs.registry import make  # noqa: E402
from nanoragen.policy.loading import load  # noqa: E402
from nanoragen.rollout.episodes import Sampling, rollout  # noqa: E402
from nanoragen.run import cli  # noqa: E402

WAYS = {"cache kept from turn to turn": True, "every context encoded anew": False}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--env", default="sokoban", help="environment")
    parser.add_argument("--env_options", default="", help="its options")
    parser.add_argument("--model", default="nano", help="nano (bundled), hub id or folder")
    parser.add_argument("--groups", type=int, default=8, help="prompts")
    parser.add_argument("--group_size", type=int, default=8, help="episodes of each")
    parser.add_argument("--max_turns", type=int, default=8, help="turns of an episode at most")
    parser.add_argument("--max_actions_per_turn", type=int, default=1, help="actions executed of one reply")
    parser.add_argument("--max_tokens", type=int, default=64, help="tokens of one reply")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    return parser.parse_args()


def main():
    a = arguments()
    torch.set_num_threads(a.threads)
    model, tokenizer = load(a.model, device=a.device)
    groups = [g for g in range(a.groups) for _ in range(a.group_size)]
    envs = [make(a.env, **cli.options(a.env_options)) for _ in groups]
    limits = {"max_tokens": a.max_tokens, "max_turns": a.max_turns, "max_actions_per_turn": a.max_actions_per_turn}

    def play(number, keep_cache):
        seeds = [s for s in train_seeds(0, number + 1, a.groups) for _ in range(a.group_size)]
        torch.manual_seed(number)
        start = time.perf_counter()
        episodes = rollout(model, tokenizer, envs, seeds, groups, Sampling(**limits, keep_cache=keep_cache), env_name=a.env)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, episodes

    seconds, played = {way: [] for way in WAYS}, []
    for number in range(-1, a.repeats):
        first, ids = number % 2, {}
        for way in list(WAYS)[:: -1 if first else 1]:
            took, episodes = play(number + 1, WAYS[way])
            ids[way] = [e.ids for e in episodes]
            if number >= 0:
                seconds[way].append(took)
            print(f"round {number + 1} of {a.repeats}: {way}: {took:.2f} s", file=sys.stderr)
        one, other = ids.values()
        if one != other:
            same = sum(x == y for x, y in zip(one, other))
            sys.exit(
                f"speed_rollout.py: only {same} of {len(one)} episodes have the same tokens both ways: the figures do not compare"
            )
        if number >= 0:
            played.append(episodes)

    tokens = [sum(e.num_tokens for e in episodes) for episodes in played]
    episodes = [e for batch in played for e in batch]
    turns = [len(e.turns) for e in episodes]
    print(
        f"{a.env} ({a.env_options}), model {a.model}, float32 on {model.device}, {a.threads} threads, torch {torch.__version__}: "
        f"{a.groups} prompts x {a.group_size} episodes, at most {a.max_turns} turns of {a.max_tokens} tokens, "
        f"{a.max_actions_per_turn} action(s) a turn; on average {mean(turns):.1f} turns an episode, "
        f"{sum(tokens) / sum(turns):.0f} sampled tokens a turn, "
        f"{mean(len(e.ids) for e in episodes):.0f} tokens of context at the end; median of {a.repeats} interleaved rounds.\n"
    )
    ways = list(WAYS)
    ratio = {way: median(slow / fast for slow, fast in zip(seconds[ways[1]], seconds[way])) for way in ways}
    print("| rollout | tokens/s | s a rollout | tokens/s against the other way |\n|---|---|---|---|")
    for way in ways:
        speed = median(n / s for n, s in zip(tokens, seconds[way]))
        print(f"| {way} | {speed:,.0f} | {median(seconds[way]):.2f} | {ratio[way]:.2f}x |")


if __name__ == "__main__":
    main()
