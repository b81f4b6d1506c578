"""Words for the person who runs it: one line a step, and at the end why nothing was learned, if so."""

import math

from nanoragen.run.metrics import mean_of


def console_line(m: dict) -> str:
    """One step on one line; what was not measured is left out."""
    sample = "collapse_first_turn_sample/"
    parts = [f"step {m['step']:>4}"]

    def add(key, text):
        value = m.get(key)
        if value is not None:
            parts.append(text(value))

    def of(key):
        return m[key] if m.get(key) is not None else math.nan

    success = next((k for k in m if k.endswith("/success") and not k.startswith("eval/")), "success")
    add("reward", lambda v: f"reward {v:6.2f}")
    add(success, lambda v: f"success {v:6.1%}")
    add("rollout/in_group_reward_std", lambda v: f"in-group std {v:5.2f}")
    add("rollout/kept_groups", lambda v: f"kept {v}/{m['rollout/groups']}" if m.get("rollout/groups") else f"kept {v}")
    add(sample + "conditional_entropy_est", lambda v: f"H(Z|X) {v:.2f}")
    add(sample + "mi_seq_estimate", lambda v: f"MI {v:.2f} of {of(sample + 'mi_upper_bound'):.2f}")
    add(
        sample + "retrieval_accuracy",
        lambda v: f"retrieval {v:4.0%} (chance {of(sample + 'retrieval_chance_level'):.0%})",
    )
    add("tokens_per_second", lambda v: f"{v:,.0f} tokens/s")
    add("regime", str)
    add("eval/" + success, lambda v: f"held-out success {v:.1%}")
    if m.get("rollout/faults"):
        parts.append(f"{m['rollout/faults']} episodes lost to environment errors (errors.jsonl)")
    if m.get("skipped"):
        parts.append("no update: every group was filtered out")
    if m.get("nonfinite_updates"):
        parts.append(f"updates left out: {m['nonfinite_updates']:.0f}, not finite: {m.get('nonfinite', 'loss or gradient')}")
    if m.get("critic/nonfinite_updates"):
        parts.append(f"updates of the critic left out: {m['critic/nonfinite_updates']:.0f}, not finite")
    return " | ".join(parts)


HUGE_KL = 0.1  # approx_kl of a step, nats a token, from which its updates count as too large
FLAT = 0.1  # of the reward's std over episodes: a smaller change of the reward between first and last steps is none


def diagnosis(history: list[dict], before: dict, after: dict, env: str) -> list[str]:
    """Why nothing was learned, in plain words; an empty list when held-out success rose beyond chance.

    history: the steps' metrics. before, after: what `evaluate` returned. The last half of the run is looked at, and the
    signals in the order in which each needs the one before: replies that parse, groups that differ, groups that are
    kept, updates that happen, and only then a reward that does not move.
    """
    if after["success_low"] > before["success_high"]:
        return []
    fell = after["success_high"] < before["success_low"]
    head = "Held-out success fell." if fell else "Nothing was learned beyond chance (the intervals before and after overlap)."

    def values(key, rows=history):
        return [m[key] for m in rows if m.get(key) is not None]

    def mean(key, default=0.0):
        return mean_of(values(key, history[len(history) // 2 :]) or [default])

    parse, began = mean("rollout/parse_rate", 1.0), mean_of(values("rollout/parse_rate")[:1] or [1.0])
    flat, skipped, success = mean("rollout/zero_variance_ratio"), mean("skipped"), mean(f"{env}/success")
    without_room, kl = mean("rollout/truncated_by_context"), max(values("approx_kl"), default=0.0)
    too_large = f"The updates are too large (approx_kl up to {kl:.2g} nats a token): lower --lr" if kl > HUGE_KL else ""
    if began >= 0.7 and parse < began - 0.2:  # it could: more tokens would not bring that back
        lost = f"Replies parse no longer: {began:.0%} of the turns did in the first step, {parse:.0%} in the last half of the run. "
        return [head, lost + (too_large or "Lower --lr or --entropy_coef") + ", or add --beta 0.01."]
    out = []
    if parse < 0.7 and mean("rollout/turns", 1.0) > 0:  # without any turn, all ran out of context
        cut = mean("completions/clipped_ratio")
        longer = f"{cut:.0%} of the replies are cut: raise --max_tokens, or s" if cut > 0.3 and without_room <= 0.3 else "S"
        out.append(
            f"Replies do not parse: only {parse:.0%} of the turns are <think>...</think><answer>...</answer>. "
            f"{longer}tart from a model that knows the format."
        )
    if without_room > 0.3:
        out.append(
            f"{without_room:.0%} of the episodes ran out of context. Lower --max_turns or --max_tokens, or raise --max_context."
        )
    if flat > 0.7:
        if success < 0.1 and fell:
            why = "almost all fail since success fell: " + (too_large or "lower --lr, or add --beta 0.01")
        elif success < 0.1:
            why = "almost all fail, so make it easier (--env_options) or start from a better model"
        elif success > 0.9:
            why = "almost all succeed, so make it harder (--env_options)"
        else:
            why = "episodes of a group end alike, so raise --temperature or --group_size"
        out.append(
            f"No variance in groups: in {flat:.0%} of them all episodes earn the same, so there is no task gradient ({why})."
        )
    if skipped > 0.3:
        out.append(
            f"Everything was filtered out in {skipped:.0%} of the steps, which updated nothing. "
            + ("The groups have no variance to keep." if flat > 0.7 else "Loosen --filter_value, or use --filter none.")
        )
    if mean("nonfinite_updates") > 0:
        out.append("Some updates were not finite and were left out. Lower --lr.")
    if not out and fell:
        out.append(f"The signals are there, but success fell. {too_large or 'Lower --lr'}, or add --beta 0.01.")
    if not out:
        std = f"in-group reward std {mean('rollout/in_group_reward_std'):.2f}, " if values("rollout/in_group_reward_std") else ""
        vary = f", {1 - flat:.0%} of groups vary" if std else ""
        course = _course(values("reward"), mean("reward_std"))
        todo = (
            "Try another --lr, more --steps, or more --groups" if len(history) >= 20 else "A few steps prove little: raise --steps"
        )
        out.append(f"The signals are there ({std}{parse:.0%} of replies parse{vary}); {course}. {too_large or todo}.")
    return [head, *out]


def _course(rewards: list[float], std: float) -> str:
    """What the reward of training did, with the numbers that show it. std: of the reward over a step's episodes."""
    few = max(1, min(3, len(rewards) // 2))  # no step is both
    first, last = mean_of(rewards[:few]), mean_of(rewards[-few:])
    change = "rose, which held-out success does not show yet" if last > first else "fell"
    if abs(last - first) <= FLAT * std or f"{first:.2f}" == f"{last:.2f}":
        change = "hardly moved"
    return f"the reward in training {change} ({first:.2f} in the first steps, {last:.2f} in the last)"


def interval(result: dict) -> str:
    return f"{result['success']:.1%} (95%: {result['success_low']:.1%} to {result['success_high']:.1%})"
