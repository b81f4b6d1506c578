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
    5. update        AdamW, a few minibatches

Left out on purpose, against the systems this re-implements: Ray, an inference server, and tricks that are neither one small
term nor an algorithm's own. Shapes: G groups, K episodes a group, B = G*K episodes, P sampled (trained) tokens, V vocabulary.
"""

import math
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from nanoragen.run import stops

if __name__ == "__main__":
    stops.leave_on_signals()  # until `run` has its own answer: no traceback out of an import

from nanoragen.run import cli, distributed
from nanoragen.run.folder import release_locks, resumed, run_folder
from nanoragen.run.settings import MAX_REWARD, RAGEN_FILTER, PlaySettings, check, check_context, env_flags, env_options, section

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


def score(model, batch, rows, temperature, behind=None):
    """log pi(token | context) and entropy of every sampled token of some episodes, at the temperature they were sampled at.

    Returns (logprob [P], entropy [P], row [P]): fp32, in reading order; row = which of `rows` a token belongs to.
    behind: prompts that were run before (nanoragen/policy/batches.py, passes).
    """
    from nanoragen.policy.loading import sampled_scores

    part = batch.select(rows)  # [b, T]
    sampled = part.mask[:, 1:]  # the logits at position t score token t + 1
    # the head runs on sampled tokens only, and the logits are never held: kernels/linear.py
    logprob, entropy = sampled_scores(model, part.ids, part.attention_mask, sampled, temperature, behind=behind)
    return logprob, entropy, sampled.nonzero()[:, 0]


def score_all(model, batch, rows, c: Config):
    """log pi of every sampled token of some episodes, without gradient, 0 elsewhere. [B, T]"""
    from nanoragen.policy.batches import on_tokens

    return on_tokens(model, batch, rows, c, lambda part, behind: score(model, batch, part, c.temperature, behind)[0])


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

    from nanoragen.policy.batches import passes
    from nanoragen.policy.loading import autocast

    device, several = batch.ids.device, c.epochs * c.minibatches > 1
    length = batch.mask.sum(1)  # sampled tokens of each episode [B]
    kept_share = len(kept_rows) / len(advantage)
    scale = {"none": 1.0, "linear": kept_share, "sqrt": math.sqrt(kept_share)}[c.filter_loss_scale]
    runs = (advantage != 0).any(1).cpu() | bool(c.beta or c.entropy_coef)  # [B]
    if several:
        progress("score")
        old = score_all(model, batch, kept_rows[runs[kept_rows]], c)
    logs, bad = [], []
    for epoch in range(c.epochs):
        order = kept_rows[torch.from_numpy(rng.permutation(len(kept_rows)))]
        for n, minibatch in enumerate(order.chunk(c.minibatches)):
            name = f"update {epoch * c.minibatches + n + 1}/{c.epochs * c.minibatches}"
            progress(name)
            total, broken, weight = {}, "", torch.zeros(len(length), device=device)
            weight[minibatch] = token_weight(length[minibatch], c)
            for rows, behind in passes(model, batch, minibatch[runs[minibatch]], c):  # micro-batches, under torchrun this process's
                with autocast(device, c.dtype):
                    logprob, entropy, row = score(model, batch, rows, c.temperature, behind)
                sampled = batch.mask[rows]  # picks from a table [B, T] the P tokens that were scored, in the same order
                before = old[rows][sampled] if several else logprob.detach()
                ref = ref_logprob[rows][sampled] if ref_logprob is not None else None
                loss, part = policy_loss(logprob, before, advantage[rows][sampled], weight[rows][row], entropy, ref, c)
                if not math.isfinite(part["loss"]):
                    broken = "loss" if logprob.isfinite().all() else "log-prob"
                (scale * loss).backward()
                total = {k: total.get(k, 0.0) + v for k, v in part.items()}
            distributed.sum_gradients(model.parameters())  # under torchrun each process has a share of the minibatch
            total = distributed.add_up(total)
            share = total.pop("weight", None)  # None: no episode was run
            total = {"loss": 0.0} | {k: v if k == "loss" else v / share for k, v in total.items()}
            total["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), c.max_grad_norm).item()
            if not (math.isfinite(total["loss"]) and math.isfinite(total["grad_norm"])):
                optimizer.zero_grad(set_to_none=True)  # one bad gradient must not cost the weights
                bad.append(f"{distributed.first(broken) or 'gradient'} of {name}")  # all processes are here, or none
                continue
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            logs.append(total)
    sums = {}
    for log in logs:
        for k, v in log.items():
            sums.setdefault(k, []).append(v)
    return {k: sum(v) / len(v) for k, v in sums.items()} | {"nonfinite_updates": len(bad)} | ({"nonfinite": bad[0]} if bad else {})


# -- the run -----------------------------------------------------------------------------------------------------------


def run(c: Config, model, tokenizer, out: Path, saved: Path | None = None):
    """`train`, with Ctrl-C, SIGTERM and SIGHUP answered at the end of a step: it is saved, and the run can be resumed."""
    from tqdm import tqdm

    look = {"unit": "step", "dynamic_ncols": True, "smoothing": 0.1, "disable": distributed.rank() > 0}
    # whatever ends the run, the bar's line ends too, and what is printed next starts a new one
    with stops.Stop() as stop, tqdm(total=c.steps, **look) as bar:
        try:
            return train(c, model, tokenizer, out, saved, stop, bar)
        except Exception as e:
            why = stops.reason(e, bar.desc, c)
            if why is None:
                raise
            raise stops.CannotGoOn(f"{why}; {stops.how_to_go_on(out)}") from e
        except SystemExit:
            if stop.left:
                bar.write(f"ended at once by {stop.left} in {bar.desc or 'the start'}; {stops.how_to_go_on(out)}")
            raise


def train(c: Config, model, tokenizer, out: Path, saved: Path | None, stop, bar):
    """Train a loaded model; files go to the folder `out`. Returns the last line of the log as a dict.

    saved: the checkpoint that the model comes from, to go on exactly where it stood. On a CPU every number of the run is
    then the one it would have been without the stop: weights, moments, random states, log.
    """
    import numpy as np
    import torch

    from nanoragen.collapse import estimator, regimes
    from nanoragen.envs.base import eval_seeds, train_seeds
    from nanoragen.envs.registry import make
    from nanoragen.evaluate import evaluate
    from nanoragen.learning import advantages, gradients
    from nanoragen.learning.critic import Critic
    from nanoragen.policy import loading
    from nanoragen.policy.batches import make_batch
    from nanoragen.report.page import Report
    from nanoragen.rollout.episodes import Sampling, rollout
    from nanoragen.rollout.generation import why_plain
    from nanoragen.run import checkpoint, faults, memory, metrics
    from nanoragen.run.metrics import interval, scores

    torch.manual_seed(c.seed)
    options = env_options(c)
    envs = [make(c.env, **options) for _ in range(c.groups * c.group_size)]
    start_model = loading.load_policy(c, device=model.device)[0] if saved and c.beta > 0 and not c.lora else model
    reference = loading.reference(start_model) if c.beta > 0 else None  # the KL is to the start of the run, also after a resume
    trained = [p for p in model.parameters() if p.requires_grad]  # all, or the adapters
    optimizer = torch.optim.AdamW(trained, lr=c.lr, betas=(0.9, 0.99), weight_decay=c.weight_decay)
    updates = c.steps * c.epochs * c.minibatches
    schedule = partial(learning_rate, updates=updates, c=c)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    critic = Critic(model, c.critic_lr, schedule, c.weight_decay) if c.baseline == "critic" else None
    if c.aggregation == "seq_mean_token_sum_norm":
        c = replace(c, loss_length=c.loss_length or c.max_tokens * (c.max_turns or envs[0].max_turns))
    sampling = Sampling(
        temperature=c.temperature, max_tokens=c.max_tokens, max_turns=c.max_turns or None,
        max_actions_per_turn=c.max_actions_per_turn or None, max_context=c.max_context or None,
        format_penalty=c.format_penalty, rollout_batch=c.rollout_batch or None, contain_faults=True,
        env_timeout=c.env_timeout or None,
    )  # fmt: skip
    history, before, measured, regime, ema, done = [], None, [], "", estimator.Ema(), 0
    if saved:
        state = checkpoint.restore(saved, optimizer, scheduler, critic)
        before, measured, regime, done = state["before"], state["measured"], state["regime"], state["step"]
        ema.load_state_dict(state["ema"])
        history = distributed.on_first(lambda: metrics.rewind(out, done))
    if distributed.rank() == 0:
        log = metrics.Log(out, asdict(replace(c, resume="")), trackers=c.log)
        cross, page = metrics.Lines(out / "cross.jsonl"), Report(out)
    else:
        log = cross = page = distributed.Silent()
    groups = [g for g in range(c.groups) for _ in range(c.group_size)]
    bar.initial = bar.n = done
    say, phase = bar.write, lambda text: bar.set_description_str(text)
    say(f"{c.env}: {c.model}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters on {model.device}; files in {out}")
    for text in memory.lines(model, tokenizer, c, envs[0], sampling):
        say(text)
    if slow := why_plain(model):
        say(slow)

    def held_out(n, label):
        phase(f"evaluation ({label})")
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):  # training must not notice
            torch.manual_seed(c.seed)
            with loading.autocast(model.device, c.dtype):
                found, episodes = evaluate(model, tokenizer, c.env, eval_seeds(n), sampling, env_options=options)
        failed = faults.split(episodes)[1]
        if len(failed) > c.max_faults * n:
            log.errors(done, failed)
            raise faults.TooManyFaults(failed, n, c.max_faults)
        return found

    def keep_step(step):
        phase("save")
        state = {"step": step, "before": before, "measured": measured, "regime": regime, "ema": ema.state_dict()}
        parts = {"optimizer": optimizer, "scheduler": scheduler, "critic": critic, "state": state, "keep": c.keep}
        return distributed.on_first(lambda: checkpoint.save(out, step, model, tokenizer, **parts))

    few = c.eval_episodes or c.groups * c.group_size
    many = c.final_episodes or 2 * c.groups * c.group_size
    if saved:
        say(f"resumed after step {done} from {saved}" + ("" if history else "; the log is gone, so early stops count anew"))
    else:
        before = held_out(many, "before")
        say(f"before training: {c.env} success {interval(before)} on {many} held-out episodes")
    for step in range(done + 1, c.steps + 1):
        start = time.perf_counter()
        line = {"step": step, **(scores(f"eval/before/{c.env}", before) if step == 1 else {})}

        # 1. rollouts: K episodes of each prompt; mask = exactly the sampled ids
        phase("rollout")
        seeds = [s for s in train_seeds(c.seed, step, c.groups) for _ in range(c.group_size)]
        with loading.autocast(model.device, c.dtype):
            episodes = rollout(model, tokenizer, envs, seeds, groups, sampling, env_name=c.env, progress=phase)
        log.errors(step, episodes)
        played, failed = faults.split(episodes)
        if len(failed) > c.max_faults * len(seeds):
            if step > 1 and (saved is None or saved.name != checkpoint.folder_name(step - 1)):
                keep_step(step - 1)  # what was learned so far
            raise faults.TooManyFaults(failed, len(seeds), c.max_faults)
        episodes, group = [episodes[i] for i in played], [groups[i] for i in played]
        line["rollout/faults"] = len(failed)
        line["time/rollout"] = time.perf_counter() - start
        line.update(metrics.rollout_metrics(episodes, c.env))

        # 2. diagnosis, before anything is filtered
        if c.mi_every and (step - 1) % c.mi_every == 0:
            phase("diagnosis")
            with loading.autocast(model.device, c.dtype):
                found, logged = estimator.diagnose(model, episodes, ema, temperature=c.temperature, seed=step)
            line.update(logged)
            if found.get("mi_upper_bound"):  # with one prompt only there is nothing to tell apart, so no regime
                measured.append((found["conditional_entropy_est"], found["mi_seq_estimate"] / found["mi_upper_bound"]))
                del measured[1 : -regimes.RECENT]
                judged = *regimes.recent(measured), *measured[0]  # the last few against the run's first
                line["regime"], regime = regimes.regime(*judged), regimes.regime_sentence(*judged, vars(c))
                cross.write([estimator.cross_record(step, found)])
        line["time/diagnosis"] = time.perf_counter() - start - line["time/rollout"]

        # 3. advantages against the group or the critic; the filter keeps the groups with signal
        ids = torch.tensor(group, device=model.device)  # [B]
        noise = c.reward_noise * np.random.default_rng([c.seed, step, 1]).standard_normal(len(episodes))
        rewards = torch.tensor([e.reward + x for e, x in zip(episodes, noise)], dtype=torch.float32, device=model.device)  # [B]
        found = advantages.group_statistics(c, episodes, rewards, ids)
        keep = found.keep.tolist()
        kept_rows = torch.tensor([i for i, e in enumerate(episodes) if keep[group[i]] and e.num_tokens], dtype=torch.long)
        line["rollout/in_group_reward_std"] = found.std.mean().item()
        line["rollout/zero_variance_ratio"] = (found.std == 0).float().mean().item()  # advantage collapse rate, arXiv 2605.21125
        line["rollout/filter_kept_ratio"] = sum(keep) / len(keep)
        line["rollout/kept_groups"], line["rollout/groups"] = sum(keep), len(keep)

        if c.grad_every and (step - 1) % c.grad_every == 0:
            phase("gradients")
            begun, ours, pad = time.perf_counter(), (score, token_weight, policy_loss), tokenizer.pad_token_id
            line.update(gradients.measure(model, reference, critic, episodes, rewards, ids, pad, c, *ours))
            line["time/gradients"] = time.perf_counter() - begun

        credited = torch.zeros(len(episodes))  # mean over an episode's tokens, for the log
        if len(kept_rows):
            batch = make_batch(episodes, tokenizer.pad_token_id).to(model.device)
            phase("advantages")
            value = critic.values(batch, kept_rows, c) if critic else None  # [B, T]
            advantage, returns = advantages.token_advantages(c, found, episodes, rewards, ids, batch, kept_rows, value)  # [B, T]
            advantages.note_turns(episodes, advantage)
            credited = advantage.cpu().double().sum(1) / batch.mask.cpu().sum(1).clamp(min=1)

            # 4. and 5. loss and update
            phase("reference")
            ref = score_all(reference, batch, kept_rows, c) if reference is not None else None  # [B, T]
            rng = np.random.default_rng([c.seed, step])
            line.update(update(model, optimizer, scheduler, batch, advantage, kept_rows, ref, c, rng, phase))
            if critic:
                line.update(critic.update(batch, kept_rows, returns, value, c, rng, phase))
        line["skipped"] = float(len(kept_rows) == 0)
        line["lr"] = scheduler.get_last_lr()[0]
        line["step_time"] = time.perf_counter() - start
        line["tokens_per_second"] = line["num_tokens"] / line["step_time"]
        line.update(metrics.process_metrics())

        # 6. evaluation on held-out seeds, log, checkpoint
        if step == c.steps:
            after = held_out(many, "after")
            line.update(scores(f"eval/{c.env}", after))
        elif c.eval_every and step % c.eval_every == 0:
            line.update(scores(f"eval/{c.env}", held_out(few, "held out")))
        history.append(line)
        early = stops.early_stop(history, c.env, c.early_stop)
        if early:
            line[f"early_stopped/{early[0]}"] = 1.0
            if step < c.steps:
                after = held_out(many, "after")
                line.update(scores(f"eval/{c.env}", after))
        asked = distributed.first(stop.asked)  # whichever process was asked, all stop
        last = step == c.steps or early or asked
        log.step(line)
        log.rollouts(step, episodes, credited.tolist(), [keep[g] for g in group])
        say(metrics.console_line(line))
        due = last or (c.save_every and step % c.save_every == 0)
        if due:
            saved = keep_step(step)
            asked = distributed.first(stop.asked)  # perhaps while it was saved
        page.refresh()  # written when that is cheap: under 1% of the time
        bar.update()
        if last or (due and asked):
            break
    if early and step < c.steps:
        say(f"stopped early: {early[1]} (--early_stop)")
    bar.close()
    log.close()
    page.write()
    if asked and step < c.steps:
        print(f"stopped by {asked} after step {step}, which is saved; go on with: {stops.resume_command(out)}")
        distributed.finish()
        raise SystemExit(130)

    print(f"\n{c.env} success on {many} held-out episodes: {interval(before)} before, {interval(after)} after {step} steps")
    for sentence in metrics.diagnosis(history, before, after, c.env) + ([f"reasoning: {regime}"] if regime else []):
        print(sentence)
    print(
        f"report    {out / 'report.html'}\nlog       {out / 'metrics.jsonl'}\nepisodes  {out / 'rollouts.jsonl'}\nmodel     {saved}"
    )
    print(f"evaluate  python eval.py --model {shlex.quote(str(saved))} {env_flags(c)}")
    return line


def learning_rate(update: int, updates: int, c: Config) -> float:
    """Factor of the peak rate: linear rise over lr_warmup updates, then constant, linear or cosine towards 0."""
    rise = min(1.0, (update + 1) / (c.lr_warmup + 1))
    done = min(1.0, update / updates)
    return rise * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[c.lr_schedule]


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
        from nanoragen.rollout.chat import Chat
        from nanoragen.rollout.generation import positions
        from nanoragen.run.faults import TooManyFaults

        model, tokenizer = loading.load_policy(c, saved, device)
        Chat(tokenizer)  # a model without a chat template cannot play
        check_context(c, positions(model))
    except ValueError as e:
        cli.fail("train.py", e)
    except (RuntimeError, MemoryError) as e:
        if not stops.out_of_memory(e):
            raise
        cli.fail("train.py", f"model: {c.model} does not fit into memory ({e}); valid: a smaller one, or another --device")
    try:
        run(c, model, tokenizer, out, saved)
    except (TooManyFaults, stops.CannotGoOn) as e:
        cli.fail("train.py", e)
    distributed.finish()


if __name__ == "__main__":
    main()
