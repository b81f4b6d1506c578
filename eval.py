"""Evaluate a model in an environment, on instances that no training run has seen.

    python eval.py --env sokoban                                         # the bundled model
    python eval.py --env sokoban --model runs/sokoban-grpo-0/step_000040 --show 3
    python eval.py --env sokoban --policy random                         # or demonstrate: the environment's own solver
    python eval.py --env countdown --samples 8                           # pass@8
    python eval.py --env sokoban --json | tail -1                        # for programs
    python eval.py --help

Prints success with its 95% interval, return, turns, parse rate and the collapse metrics of the first turn; the episodes go
to a file of JSON lines (the format of a run's rollouts.jsonl).
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanoragen.run.signals import leave_on_signals

if __name__ == "__main__":
    leave_on_signals()  # no traceback: nothing is lost

from nanoragen.run import cli
from nanoragen.run.memory import out_of_memory
from nanoragen.run.settings import PlaySettings, check_context, check_ranges, env_options, file_name, locate, section


@dataclass
class Config(PlaySettings):
    flag = section("common")
    policy: Literal["model", "random", "demonstrate"] = flag("model", "who plays: the model, or a baseline")
    episodes: int = flag(256, "held-out instances", least=1, most=10**6)
    samples: int = flag(1, "episodes of each instance; more than one gives pass@k", least=1, most=10**6)
    show: int = flag(0, "episodes to print")
    out: str = flag("", "file for the episodes, written anew; default runs/eval/<env>-<model>.jsonl")
    json: bool = flag(False, "print one JSON object as the last line")


def check(c: Config) -> Path:
    """ValueError for the first setting that cannot work, before torch is imported. Returns the file for the episodes."""
    from nanoragen.envs.base import TextEnv
    from nanoragen.envs.registry import make

    check_ranges(c)
    env = make(c.env, **env_options(c))
    if c.policy == "demonstrate" and type(env).demonstrate is TextEnv.demonstrate:
        raise ValueError(f"policy: {c.env} has no solver; valid: model, random")
    if c.policy == "model":
        locate(c.model)
    who = re.sub(r"[^\w.-]+", "-", "-".join(Path(c.model).parts[-2:])).strip("-.") if c.policy == "model" else c.policy
    out = Path(c.out or f"runs/eval/{file_name(c.env)}-{who}.jsonl")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
    except OSError as e:
        raise ValueError(f"out: {out} cannot be written ({e.strerror}); valid: a file that can") from e
    return out


def run(c: Config):
    out = check(c)
    import torch
    from tqdm import tqdm

    from nanoragen.envs.base import eval_seeds
    from nanoragen.evaluate import evaluate
    from nanoragen.policy import loading
    from nanoragen.policy.support import kv_cache_unsupported, max_positions
    from nanoragen.rollout.episodes import sampling_of
    from nanoragen.run import log

    torch.manual_seed(c.seed)
    model, tokenizer = loading.load(c.model, device=c.device) if c.policy == "model" else (None, None)
    check_context(c, max_positions(model) if model else math.inf)
    if model and (slow := kv_cache_unsupported(model)):
        print(slow)
    with (
        loading.autocast(model.device if model else "cpu", c.dtype if model else "float32"),
        tqdm(total=c.episodes * c.samples, unit="episode", disable=None, leave=False) as bar,  # on a terminal only
    ):
        found, episodes = evaluate(
            model, tokenizer, c.env, eval_seeds(c.episodes), sampling_of(c), env_options=env_options(c),
            samples=c.samples, policy=c.policy, seed=c.seed, diagnose=True, progress=bar.set_description_str, ended=bar.update,
        )  # fmt: skip
    log.Lines(out).write(log.episode_record(e) for e in episodes)
    for episode in episodes[: c.show]:
        print(readable(episode), end="\n\n")
    print(table(found, c))
    print(f"{'episodes in':22}{out}")
    if c.json:
        print(log.dumps(found))


def readable(episode) -> str:
    """An episode to read: what was said, and what it earned."""
    end = "solved" if episode.success else f"out of {episode.truncated}" if episode.truncated else "failed"
    lines = [f"===== {episode.env}, seed {episode.seed}: {end}, reward {episode.reward:.2f}, {len(episode.turns)} turns ====="]
    lines += [f"[system] {episode.instruction}"]
    for n, turn in enumerate(episode.turns, 1):
        did = ", ".join(turn.actions) if turn.parsed else "nothing, the reply does not parse"
        did += f" ({turn.invalid} invalid)" if turn.invalid else ""
        lines += [f"[turn {n}]", turn.observation, f"  <think>{turn.reply}", f"  did {did}; reward {turn.reward:.2f}"]
    return "\n".join(lines)


def table(m: dict, c: Config) -> str:
    """The figures to read."""
    who = f"{c.model}, temperature {c.temperature:g}" if c.policy == "model" else f"policy {c.policy}"
    rows = [
        ("success", f"{m['success']:.1%}  (95%: {m['success_low']:.1%} to {m['success_high']:.1%})"),
        ("return", f"{m['return']:.3f}"),
        ("turns", f"{m['turns']:.2f}, {m['actions']:.2f} actions"),
        ("parse rate", f"{m['parse_rate']:.1%}"),
        *((k, f"{v:.1%}") for k, v in m.items() if k.startswith("pass@")),
    ]
    if c.policy == "model":
        rows.append(("sampled tokens", f"{m['tokens']:.1f} an episode"))
    for key in ("truncated_by_turns", "truncated_by_context"):
        if m[key]:
            rows.append((key.replace("truncated_by_", "out of "), f"{m[key]:.1%} of the episodes"))
    sample = "collapse_first_turn_sample/"
    if m.get(sample + "mi_seq_estimate") is not None:
        rows += [
            ("H(Z|X)", f"{m[sample + 'conditional_entropy_est']:.3f} nats a token"),
            ("I(X; Z)", f"{m[sample + 'mi_seq_estimate']:.3f} nats, at most {m[sample + 'mi_upper_bound']:.3f}"),
            ("retrieval", f"{m[sample + 'retrieval_accuracy']:.1%}, chance {m[sample + 'retrieval_chance_level']:.1%}"),
        ]
    return f"{c.env}, {m['episodes']} episodes, {who}\n" + "\n".join(f"{k:22}{v}" for k, v in rows)


@cli.quiet_when_unread
def main(argv=None):
    c = cli.parse(Config, argv, "eval.py", __doc__.split("\n\n")[0])
    try:
        run(c)
    except (ValueError, FloatingPointError) as e:
        cli.fail("eval.py", e)
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        cli.fail("eval.py", f"out of memory ({e}); lower --rollout_batch (now {c.rollout_batch}; 0: all), or --max_tokens")


if __name__ == "__main__":
    main()
