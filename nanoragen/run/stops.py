"""Early stops: when there is nothing left to learn from (RAGEN-2's three), and when updates keep failing."""

EARLY = ("variance", "filtered", "success")
FIRST, LAST, LOW = 10, 10, 0.1  # in-group reward std: at most 10% of the mean of the first 10 steps, for 10 steps running
EMPTY = 5  # steps running whose every group was filtered out
NONFINITE = 3  # steps running with an update that was not finite; cannot be switched off
EVALUATIONS, HOPELESS = 5, 0.01  # evaluations running with a success under 1%
WHY = {
    "variance": f"episodes of a group earn the same: in-group reward std at most {LOW:.0%} of its start for {LAST} steps; what is left "
    "of the gradient is noise",
    "filtered": f"every group was filtered out in {EMPTY} steps running; nothing is being trained",
    "nonfinite": f"not finite in {NONFINITE} steps running: loss or gradient; those updates were left out. Lower --lr or "
    "--max_grad_norm, or try --dtype float32",
    "success": f"held-out success under {HOPELESS:.0%} in {EVALUATIONS} evaluations running",
}


def check(names: str) -> list[str]:
    """The names in "variance,filtered". ValueError for one that does not exist."""
    found = [n.strip() for n in names.split(",") if n.strip() and n.strip() != "none"]
    for name in found:
        if name not in EARLY:
            raise ValueError(f"early_stop: there is no {name!r}; valid: {', '.join(EARLY)}, or none")
    return found


def early_stop(history: list[dict], env: str, names: str) -> tuple[str, str] | None:
    """(name, reason in words) of an early stop (RAGEN-2's) that is due after these steps, else None.

    history: the lines of metrics.jsonl, so that a resumed run stops where the uninterrupted one would have. A line of which a
    bit has flipped may lack a key; it does not count then.
    """
    wanted = check(names)
    std = [line["rollout/in_group_reward_std"] for line in history if line.get("rollout/in_group_reward_std") is not None]
    if "variance" in wanted and len(std) >= FIRST + LAST:
        first = sum(std[:FIRST]) / FIRST
        if first > 0 and all(s <= LOW * first for s in std[-LAST:]):
            return "variance", WHY["variance"]
    if "filtered" in wanted and len(history) >= EMPTY and all(line.get("skipped") for line in history[-EMPTY:]):
        return "filtered", WHY["filtered"]
    if len(history) >= NONFINITE and all(line.get("nonfinite_updates") for line in history[-NONFINITE:]):
        return "nonfinite", WHY["nonfinite"].replace("loss or gradient", str(history[-1].get("nonfinite", "loss or gradient")))
    found = [line[f"eval/{env}/success"] for line in history if line.get(f"eval/{env}/success") is not None]
    if "success" in wanted and len(found) >= EVALUATIONS and all(s < HOPELESS for s in found[-EVALUATIONS:]):
        return "success", WHY["success"]
    return None
