"""Settings: what train.py and eval.py share, the valid range beside each flag, and the combinations that cannot work.

Every error is a ValueError "setting: value; valid: ...", raised before anything heavy is imported.
Left out: correcting a setting, and warnings.
"""

import importlib.util
import math
import re
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_type_hints

from nanoragen.envs.limits import MAX_REWARD
from nanoragen.run import cli

# --filter ragen: RAGEN's guide recommends linear top_p
RAGEN_FILTER = {
    "filter_value": 0.9, "filter_mode": "linear", "filter_metric": "reward_std", "filter_include_zero": False, "filter_eps": 0.01,
}  # fmt: skip
NANO = Path(__file__).resolve().parents[1] / "assets" / "nano"
MODELS = "valid: nano, a folder or .gguf file, a hub id"
EVALUATION_SEEDS = 10**6  # so many instances are set aside for evaluation


def section(group: str):
    """A function that declares the flags of one group of --help.

    Numbers have a valid range: `least` (or `above`, which is not valid itself) to `most`. ragen: the setting's name in RAGEN.
    valid: the words for it, where a range is not enough. Beyond the default limits a run would overflow, or never end.
    """

    def flag(default, help, ragen="", *, least=0, above=None, most=10**9, valid=""):
        limits = {"least": least, "above": above, "most": most, "valid": valid}
        return field(default=default, metadata={"help": help + (f" [RAGEN: {ragen}]" if ragen else ""), "group": group, **limits})

    return flag


@dataclass
class PlaySettings:
    """What train.py and eval.py share: who plays what, and how."""

    flag = section("common")
    env: str = flag("sokoban", "environment: sokoban, bandit, ... (envs/README.md), file.py:Class, package:Class, gym:ID", "env_configs.tags")
    model: str = flag("nano", "nano (bundled), a checkpoint or other folder, a hub id, or a .gguf file", "model_path")
    seed: int = flag(0, "of everything random", "seed", most=2**63 - 1, valid="0 or more, below 2^63")
    flag = section("environment")
    env_options: str = flag("", "its options, as in boxes=2,height=7", "custom_envs.<tag>.env_config")
    data: str = flag("", "file or folder that it takes its instances from (envs/README.md)")
    allow_code_execution: bool = flag(False, "let --env code run what the model writes, in a sandbox (envs/README.md)")
    max_turns: int = flag(0, "turns of an episode; 0: the environment's own", "agent_proxy.max_turn", most=10**6)
    max_actions_per_turn: int = flag(
        0, "actions executed of one reply; 0: the environment's own", "agent_proxy.max_actions_per_turn", most=10**6
    )
    format_penalty: float = flag(
        -0.1, "reward of a reply that does not parse", "es_manager.format_penalty", least=-MAX_REWARD, most=0
    )
    flag = section("sampling")
    temperature: float = flag(1.0, "sampling temperature; 0: greedy", "actor_rollout_ref.rollout.temperature", most=1e6)
    max_tokens: int = flag(64, "tokens of one reply", "actor_rollout_ref.rollout.response_length", least=1, most=10**6)
    max_context: int = flag(0, "tokens of an episode; 0: the model's limit", "actor_rollout_ref.rollout.max_model_len")
    rollout_batch: int = flag(0, "episodes generated at a time; 0: all")
    flag = section("device")
    device: str = flag("auto", "auto, cpu, cuda, cuda:1, ...")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "compute type; auto: bfloat16 autocast on CUDA, float32 on a CPU")


def check_ranges(c):
    """ValueError for the first setting that lies outside the range beside its flag, or that this machine cannot know."""
    from nanoragen.envs.registry import make

    kinds = get_type_hints(type(c))
    for f in fields(c):
        if kinds[f.name] not in (int, float):
            continue
        value, above, least, most = getattr(c, f.name), *(f.metadata[k] for k in ("above", "least", "most"))
        if not ((value > above if above is not None else value >= least) and value <= most):  # NaN compares false
            valid = f"above {above:g}" if above is not None else f"{least:g} or more"
            valid += f", at most {most:g}" if value > most else ""
            raise ValueError(f"{f.name}: {value}; valid: {f.metadata['valid'] or valid}")
    if not re.fullmatch(r"|auto|cpu|cuda(:\d{1,4})?", c.device, re.ASCII):
        raise ValueError(f"device: {c.device!r} is not a device; valid: auto, cpu, cuda, cuda:1")
    make(c.env, **env_options(c))


def locate(name: str) -> tuple[str, dict]:
    """What `name` means: (folder or hub id, further arguments of from_pretrained). ValueError if it can be nothing.

    Looks at files only, so a wrong path is refused before anything heavy is imported.
    """
    if not name:
        raise ValueError(f"model: the name is empty; {MODELS}")
    path = NANO if name == "nano" else Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"model: there is no file {name}; {MODELS}")
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"model: a .gguf file needs the package {package}; valid: pip install gguf accelerate")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        config = path / "config.json"
        if not (
            config.is_file() and '"model_type"' in config.read_text(errors="replace")
        ):  # a run's folder has a config.json of its own
            inside = sorted(p.name for p in path.glob("step_*") if (p / "config.json").is_file())
            hint = f", but {inside[-1]} in it is" if inside else " (no config.json with a model_type)"
            raise ValueError(f"model: {name} is not a model folder{hint}; {MODELS}")
        return str(path), {}
    looks_like_path = name == "nano" or name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or name.split("/")[0] == "runs" or Path(name.split("/")[0]).is_dir():
        raise ValueError(f"model: there is no folder {path}; {MODELS}")
    return name, {}


def check_context(c, positions: float = math.inf):
    """ValueError where one reply alone fills the context, so that no episode could begin. positions: of the model, once loaded."""
    limits = [(c.max_context, "--max_context")] if c.max_context else []
    limit, of = min([*limits, (positions, f"the context of {c.model}")])
    if c.max_tokens >= limit:
        raise ValueError(f"max_tokens: {c.max_tokens} with {of} {limit}; valid: below {limit} by the length of a prompt")


def check(c):
    """ValueError for the first setting of a train.Config that cannot work."""
    from nanoragen.run.log import check_trackers
    from nanoragen.run.stops import check as check_stops

    check_ranges(c)
    check_context(c)
    check_trackers(c.log)
    check_stops(c.early_stop)
    if 0 < c.env_timeout < 0.01:
        raise ValueError(f"env_timeout: {c.env_timeout}; valid: 0 (no limit), or 0.01 seconds and more")
    if 1 <= c.clip_low < math.inf:
        raise ValueError(f"clip_low: {c.clip_low}; valid: above 0 and below 1, or inf for no clipping")
    for key, episodes in (("final_episodes", 2 * c.groups * c.group_size), ("eval_episodes", c.groups * c.group_size)):
        if not getattr(c, key) and episodes > EVALUATION_SEEDS:
            raise ValueError(
                f"{key}: {episodes} with these groups; valid: at most {EVALUATION_SEEDS}, the number of evaluation seeds"
            )
    if c.lora and importlib.util.find_spec("peft") is None:
        raise ValueError(f'lora: {c.lora} needs the package peft; valid: 0, or pip install "nanoragen[lora]"')
    locate(c.model)
    check_combinations(c)
    whole = c.filter == "top_k_abs"
    if c.filter != "none" and not (1 <= c.filter_value <= c.groups if whole else 0 < c.filter_value <= 1):
        valid = f"1 to {c.groups} groups" if whole else "above 0, at most 1"
        raise ValueError(f"filter_value: {c.filter_value} with --filter {c.filter}; valid: {valid}")


def check_combinations(c):
    """ValueError for settings that contradict each other, or that nothing would read."""
    critic, whole = c.baseline == "critic", c.credit == "episode" and c.baseline in ("mean", "others")
    normed, filters = c.aggregation == "seq_mean_token_sum_norm", c.filter != "none"
    ranked = filters or c.constant_groups == "drop"  # which needs a score, with a filter or without
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


def env_options(c) -> dict:
    """Keyword arguments of the environment: --env_options, and --data and --allow_code_execution where they are given.

    ValueError where the environment takes no such thing, or it is given both ways.
    """
    from nanoragen.envs.registry import options_of, takers

    options = cli.options(c.env_options)
    for key in ("data", "allow_code_execution"):
        value = getattr(c, key)
        if not value:
            continue
        if c.env.startswith("gym:") or key not in options_of(c.env):
            raise ValueError(f"{key}: {c.env} takes none; valid: with --env {' or '.join(takers(key))}")
        if key in options:
            raise ValueError(f"{key}: is given twice, as --{key} and in --env_options; valid: one of them")
        options[key] = value
    return options


def env_flags(c) -> str:
    """The flags that choose the environment and its options, as one would type them."""
    flags = ["--env", c.env] + (["--env_options", c.env_options] if c.env_options else []) + (["--data", c.data] if c.data else [])
    return shlex.join(flags + ["--allow_code_execution"] * c.allow_code_execution)


def file_name(env: str) -> str:
    """The name of an environment as part of a file's name: gym:a/b and my_env.py:Game have characters that are none."""
    return re.sub("[^A-Za-z0-9_.-]+", "-", env).strip("-.")
