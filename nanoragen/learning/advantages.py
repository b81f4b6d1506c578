"""Advantages: how much better than expected it went, for every sampled token.

    found = group_statistics(c, episodes, rewards, ids)         # one launch: baseline, scale, which groups train
    advantage, returns = token_advantages(c, found, episodes, rewards, ids, batch, rows, value)

Tables [B, T] lie on the ids of a batch and are 0 where nothing was sampled. Turns are known by their index (`Batch.turn`), never
found by looking for a reward that is not 0. B episodes, T tokens of the longest, N turns of the longest, G groups.

Left out: a value for what comes after the last turn: an episode that ran out of turns is taken as over, as in verl and RAGEN.
"""

import math
from dataclasses import replace

import torch

from nanoragen.kernels.advantage import group_advantages

EPS = 1e-6


def turn_rewards(episodes, device=None) -> torch.Tensor:
    """Reward of each turn [B, N], 0 where an episode has no such turn (one column at least)."""
    table = torch.zeros(len(episodes), max([1, *(len(e.turns) for e in episodes)]))
    for b, e in enumerate(episodes):
        table[b, : len(e.turns)] = torch.tensor([t.reward for t in e.turns])
    return table.to(device)


def format_penalties(episodes, penalty: float, device=None) -> torch.Tensor:
    """What of each episode's reward [B] was charged for replies that did not parse."""
    return torch.tensor([penalty * sum(not t.parsed for t in e.turns) for e in episodes], dtype=torch.float32, device=device)


def group_statistics(c, episodes, rewards, ids):
    """GroupAdvantages of a step's episodes under the settings c (train.Config). rewards, ids [B]: of each episode.

    Under --filter_metric success_std groups are ranked by the spread of their successes, so that one in which all failed, some
    with worse manners, does not train on manners alone. --constant_groups drop leaves out groups of equal rewards without a filter too.
    """
    scale = "std" if c.scale == "std" else "none"
    rule = {
        "filter": "top_p" if c.filter == "ragen" else c.filter, "filter_value": c.filter_value, "filter_mode": c.filter_mode,
        "include_zero": c.filter_include_zero or (c.filter == "none" and c.constant_groups == "keep"), "selection_eps": c.filter_eps,
        "num_groups": c.groups,
    }  # fmt: skip
    if c.filter_metric != "success_std":
        return group_advantages(rewards, ids, scale=scale, filter_metric=c.filter_metric, **rule)
    keep = group_advantages(rewards.new_tensor([float(e.success) for e in episodes]), ids, **rule).keep
    found = group_advantages(rewards, ids, scale=scale, num_groups=c.groups)
    return replace(found, keep=keep, advantages=torch.where(keep[ids], found.advantages, 0.0))


def group_metrics(found, ids) -> dict:
    """What is logged of the groups. Only those that can vary, of two episodes or more, count in the first two, which are left out
    where there is none (zero_variance_ratio: the advantage collapse rate of arXiv 2605.21125)."""
    std = found.std[torch.bincount(ids, minlength=len(found.keep)) > 1]
    spread = {
        "rollout/in_group_reward_std": std.mean().item(),
        "rollout/zero_variance_ratio": (std == 0).float().mean().item(),
    }
    return (spread if len(std) else {}) | {
        "rollout/filter_kept_ratio": int(found.keep.sum()) / len(found.keep),
        "rollout/kept_groups": int(found.keep.sum()),
        "rollout/groups": len(found.keep),
    }


def token_advantages(c, found, episodes, rewards, ids, batch, rows, value=None):
    """(advantage [B, T], returns [B, T] for the critic or None) under the settings c.

    found: GroupAdvantages; rewards, ids [B]; rows [kept] long: the episodes that train, all others get 0; value [B, T]: of the
    state before each sampled token, where --baseline critic.
    """
    mask, returns, turns = torch.zeros_like(batch.mask), None, turn_rewards(episodes, rewards.device)
    mask[rows] = batch.mask[rows]
    turns = turns + _all_at_the_end(rewards - turns.sum(1), batch.turn, turns.shape[1])  # --reward_noise comes with the last turn
    if c.baseline == "critic":
        if c.credit == "episode":
            turns = _all_at_the_end(rewards, batch.turn, turns.shape[1])
        reward = torch.where(last_tokens(batch.turn), at_turns(turns, batch.turn), 0.0)
        if c.bi_level:
            advantage = bi_level_gae(reward, value, batch.turn, c.gamma, c.lam, c.turn_gamma, c.turn_lam)
        else:
            advantage = gae(reward, value, batch.mask, c.gamma, c.lam)
        returns = (advantage + value) * mask
    else:
        penalties = format_penalties(episodes, c.format_penalty, rewards.device)
        advantage = at_turns(group_relative(c, found, rewards, turns, penalties, ids), batch.turn)
    if c.soft_reweight:  # RAGEN's softer form of the filter: groups count by their spread, the widest fully
        advantage = advantage * (found.std / (found.std.max() + EPS))[ids][:, None]
    if c.scale in ("batch", "per_reward"):
        advantage = whiten(advantage, mask)
    return advantage * mask, returns


def note_turns(episodes, advantage):
    """Give each turn its advantage, for the log: the mean over its sampled tokens. advantage [B, T]."""
    for e, row in zip(episodes, advantage.double().tolist()):
        for t in e.turns:
            t.advantage = sum(row[t.start : t.end]) / max(1, sum(e.mask[t.start : t.end]))


def group_relative(c, found, rewards, turns, penalties, ids) -> torch.Tensor:
    """Advantage of each turn [B, N] (0 in groups that are dropped, or whose returns are all equal).

    baseline  mean      of the group (GRPO, arXiv 2402.03300)
              others    mean of the group's other episodes (RLOO, arXiv 2402.14740): r - others = (r - mean) n / (n - 1)
              quantile  of the group (QAE, arXiv 2509.22611): the smallest reward that at least this share does not exceed
    scale     std       divided by the group's std + 1e-6;  none: not (Dr. GRPO, arXiv 2503.20783)
              per_reward  task reward and format penalty each normalised in the group, then added (GDPO, arXiv 2601.05242)
    credit    episode   every turn is credited with the whole return
              turn      with the rewards from it on (return-to-go; Sutton & Barto, section 13.3), less their mean over the group at
                        the same turn, where an episode that is over has 0 to come: so every episode counts once in every baseline.
                        Divided by the std of whole returns, that late turns, where little is left to differ, stay small. At the
                        first turn this is `episode`.
    """
    G, live = len(found.keep), found.keep & (found.std > 0)
    advantage = found.advantages[:, None]
    if c.scale == "per_reward":
        live = found.keep  # the two may vary where their sum does not
        task = torch.round(rewards - penalties, decimals=5)  # so that equal ones stay exactly equal
        advantage = sum(group_advantages(r, ids, num_groups=G).advantages for r in (task, penalties))[:, None]
    elif c.credit == "turn":
        N = turns.shape[1]
        togo = turns.flip(1).cumsum(1).flip(1)
        same_turn = ids[:, None] * N + torch.arange(N, device=ids.device)
        advantage = group_advantages(togo.flatten(), same_turn.flatten(), scale="none", num_groups=G * N).advantages.view(-1, N)
        advantage = advantage / (found.std + EPS)[ids][:, None] if c.scale == "std" else advantage
    if c.baseline == "others":
        n = torch.bincount(ids, minlength=G)
        advantage = advantage * (n / (n - 1).clamp(min=1))[ids][:, None]
    elif c.baseline == "quantile":
        shift = found.mean - group_quantile(rewards, ids, G, c.quantile)
        advantage = advantage + (shift / (found.std + EPS) if c.scale == "std" else shift)[ids][:, None]
    return torch.where(live[ids][:, None], advantage, 0.0).expand_as(turns)


def group_quantile(rewards, ids, G: int, q: float) -> torch.Tensor:
    """Smallest reward of each group whose share of rewards at or below it is at least q (no interpolation); 0 if empty. [G]"""
    members = [[] for _ in range(G)]
    for r, g in zip(rewards.tolist(), ids.tolist()):
        members[g].append(r)
    return rewards.new_tensor([sorted(m)[max(0, math.ceil(round(q * len(m), 6)) - 1)] if m else 0.0 for m in members])


def gae(reward, value, mask, gamma: float, lam: float, end=None) -> torch.Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) over the tokens of mask. All [B, T].

        delta_t = r_t + gamma V_next - V_t        A_t = delta_t + gamma lam A_next

    "next" is the next token of mask, so what lies between (observations, padding) is passed over. After the last one, and after
    a token of `end`, both are 0. value: of the state before the token is sampled.
    """
    advantage, a_next, v_next = torch.zeros_like(value), torch.zeros_like(value[:, 0]), torch.zeros_like(value[:, 0])
    for t in range(value.shape[1] - 1, -1, -1):
        if end is not None:
            a_next, v_next = a_next.masked_fill(end[:, t], 0.0), v_next.masked_fill(end[:, t], 0.0)
        delta = reward[:, t] + gamma * v_next - value[:, t]
        a_next = torch.where(mask[:, t], delta + gamma * lam * a_next, a_next)
        v_next = torch.where(mask[:, t], value[:, t], v_next)
        advantage[:, t] = a_next
    return advantage * mask


def bi_level_gae(reward, value, turn, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> torch.Tensor:
    """GAE over turns, then over the tokens of each turn (VAGEN, arXiv 2510.16907; as RAGEN computes it). All [B, T].

    1. The last token of a turn stands for the turn: GAE over these alone, with turn_gamma and turn_lam.
    2. The turn's return (its advantage + value) is the reward of its last token: GAE within each turn, with gamma and lam, as if
       the episode ended there. The last token's advantage is the turn's.
    """
    last = last_tokens(turn)
    of_turn = gae(reward, value, last, turn_gamma, turn_lam)
    return gae(torch.where(last, of_turn + value, 0.0), value, turn >= 0, gamma, lam, end=last)


def last_tokens(turn) -> torch.Tensor:
    """The last sampled token of every turn. turn [B, T] long, -1 where nothing was sampled -> [B, T] bool."""
    following = torch.nn.functional.pad(turn[:, 1:], (0, 1), value=-1)
    return (turn >= 0) & (following != turn)


def at_turns(table, turn) -> torch.Tensor:
    """Every sampled token gets its turn's value, 0 elsewhere. [B, N], [B, T] -> [B, T]."""
    return torch.where(turn >= 0, table.gather(1, turn.clamp(min=0)), 0.0)


def whiten(table, mask) -> torch.Tensor:
    """Mean 0 and sample variance 1 over the tokens of mask (which must be some), 0 elsewhere. [B, T]."""
    x = table[mask]
    x = x - x.mean()
    out = torch.zeros_like(table)
    out[mask] = x * torch.rsqrt(x.square().sum() / max(1, len(x) - 1) + 1e-8)
    return out


def _all_at_the_end(rewards, turn, N: int) -> torch.Tensor:
    """An episode's whole return as the reward of its last turn. [B] -> [B, N]."""
    table = torch.zeros(len(rewards), N, dtype=rewards.dtype, device=rewards.device)
    return table.scatter(1, turn.amax(1, keepdim=True).clamp(min=0), rewards[:, None])
