"""Train a language-model agent with reinforcement learning, and watch whether its reasoning still depends on its input.

    python train.py --env sokoban                                   # bundled 1M-parameter model; minutes on a laptop
    python train.py --env frozen_lake --filter none                 # the same loop without the paper's remedy
    python train.py --env sokoban --model Qwen/Qwen2.5-0.5B-Instruct --lr 1e-6      # one GPU
    torchrun --nproc_per_node=4 train.py --env sokoban --model Qwen/Qwen2.5-0.5B-Instruct --lr 1e-6     # four of them
    python train.py --help                                          # every setting, and its name in RAGEN

One step, in the order of the code below (RAGEN-2, arXiv 2604.06268):

    1. rollouts      G prompts, K episodes each; the sampler hands over ids and mask         nanoragen/rollout/episodes.py
    2. diagnosis     does the reasoning Z still tell the prompts X apart? I(X; Z), H(Z|X)    nanoragen/collapse/estimator.py
    3. advantages    (r - mean) / (std + 1e-6) in each group, or its kin (ALGORITHMS, below);  nanoragen/learning/advantages.py
                     groups without reward variance carry no signal, only noise: the SNR filter drops them
    4. loss          clipped policy gradient + beta KL - c entropy                           policy_loss, below
    5. update        AdamW, a few minibatches                                                update, below

Left out on purpose, against the systems this re-implements: Ray, an inference server, and tricks that are neither one small
term nor an algorithm's own. Shapes: G groups, K episodes a group, B = G*K episodes, P sampled (trained) tokens, V vocabulary.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from nanoragen.run.signals import leave_on_signals

if __name__ == "__main__":
    leave_on_signals()  # until `run` has its own answer: no traceback out of an import

from nanoragen.run import cli, distributed
from nanoragen.run.errors import CannotGoOn
from nanoragen.run.faults import TooManyFaults
from nanoragen.run.folder import release_locks, resumed, run_folder
from nanoragen.run.memory import out_of_memory
from nanoragen.run.session import session
from nanoragen.run.settings import MAX_REWARD, RAGEN_FILTER, PlaySettings, check, check_context, env_options, section

# All that the algorithms differ in. Every column is a setting of its own too, and one that is given wins over the table:
# --algo grpo --aggregation token_mean. baseline, scale, credit: nanoragen/learning/advantages.py; aggregation: token_weight, below;
# constant_groups: whether groups whose rewards are all equal train where there is no filter; inf: no clipping.
ALGORITHMS = {
    #           baseline   scale    credit     aggregation                constant  clip_low  clip_high
    "grpo":    ("mean",    "std",   "episode", "seq_mean_token_mean",     "keep",   0.2,      0.2),       # arXiv 2402.03300
    "dr_grpo": ("mean",    "none",  "episode", "seq_mean_token_sum_norm", "keep",   0.2,      0.2),       # arXiv 2503.20783
    "dapo":    ("mean",    "std",   "episode", "token_mean",              "drop",   0.2,      0.28),      # arXiv 2503.14476
    "rloo":    ("others",  "none",  "episode", "seq_mean_token_sum",      "keep",   math.inf, math.inf),  # arXiv 2402.14740
    "ppo":     ("critic",  "batch", "turn",    "token_mean",              "keep",   0.2,      0.28),      # arXiv 1707.06347
}  # fmt: skip
COLUMNS = ("baseline", "scale", "credit", "aggregation", "constant_groups", "clip_low", "clip_high")


@dataclass
class Config(PlaySettings):
    """The settings of a run, in the groups of --help. Number ranges: nanoragen/run/settings.py, section."""

    flag = section("common")
    algo: Literal["grpo", "dr_grpo", "dapo", "rloo", "ppo"] = flag(
        "grpo", "sets what is `auto` (or 0) of: " + ", ".join(COLUMNS), "algorithm.adv_estimator"
    )
    steps: int = flag(24, "training steps", "trainer.total_training_steps", least=1)
    groups: int = flag(16, "prompts in a step (G)", "es_manager.train.env_groups", least=1, most=10**6)
    group_size: int = flag(8, "episodes of each prompt (K)", "es_manager.train.group_size", least=1, most=10**6)
    lr: float = flag(6e-4, "peak learning rate of AdamW", "actor_rollout_ref.actor.optim.lr", above=0, most=100)
    filter: Literal["none", "ragen", "top_p", "top_k", "top_k_abs", "min_p"] = flag(
        "top_p", "which groups train; ragen: as RAGEN's guide recommends", "rollout_filter_strategy"
    )
    out: str = flag("", "run folder; default runs/<env>-<algo>-<seed>, numbered when taken", "trainer.default_local_dir")
    resume: str = flag("", "run folder to go on with: its settings, its newest whole checkpoint", "trainer.resume_from_path")

    temperature: float = section("sampling")(
        1.0, "of sampling, and of training", "actor_rollout_ref.rollout.temperature", least=1e-3, most=1e6,
        valid="0.001 to 1e6 (sampling and training share one temperature)",
    )  # fmt: skip

    flag = section("advantages")
    baseline: Literal["auto", "mean", "others", "quantile", "critic"] = flag("auto", "what an advantage is relative to")
    scale: Literal["auto", "std", "batch", "per_reward", "none"] = flag(
        "auto", "what it is divided by: in the group, over all tokens, each reward by itself (GDPO)", "norm_adv_by_std_in_grpo"
    )
    credit: Literal["auto", "episode", "turn"] = flag("auto", "the return of the episode, or from each turn on", "use_turn_scores")
    quantile: float = flag(0.4, "of --baseline quantile (QAE)", most=1)
    soft_reweight: bool = flag(False, "groups count by their reward std, the widest fully", "algorithm.soft_advantage_reweight")
    reward_noise: float = flag(0.0, "std of noise added to an episode's reward before advantages and filter", most=MAX_REWARD)

    flag = section("critic (--algo ppo)")
    gamma: float = flag(1.0, "discount from token to token (GAE)", "algorithm.gamma", most=1)
    lam: float = flag(1.0, "lambda from token to token", "algorithm.lam", most=1)
    bi_level: bool = flag(False, "GAE over turns, then over the tokens of each", "algorithm.bi_level_gae")
    turn_gamma: float = flag(1.0, "discount from turn to turn (--bi_level)", "algorithm.high_level_gamma", most=1)
    turn_lam: float = flag(1.0, "lambda from turn to turn (--bi_level)", most=1)
    critic_lr: float = flag(1e-3, "peak learning rate of the critic", "critic.optim.lr", above=0, most=100)
    value_clip: float = flag(0.0, "values move at most so far in a step; 0: not clipped", "critic.cliprange_value", most=MAX_REWARD)

    flag = section("SNR filter")
    filter_value: float = flag(0.9, "share (top_p, top_k, min_p) or number (top_k_abs) of groups", "rollout_filter_value")
    filter_mode: Literal["linear", "softmax"] = flag("linear", "mass of a group under top_p", "rollout_filter_top_p_prob_mode")
    filter_metric: Literal["reward_std", "reward_variance", "success_std"] = flag(
        "reward_std", "score of a group", "rollout_filter_metric"
    )
    filter_include_zero: bool = flag(False, "keep groups without any variance too", "rollout_filter_include_zero")
    filter_eps: float = flag(0.0, "top_p: mass that may be missing", "rollout_filter_selection_eps", most=1)
    filter_loss_scale: Literal["none", "linear", "sqrt"] = flag(
        "none", "multiply the loss by the kept share", "filter_loss_scaling"
    )
    constant_groups: Literal["auto", "keep", "drop"] = flag("auto", "groups whose rewards are all equal, under --filter none")

    flag = section("loss")
    aggregation: Literal["auto", "seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = flag(
        "auto", "how tokens add up to a loss", "actor_rollout_ref.actor.loss_agg_mode"
    )
    loss_length: int = flag(0, "what seq_mean_token_sum_norm divides by; 0: the tokens of all turns", "loss_scale_factor")
    clip_low: float = flag(
        0.0, "ratio clipped below 1 - clip_low; 0: as --algo has it; inf: not", "actor.clip_ratio_low", above=0, most=math.inf
    )
    clip_high: float = flag(
        0.0, "and above 1 + clip_high; 0: as --algo has it; inf: not", "actor.clip_ratio_high", above=0, most=math.inf
    )
    beta: float = flag(0.0, "weight of the KL to the starting model; 0: no reference model", "actor.kl_loss_coef", most=1e6)
    kl: Literal["k1", "k2", "k3"] = flag("k3", "its estimator (Schulman 2020)", "actor.kl_loss_type")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", "actor.entropy_coeff", least=-1e6, most=1e6)

    flag = section("update")
    epochs: int = flag(1, "passes over a step's episodes", "actor.ppo_epochs", least=1, most=10**6)
    minibatches: int = flag(4, "updates in a pass", "actor.ppo_mini_batch_size", least=1, most=10**6)
    micro_batch: int = flag(
        32, "episodes in one forward pass; changes memory, never the result", "micro_batch_size_per_gpu", least=1
    )
    micro_tokens: int = flag(4096, "and at most so many tokens in it, padding counted; 0: no limit", "ppo_max_token_len_per_gpu")
    lr_schedule: Literal["constant", "linear", "cosine"] = flag("linear", "learning rate after the warm-up")
    lr_warmup: int = flag(8, "updates over which the learning rate rises")
    weight_decay: float = flag(0.0, "of AdamW", most=1e4)
    max_grad_norm: float = flag(1.0, "gradient clipping", "actor.grad_clip", above=0)
    gradient_checkpointing: bool = flag(False, "layers run twice, and keep less for the backward pass")
    lora: int = flag(0, "rank of adapters that train in place of the weights; 0: none (needs peft)", "lora.rank", most=10**5)
    lora_alpha: float = flag(0.0, "their scale is lora_alpha / lora; 0: twice the rank", "lora.alpha", most=1e6)

    flag = section("measurements")
    mi_every: int = flag(1, "steps between collapse measurements; 0: never", "collapse_detection.compute_freq")
    grad_every: int = flag(0, "steps between measurements of gradients by reward variance; 0: never", "gradient_analysis_every")
    eval_every: int = flag(8, "steps between evaluations on held-out seeds; 0: only before and after", "trainer.test_freq")
    eval_episodes: int = flag(
        0, "episodes of such an evaluation; 0: as many as a step has", "es_manager.val.env_groups", most=10**6
    )
    final_episodes: int = flag(0, "episodes of the evaluations before and after; 0: twice as many as a step has", most=10**6)
    early_stop: str = flag("variance,filtered,success", "which early stops are on (nanoragen/run/stops.py); none: no")
    log: str = flag("", "also log to: wandb, tensorboard, trackio", "trainer.logger")

    flag = section("checkpoints and faults")
    save_every: int = flag(8, "steps between checkpoints; the last step is always saved; 0: only that", "trainer.save_freq")
    env_timeout: float = flag(60.0, "seconds an environment may take over one reply; 0: no limit", most=1e6)
    keep: int = flag(2, "checkpoints kept", least=1)
    max_faults: float = flag(0.1, "share of a step's episodes that may be lost to errors of the environment", most=1)

    def __post_init__(self):
        for key, value in zip(COLUMNS, ALGORITHMS[self.algo]):
            if getattr(self, key) in ("auto", 0):
                setattr(self, key, value)
        if self.filter == "ragen":
            self.filter_eps = self.filter_eps or RAGEN_FILTER["filter_eps"]


# -- the maths ---------------------------------------------------------------------------------------------------------


def score_all(model, batch, rows, c: Config):
    """log pi of every sampled token of some episodes, without gradient, 0 elsewhere. [B, T]"""
    from nanoragen.policy.scoring import token_logprobs, token_table

    return token_table(model, batch, rows, c, lambda micro: token_logprobs(model, micro, c.temperature)[0])


def kl_estimate(logprob, ref_logprob, kind: str):
    """Per-token estimates of KL(policy || reference) (Schulman 2020, "Approximating KL divergence"). [P] -> [P].

    The difference is capped at +-20 (a factor of 5e8), so that exp cannot overflow and neither can its gradient.
    """
    d = (ref_logprob - logprob).clamp(-20, 20)
    return {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[kind]


def token_weight(length, c: Config):
    """Weight of a token of each episode of a minibatch [n], from its number of sampled tokens [n]; a loss is sum(weight * token).

    Known before any forward pass: so the split into micro-batches, the order of rows and padding change nothing.
    """
    n = len(length)
    return {
        "seq_mean_token_mean": 1 / (length * n),  # mean over episodes of the mean over their tokens
        "token_mean": (1 / length.sum()).expand(n),  # long episodes count more
        "seq_mean_token_sum": 1 / (0 * length + n),  # mean over episodes of the sum: the gradient of an episode's log-prob
        "seq_mean_token_sum_norm": 1 / (0 * length + n * max(1, c.loss_length)),  # the same in the units of a token
    }[c.aggregation]


def policy_loss(logprob, old_logprob, advantage, weight, entropy, ref_logprob, c: Config):
    """The clipped objective of PPO/GRPO with KL penalty and entropy bonus (RAGEN-2, eq. 1). All arguments [P].

    weight: `token_weight`, of all three terms, so that a coefficient means the same against the policy term whatever the
    aggregation. Returns (loss, {name: weighted sum}); divided by the sum of "weight", the others are means over tokens.
    """
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
    policy = -(advantage * ratio).minimum(advantage * clipped)
    loss = (weight * policy).sum() - c.entropy_coef * (weight * entropy).sum()
    low, high = (ratio < 1 - c.clip_low) & (advantage < 0), (ratio > 1 + c.clip_high) & (advantage > 0)
    part = {
        "weight": weight.sum().item(),
        "entropy": (weight * entropy).sum().item(),
        "clip_ratio/low_mean": (weight * low).sum().item(),
        "clip_ratio/high_mean": (weight * high).sum().item(),
        "clip_ratio/region_mean": (weight * (low | high)).sum().item(),
        "approx_kl": (weight * (ratio - 1 - log_ratio)).sum().item(),
    }
    if ref_logprob is not None:
        kl = (weight * kl_estimate(logprob, ref_logprob, c.kl)).sum()
        loss = loss + c.beta * kl
        part["kl"] = kl.item()
    return loss, {"loss": loss.item(), **part}


def update(model, optimizer, scheduler, batch, advantage, kept_rows, ref_logprob, c: Config, rng, progress):
    """`epochs` passes of `minibatches` clipped updates over the kept episodes. advantage, ref_logprob (or None) [B, T].

    kept_rows [kept] long: episodes with a sampled token. Dropped episodes are not in any sum or any denominator. Kept ones whose
    advantage is 0 are in the denominator alone: without KL and bonus their gradient is exactly 0, and they are not run. Returns the
    mean of each logged quantity over the updates, of the episodes that were run; an update that is not finite is left out, and
    `nonfinite` names the first of them.
    """
    import torch

    from nanoragen.learning.updates import means, minibatches, optimizer_step
    from nanoragen.policy.loading import autocast
    from nanoragen.policy.scoring import micro_batches, token_logprobs

    device, several = batch.ids.device, c.epochs * c.minibatches > 1
    length = batch.mask.sum(1)  # sampled tokens of each episode [B]
    kept_share = len(kept_rows) / len(advantage)
    scale = {"none": 1.0, "linear": kept_share, "sqrt": math.sqrt(kept_share)}[c.filter_loss_scale]
    runs = (advantage != 0).any(1).cpu() | bool(c.beta or c.entropy_coef)  # [B]
    if several:
        progress("score")
        old_logprob = score_all(model, batch, kept_rows[runs[kept_rows]], c)  # [B, T]
    logs, nonfinite = [], []
    for name, minibatch in minibatches(kept_rows, c, rng):
        progress(f"update {name}")
        total, broken, weight = {}, "", torch.zeros(len(length), device=device)
        weight[minibatch] = token_weight(length[minibatch], c)
        for micro in micro_batches(model, batch, minibatch[runs[minibatch]], c):
            with autocast(device, c.dtype):
                logprob, entropy = token_logprobs(model, micro, c.temperature)  # [P] each: the sampled tokens
            old = micro.pick(old_logprob) if several else logprob.detach()
            ref = micro.pick(ref_logprob) if ref_logprob is not None else None
            loss, part = policy_loss(logprob, old, micro.pick(advantage), weight[micro.row_of_token()], entropy, ref, c)
            if not math.isfinite(part["loss"]):
                broken = "loss" if logprob.isfinite().all() else "log-prob"
            (scale * loss).backward()
            micro.finish_prefix()  # prompts are run once for several micro-batches; so is their backward pass, after the last
            total = {k: total.get(k, 0.0) + v for k, v in part.items()}
        total = distributed.add_up(total)  # under torchrun each process has run a share of the minibatch
        share = total.pop("weight", None)  # None: no episode was run
        log = {"loss": 0.0} | {k: v if k == "loss" else v / share for k, v in total.items()}
        log["grad_norm"], finite = optimizer_step(model.parameters(), optimizer, scheduler, c.max_grad_norm, log["loss"])
        if finite:
            logs.append(log)
        else:
            nonfinite.append(f"{distributed.first(broken) or 'gradient'} of update {name}")  # all processes are here, or none
    return means(logs) | {"nonfinite_updates": len(nonfinite)} | ({"nonfinite": nonfinite[0]} if nonfinite else {})


# -- the run -----------------------------------------------------------------------------------------------------------


def run(c: Config, model, tokenizer, out: Path, saved: Path | None = None):
    """`train` with all that surrounds it: signals, files, checkpoints, evaluations. saved: the checkpoint that the model comes from."""
    with session(c, out, saved) as s:
        return train(c, model, tokenizer, s)


def train(c: Config, model, tokenizer, session):
    """Train a loaded model; returns the last line of the log. session: nanoragen/run/session.py.

    On a CPU every number of a resumed run is the one it would have been without the stop: weights, moments, random states, log.
    """
    import numpy as np
    import torch

    from nanoragen.collapse.monitor import Monitor
    from nanoragen.envs.base import train_seeds
    from nanoragen.envs.registry import make
    from nanoragen.evaluate import held_out
    from nanoragen.learning import advantages
    from nanoragen.learning.critic import Critic
    from nanoragen.policy import loading, lora
    from nanoragen.policy.batches import make_batch
    from nanoragen.policy.support import kv_cache_unsupported
    from nanoragen.report.page import Report
    from nanoragen.report.runs import posterior_record
    from nanoragen.rollout.episodes import longest_episode, rollout, sampling_of
    from nanoragen.run import memory
    from nanoragen.run.metrics import rollout_metrics
    from nanoragen.science import gradients

    torch.manual_seed(c.seed)
    envs = [make(c.env, **env_options(c)) for _ in range(c.groups * c.group_size)]
    groups = [g for g in range(c.groups) for _ in range(c.group_size)]
    start_model = loading.load_policy(c, device=model.device)[0] if session.saved and c.beta > 0 and not c.lora else model
    reference = loading.reference(start_model) if c.beta > 0 else None  # the KL is to the start of the run, also after a resume
    trained = [p for p in model.parameters() if p.requires_grad]  # all, or the adapters
    optimizer = torch.optim.AdamW(trained, lr=c.lr, betas=(0.9, 0.99), weight_decay=c.weight_decay)
    schedule = partial(learning_rate, updates=c.steps * c.epochs * c.minibatches, c=c)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    critic = Critic(model, c.critic_lr, schedule, c.weight_decay) if c.baseline == "critic" else None
    if c.aggregation == "seq_mean_token_sum_norm":
        c = replace(c, loss_length=c.loss_length or c.max_tokens * (c.max_turns or envs[0].max_turns))
    sampling, monitor = sampling_of(c, contain_faults=True, env_timeout=c.env_timeout or None), Monitor()
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters on {model.device}"
    needs = memory.lines(model, c, *longest_episode(model, tokenizer, envs[0], sampling))
    session.begin(
        c, Report(session.out), monitor, partial(held_out, c, model, tokenizer, sampling),
        (model, tokenizer, partial(lora.save, model)),
        [f"{c.env}: {c.model}, {size}; files in {session.out}", *needs, kv_cache_unsupported(model)],
        optimizer, scheduler, critic,
    )  # fmt: skip
    for step in session.steps():
        line = session.line  # the metrics of this step

        # 1. rollouts: K episodes of each prompt; mask = exactly the sampled ids
        seeds = [s for s in train_seeds(c.seed, step, c.groups) for _ in range(c.group_size)]
        with session.timed("rollout"), loading.autocast(model.device, c.dtype):
            episodes = rollout(model, tokenizer, envs, seeds, groups, sampling, env_name=c.env, progress=session.phase)
        played = session.without_faults(episodes)
        episodes, group = [episodes[i] for i in played], [groups[i] for i in played]
        line.update(rollout_metrics(episodes, c.env))

        # 2. diagnosis, before anything is filtered
        if c.mi_every and (step - 1) % c.mi_every == 0:
            with session.timed("diagnosis"), loading.autocast(model.device, c.dtype):
                measured, found = monitor.measure(model, episodes, step, vars(c), c.temperature)
            line.update(measured)
            session.cross.write([posterior_record(step, found)] if found else [])

        # 3. advantages against the group or the critic; the filter keeps the groups with signal
        ids = torch.tensor(group, device=model.device)  # [B]
        noise = c.reward_noise * np.random.default_rng([c.seed, step, 1]).standard_normal(len(episodes))
        rewards = torch.tensor([e.reward + x for e, x in zip(episodes, noise)], dtype=torch.float32, device=model.device)  # [B]
        found = advantages.group_statistics(c, episodes, rewards, ids)
        line.update(advantages.group_metrics(found, ids))
        keep = found.keep.tolist()
        kept_rows = torch.tensor([i for i, e in enumerate(episodes) if keep[group[i]] and e.num_tokens], dtype=torch.long)
        if c.grad_every and (step - 1) % c.grad_every == 0:
            with session.timed("gradients"):
                ours, pad = (token_weight, policy_loss), tokenizer.pad_token_id
                line.update(gradients.measure(model, reference, critic, episodes, rewards, ids, pad, c, *ours))

        credited = torch.zeros(len(episodes))  # mean over an episode's tokens, for the log
        if len(kept_rows):
            batch = make_batch(episodes, tokenizer.pad_token_id).to(model.device)
            session.phase("advantages")
            value = critic.values(batch, kept_rows, c) if critic else None  # [B, T]
            advantage, returns = advantages.token_advantages(c, found, episodes, rewards, ids, batch, kept_rows, value)  # [B, T]
            advantages.note_turns(episodes, advantage)
            credited = advantage.cpu().double().sum(1) / batch.mask.cpu().sum(1).clamp(min=1)

            # 4. and 5. loss and update
            ref = None
            if reference is not None:
                session.phase("reference")
                ref = score_all(reference, batch, kept_rows, c)  # [B, T]
            rng = np.random.default_rng([c.seed, step])
            line.update(update(model, optimizer, scheduler, batch, advantage, kept_rows, ref, c, rng, session.phase))
            if critic:
                line.update(critic.update(batch, kept_rows, returns, value, c, rng, session.phase))
        line.update(skipped=float(len(kept_rows) == 0), lr=scheduler.get_last_lr()[0])

        # 6. evaluation on held-out seeds, log, checkpoint
        session.end_step(episodes, credited.tolist(), [keep[g] for g in group])
    return session.finish()


def learning_rate(update: int, updates: int, c: Config) -> float:
    """Factor of the peak rate: linear rise over lr_warmup updates, then constant, linear or cosine towards 0."""
    rise = min(1.0, (update + 1) / (c.lr_warmup + 1))
    done = min(1.0, update / updates)
    return rise * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[c.lr_schedule]


@cli.quiet_when_unread
@release_locks()
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    c, saved = cli.parse(Config, argv, "train.py", __doc__.split("\n\n")[0]), None
    try:
        if c.resume:
            c, out, saved = resumed(c, argv)
        check(c)
        device = distributed.start(c.device)
        out = out if saved else distributed.on_first(partial(run_folder, c))  # before torch is imported: a bad folder shows at once
        from nanoragen.policy import loading
        from nanoragen.policy.support import max_positions
        from nanoragen.rollout.chat import Chat

        model, tokenizer = loading.load_policy(c, saved, device)
        Chat(tokenizer)  # a model without a chat template cannot play
        check_context(c, max_positions(model))
    except ValueError as e:
        cli.fail("train.py", e)
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        cli.fail("train.py", f"model: {c.model} does not fit into memory ({e}); valid: a smaller one, or another --device")
    try:
        run(c, model, tokenizer, out, saved)
    except (TooManyFaults, CannotGoOn) as e:
        cli.fail("train.py", e)
    distributed.finish()


if __name__ == "__main__":
    main()
