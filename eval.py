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

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanoragen.run import stops

if __name__ == "__main__":
    stops.leave_on_signals()  # no traceback: nothing is lost

from nanoragen.run import cli
from nanoragen.run.settings import check_context, env_options


def flag(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    env: str = flag("sokoban", "environment: sokoban, frozen_lake, bandit, countdown, ... (envs/README.md)")
    env_options: str = flag("", "its options, as in boxes=2,height=7")
    data: str = flag("", "file or folder that it takes its instances from (envs/README.md)")
    allow_code_execution: bool = flag(False, "let --env code run what the model writes, in a sandbox (envs/README.md)")
    model: str = flag("nano", "nano (bundled), a checkpoint or other folder, a hub id, or a .gguf file")
    policy: Literal["model", "random", "demonstrate"] = flag("model", "who plays: the model, or a baseline")
    episodes: int = flag(256, "held-out instances")
    samples: int = flag(1, "episodes of each instance; more than one gives pass@k")
    temperature: float = flag(1.0, "sampling temperature; 0: greedy")
    max_turns: int = flag(0, "turns of an episode; 0: the environment's own")
    max_actions_per_turn: int = flag(0, "actions executed of one reply; 0: the environment's own")
    max_tokens: int = flag(64, "tokens of one reply")
    max_context: int = flag(0, "tokens of an episode; 0: the model's limit")
    format_penalty: float = flag(-0.1, "reward of a reply that does not parse")
    rollout_batch: int = flag(0, "episodes generated at a time; 0: all")
    seed: int = flag(0, "of the sampling; the instances are always the same")
    device: str = flag("auto", "auto, cpu, cuda, cuda:1, ...")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "compute type; auto: bfloat16 autocast on CUDA, float32 on a CPU")
    show: int = flag(0, "episodes to print")
    out: str = flag("", "file for the episodes, written anew; default runs/eval/<env>-<model>.jsonl")
    json: bool = flag(False, "print one JSON object as the last line")


def check(c: Config) -> Path:
    """ValueError for the first setting that cannot work, before torch is imported. Returns the file for the episodes."""
    from nanoragen.envs.base import TextEnv
    from nanoragen.envs.registry import make
    from nanoragen.policy.loading import locate

    env = make(c.env, **env_options(c))
    for key in ("episodes", "samples", "max_tokens"):
        if getattr(c, key) < 1:
            raise ValueError(f"{key}: {getattr(c, key)} leaves nothing to do; valid: 1 or more")
    for key in ("max_turns", "max_actions_per_turn", "max_context", "rollout_batch", "seed", "show"):
        if getattr(c, key) < 0:
            raise ValueError(f"{key}: {getattr(c, key)} is negative; valid: 0 or more")
    if c.seed >= 2**63:
        raise ValueError(f"seed: {c.seed}; valid: below 2^63")
    if not 0 <= c.temperature < float("inf"):
        raise ValueError(f"temperature: {c.temperature}; valid: 0 (greedy) or more")
    if c.policy == "demonstrate" and type(env).demonstrate is TextEnv.demonstrate:
        raise ValueError(f"policy: {c.env} has no solver; valid: model, random")
    if c.policy == "model":
        locate(c.model)
    who = re.sub(r"[^\w.-]+", "-", "-".join(Path(c.model).parts[-2:])).strip("-.") if c.policy == "model" else c.policy
    out = Path(c.out or f"runs/eval/{c.env}-{who}.jsonl")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")
    except OSError as e:
        raise ValueError(f"out: {out} cannot be written ({e.strerror}); valid: a file that can") from e
    return out


def run(c: Config):
    out = check(c)
    import torch

    from nanoragen.envs.base import eval_seeds
    from nanoragen.evaluate import evaluate
    from nanoragen.policy import loading
    from nanoragen.rollout.episodes import Sampling
    from nanoragen.rollout.generation import why_plain
    from nanoragen.run import metrics

    torch.manual_seed(c.seed)
    model, tokenizer = loading.load(c.model, device=c.device) if c.policy == "model" else (None, None)
    check_context(c, model)
    if model and (slow := why_plain(model)):
        print(slow)
    sampling = Sampling(
        temperature=c.temperature, max_tokens=c.max_tokens, max_turns=c.max_turns or None,
        max_actions_per_turn=c.max_actions_per_turn or None, max_context=c.max_context or None,
        format_penalty=c.format_penalty, rollout_batch=c.rollout_batch or None,
    )  # fmt: skip
    with loading.autocast(model.device if model else "cpu", c.dtype if model else "float32"):
        found, episodes = evaluate(
            model, tokenizer, c.env, eval_seeds(c.episodes), sampling, env_options=env_options(c),
            samples=c.samples, policy=c.policy, seed=c.seed, diagnose=True, progress=progress,
        )  # fmt: skip
    progress("")
    metrics.Lines(out).write(metrics.episode_record(e) for e in episodes)
    for episode in episodes[: c.show]:
        print(readable(episode), end="\n\n")
    print(table(found, c))
    print(f"{'episodes in':22}{out}")
    if c.json:
        print(metrics.dumps(found))


def progress(text: str):
    """One line on a terminal that is written over and over; "" clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def readable(episode) -> str:
    """An episode to read: what was said, and what it earned."""
    end = "solved" if episode.success else f"out of {episode.truncated}" if episode.truncated else "failed"
    lines = [f"===== {episode.env}, seed {episode.seed}: {end}, reward {episode.reward:.2f}, {len(episode.turns)} turns ====="]
    lines += [f"[system] {episode.instruction}"]
    for n, turn in enumerate(episode.turns, 1):
        did = ", ".join(turn.actions) if turn.parsed else "nothing, the reply does not parse"
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


def main(argv=None):
    c = cli.parse(Config, argv, "eval.py", __doc__.split("\n\n")[0])
    try:
        run(c)
    except (ValueError, FloatingPointError) as e:
        cli.fail("eval.py", e)
    except (RuntimeError, MemoryError) as e:
        if not stops.out_of_memory(e):
            raise
        cli.fail("eval.py", f"out of memory ({e}); lower --rollout_batch (now {c.rollout_batch}; 0: all), or --max_tokens")


if __name__ == "__main__":
    main()
