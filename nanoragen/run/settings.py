"""What a run's settings come to: its folder, what it resumes, its environment; and which cannot work, in one clear line, before
anything heavy is imported.

Every error is a ValueError "setting: value; valid: ...". Left out: correcting a setting, and warnings.
"""

import json
import math
import os
import re
import shlex
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from nanoragen.run import cli
from nanoragen.run.checkpoint import write_whole

# --filter ragen: linear top_p as the paper's runs have it
RAGEN_FILTER = {
    "filter_value": 0.9, "filter_mode": "linear", "filter_metric": "reward_std", "filter_include_zero": False, "filter_eps": 0.01,
}  # fmt: skip


MAX_REWARD = 1e15  # envs.base has it too; to import it from there takes gymnasium along

# beyond these a run ends in an overflow, or never: no result is meant. temperature and format_penalty: the least
MOST = {
    "steps": 10**9, "groups": 10**6, "group_size": 10**6, "max_tokens": 10**6, "max_turns": 10**6, "max_actions_per_turn": 10**6,
    "epochs": 10**6, "minibatches": 10**6, "lr_warmup": 10**9, "lora": 10**5, "lora_alpha": 1e6, "lr": 100.0, "critic_lr": 100.0,
    "weight_decay": 1e4, "beta": 1e6, "loss_length": 10**9, "value_clip": MAX_REWARD, "reward_noise": MAX_REWARD, "filter_eps": 1.0,
    "env_timeout": 1e6, "temperature": 1e6, "final_episodes": 10**6, "eval_episodes": 10**6,
}  # fmt: skip
LEAST = {"temperature": 1e-3, "format_penalty": -MAX_REWARD, "entropy_coef": -1e6}
DEVICES = r"|auto|cpu|cuda(:\d{1,4})?"


def env_options(c) -> dict:
    """Keyword arguments of the environment: --env_options, and --data and --allow_code_execution where they are given.

    ValueError where the environment takes no such thing, or it is given both ways.
    """
    from nanoragen.envs.registry import takers

    options = cli.options(c.env_options)
    for key in ("data", "allow_code_execution"):
        value = getattr(c, key)
        if not value:
            continue
        if c.env not in (names := takers(key)):
            raise ValueError(f"{key}: {c.env} takes none; valid: with --env {' or '.join(names)}")
        if key in options:
            raise ValueError(f"{key}: is given twice, as --{key} and in --env_options; valid: one of them")
        options[key] = value
    return options


def env_flags(c) -> str:
    """The flags that choose the environment and its options, as one would type them."""
    flags = ["--env", c.env] + (["--env_options", c.env_options] if c.env_options else []) + (["--data", c.data] if c.data else [])
    return shlex.join(flags + ["--allow_code_execution"] * c.allow_code_execution)


def run_folder(c) -> Path:
    """Make the folder of a run of these settings. An explicit --out that already holds a run is refused; the default name is numbered.

    A folder is taken when there is a log or a checkpoint in it, or another process is about to make one. Settings alone are of a
    run that never finished a step: they are written over.
    """
    name = f"{re.sub('[^A-Za-z0-9_.-]+', '-', c.env)}-{c.algo}-{c.seed}"  # gym:a/b makes one folder
    out = Path(c.out or f"runs/{name}")
    number = 1
    try:
        while not _free(out):
            if c.out:
                raise ValueError(f"out: {out} already holds a run; valid: a new folder")
            number += 1
            out = Path(f"runs/{name}.{number}")
        write_whole(out / "config.json", json.dumps(asdict(c), indent=1, ensure_ascii=False) + "\n")
    except OSError as e:
        raise ValueError(f"out: {out} cannot be written ({e.strerror}); valid: a folder that can") from e
    return out


_HELD = []  # the folders that this process holds: open files, each with a lock that the system frees however the process ends


def _free(out: Path) -> bool:
    """Make a folder if it is not there, and hold it; False if it holds a run, or another process holds it."""
    out.mkdir(parents=True, exist_ok=True)
    held = _hold(out)
    locked = held is None and (out / "config.json").exists()  # without locks the settings must do
    taken = held is False or locked or (out / "metrics.jsonl").exists() or any(out.glob("step_*"))
    if taken and held:
        os.close(_HELD.pop())
    return not taken


def _hold(out: Path) -> bool | None:
    """Whether this process alone may write in the folder now; None where the system or the disk has no such locks."""
    try:
        import fcntl

        file = os.open(out, os.O_RDONLY)  # the folder itself: no file of ours lies about
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(file)
        return False if isinstance(e, BlockingIOError) else None
    _HELD.append(file)
    return True


@contextmanager
def lets_go():
    """Around a program: what it held is free again at its end."""
    try:
        yield
    finally:
        while _HELD:
            os.close(_HELD.pop())


def _check_recorded(out: Path):
    """ValueError where config.json of a run was cut or damaged: defaults must not stand in for it."""
    try:
        found = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"env", "algo", "baseline", "steps"} <= found.keys():
        raise ValueError(f"resume: {out / 'config.json'} is damaged; valid: the settings of the run, as it wrote them")


def resumed(c, argv) -> tuple:
    """(settings, run folder, checkpoint) of the run that --resume names: its own settings, but what stands beside it wins."""
    from nanoragen.run import checkpoint

    out = Path(c.resume)
    whole = out.resolve()
    if re.fullmatch(r"step_\d+(\.old)?", whole.name) and (whole.parent / "config.json").is_file():
        raise ValueError(f"resume: {out} is a checkpoint; valid: its run, {whole.parent}")
    if not (out / "config.json").is_file():
        raise ValueError(f"resume: {out} holds no run; valid: a run folder, as in runs/sokoban-grpo-0")
    if c.out:
        raise ValueError(f"out: {c.out} with --resume {out}; valid: one of them, a run goes on in its own folder")
    _check_recorded(out)
    if os.environ.get("RANK", "0") == "0" and _hold(out) is False:  # under torchrun the first process holds it for all
        raise ValueError(f"resume: {out} is being written by another process; valid: a run that has ended")
    saved = checkpoint.newest(out)
    if saved is None:
        raise ValueError(f"resume: {out} has no whole checkpoint; valid: a run that has saved (see --save_every)")
    c = cli.parse(type(c), ["--config", str(out / "config.json"), *argv], "train.py", "")
    began = cli.parse(type(c), ["--config", str(out / "config.json")], "train.py", "")
    # what there is to restore, and to compare with, depends on them
    for key in ("env", "env_options", "data", "model", "algo", "baseline", "lora", "lora_alpha"):
        own, asked = getattr(began, key), getattr(c, key)
        if asked != own:
            raise ValueError(f"{key}: {asked} with --resume of a run of {own}; valid: {own}, or a run of its own")
    done = int(re.search(r"\d+", saved.name)[0])  # step_000003, or step_000003.old
    if done >= c.steps:
        raise ValueError(f"resume: {out} has done {done} steps already; valid: --steps above {done}")
    return c, out, saved


def check(c):
    """ValueError for the first setting of a train.Config that cannot work."""
    from nanoragen.envs.registry import make
    from nanoragen.policy import lora
    from nanoragen.policy.loading import locate
    from nanoragen.run.metrics import check_trackers
    from nanoragen.run.stops import check as check_stops

    make(c.env, **env_options(c))
    check_trackers(c.log)
    check_stops(c.early_stop)
    for key in ("steps", "groups", "max_tokens", "epochs", "minibatches", "micro_batch", "keep"):
        if getattr(c, key) < 1:
            raise ValueError(f"{key}: {getattr(c, key)} leaves nothing to do; valid: 1 or more")
    for key in ("max_turns", "max_actions_per_turn", "max_context", "rollout_batch", "mi_every", "grad_every", "eval_every", "save_every",
                "final_episodes", "eval_episodes", "seed", "lr_warmup", "weight_decay", "beta", "env_timeout", "loss_length",
                "value_clip", "filter_eps", "reward_noise", "micro_tokens", "lora", "lora_alpha"):  # fmt: skip
        if not 0 <= getattr(c, key) < math.inf:
            raise ValueError(f"{key}: {getattr(c, key)}; valid: 0 or more")
    for key in ("clip_low", "clip_high"):
        if not getattr(c, key) > 0:
            raise ValueError(f"{key}: {getattr(c, key)}; valid: above 0, inf for no clipping")
    for key in ("lr", "critic_lr", "temperature", "max_grad_norm"):
        if not 0 < getattr(c, key) < math.inf:
            why = " (sampling and training share one temperature)" if key == "temperature" else ""
            raise ValueError(f"{key}: {getattr(c, key)}; valid: above 0{why}")
    if not math.isfinite(c.entropy_coef):
        raise ValueError(f"entropy_coef: {c.entropy_coef}; valid: a finite number")
    if not -math.inf < c.format_penalty <= 0:
        raise ValueError(f"format_penalty: {c.format_penalty}; valid: 0 or less")
    if 1 <= c.clip_low < math.inf:
        raise ValueError(f"clip_low: {c.clip_low}; valid: above 0 and below 1, or inf for no clipping")
    for key, most in MOST.items():
        if getattr(c, key) > most:
            raise ValueError(f"{key}: {getattr(c, key)}; valid: at most {most:g}")
    for key, least in LEAST.items():
        if getattr(c, key) < least:
            raise ValueError(f"{key}: {getattr(c, key)}; valid: {least:g} or more")
    for key, episodes in (("final_episodes", 2 * c.groups * c.group_size), ("eval_episodes", c.groups * c.group_size)):
        if not getattr(c, key) and episodes > MOST[key]:
            raise ValueError(f"{key}: {episodes} with these groups; valid: at most {MOST[key]}, there are no more evaluation seeds")
    if not re.fullmatch(DEVICES, c.device, re.ASCII):
        raise ValueError(f"device: {c.device!r} is not a device; valid: auto, cpu, cuda, cuda:1")
    if c.seed >= 2**63:
        raise ValueError(f"seed: {c.seed}; valid: below 2^63")
    if 0 < c.env_timeout < 0.01:
        raise ValueError(f"env_timeout: {c.env_timeout}; valid: 0 (no limit), or 0.01 seconds and more")
    if not 0 <= c.max_faults <= 1:
        raise ValueError(f"max_faults: {c.max_faults}; valid: 0 to 1")
    for key in ("gamma", "lam", "turn_gamma", "turn_lam", "quantile"):
        if not 0 <= getattr(c, key) <= 1:
            raise ValueError(f"{key}: {getattr(c, key)}; valid: 0 to 1")
    lora.check(c.lora)
    check_algorithm(c)
    check_context(c)
    locate(c.model)
    whole = c.filter == "top_k_abs"
    if c.filter != "none" and not (1 <= c.filter_value <= c.groups if whole else 0 < c.filter_value <= 1):
        valid = f"1 to {c.groups} groups" if whole else "above 0, at most 1"
        raise ValueError(f"filter_value: {c.filter_value} with --filter {c.filter}; valid: {valid}")


def check_context(c, model=None):
    """ValueError where one reply alone fills the context: no episode could begin. model: once it is loaded, its positions count."""
    limits = [(c.max_context, "--max_context")] if c.max_context else []
    if model:
        from nanoragen.rollout.generation import positions  # imports torch

        limits.append((positions(model), f"the context of {c.model}"))
    limit, of = min(limits, default=(math.inf, ""))
    if c.max_tokens >= limit:
        raise ValueError(f"max_tokens: {c.max_tokens} with {of} {limit}; valid: below {limit} by the length of a prompt")


def check_algorithm(c):
    """ValueError for settings that contradict each other, or that nothing would read."""
    critic, whole = c.baseline == "critic", c.credit == "episode" and c.baseline in ("mean", "others")
    normed, filters = c.aggregation == "seq_mean_token_sum_norm", c.filter != "none"
    ranked = filters or c.algo == "dapo"  # which drops groups without variance in any case
    own = {f.name: f.default for f in fields(c)}
    for key, fits, given, valid in (
        ("group_size", c.group_size > 1 or critic and c.filter == "none", f"--baseline {c.baseline}", "2 or more, to be compared"),
        ("scale", c.scale != "std" or not critic, "--baseline critic", "batch, none"),
        ("scale", c.scale != "per_reward" or whole, f"--baseline {c.baseline} --credit {c.credit}", "batch, none"),
        ("credit", c.credit == "episode" or c.baseline != "quantile", "--baseline quantile", "episode"),
        ("bi_level", critic or not c.bi_level, f"--baseline {c.baseline}", "--algo ppo"),
        ("value_clip", critic or not c.value_clip, f"--baseline {c.baseline}", "--algo ppo"),
        ("gamma", critic or c.gamma == 1, f"--baseline {c.baseline}", "--algo ppo"),
        ("lam", critic or c.lam == 1, f"--baseline {c.baseline}", "--algo ppo"),
        ("turn_gamma", c.bi_level or c.turn_gamma == 1, "no --bi_level", "--bi_level"),
        ("turn_lam", c.bi_level or c.turn_lam == 1, "no --bi_level", "--bi_level"),
        ("loss_length", normed or not c.loss_length, f"--aggregation {c.aggregation}", "--aggregation seq_mean_token_sum_norm"),
        ("lora_alpha", c.lora or not c.lora_alpha, "--lora 0", "--lora RANK"),
        ("quantile", c.baseline == "quantile" or c.quantile == own["quantile"], f"--baseline {c.baseline}", "--baseline quantile"),
        ("critic_lr", critic or c.critic_lr == own["critic_lr"], f"--baseline {c.baseline}", "--algo ppo"),
        ("kl", c.beta > 0 or c.kl == own["kl"], "--beta 0", "--beta above 0"),
        ("filter_value", filters or c.filter_value == own["filter_value"], "--filter none", "--filter top_p"),
        ("filter_value", c.filter != "top_k_abs" or float(c.filter_value).is_integer(), "--filter top_k_abs", "a whole number"),
        ("filter_mode", c.filter in ("ragen", "top_p") or c.filter_mode == "linear", f"--filter {c.filter}", "--filter top_p"),
        ("filter_metric", ranked or c.filter_metric == own["filter_metric"], "--filter none", "--filter top_p"),
        ("filter_include_zero", ranked or not c.filter_include_zero, "--filter none", "--filter top_p"),
        ("filter_eps", c.filter in ("ragen", "top_p") or not c.filter_eps, f"--filter {c.filter}", "--filter top_p"),
        *((k, c.filter != "ragen" or getattr(c, k) == v, "--filter ragen", f"{v}, or --filter top_p")
          for k, v in RAGEN_FILTER.items()),
    ):  # fmt: skip
        if not fits:
            raise ValueError(f"{key}: {getattr(c, key)} with {given}; valid: {valid}")
