"""Names for what H(Z|X) and I(X; Z) show over a run, and what to do about it (RAGEN-2, arXiv 2604.06268, section on regimes)."""

LOW = 0.5  # share of the first measurement below which H(Z|X) or MI counts as lost
RECENT = 5  # measurements whose mean is judged: one alone, of a few prompts, jumps


def recent(measured) -> tuple[float, float]:
    """Means of the last RECENT of (H(Z|X), MI / H(X)) pairs; of all where there are fewer."""
    last = measured[-RECENT:]
    return sum(h for h, _ in last) / len(last), sum(mi for _, mi in last) / len(last)


def regime(h, share, h0, share0) -> str:
    """Name of what H(Z|X) and MI / H(X) (of `recent`) show against the run's first measurement (h0, share0).

    Low: below LOW of it, or none. MI counts as a share of its bound H(X), which differs from step to step: fewer different
    prompts leave less to know.
    """
    low_h = h <= 0 or h < LOW * h0
    low_mi = share <= 0 or share < LOW * share0
    if low_mi:
        return "low-entropy collapse" if low_h else "template collapse"
    return "compressed" if low_h else "diverse"


MEANING = {
    "diverse": "the reasoning varies and depends on the prompt",
    "template collapse": "the reasoning still varies but no longer tells prompts apart, which entropy cannot see",
    "compressed": "the reasoning is nearly fixed for a prompt but still depends on it",
    "low-entropy collapse": "the reasoning is much the same text for many prompts",
}


def advice(name, settings) -> str:
    """What to do in a regime; what the settings (a dict, perhaps empty) have already is left out."""
    if name != "template collapse":
        return {
            "diverse": "nothing to do about the reasoning",
            "compressed": "fine while reward rises, else raise --temperature or --entropy_coef, or lower --lr",
            "low-entropy collapse": "go back to an earlier checkpoint and lower --lr, or raise --entropy_coef",
        }[name]
    filtered = settings.get("filter", "none") != "none"
    on = " and ".join(f"--{key}" for key in ("beta", "entropy_coef") if settings.get(key, 1))
    todo = [] if filtered else ["train on prompts with reward variance only (--filter top_p)"]
    return ", or ".join(todo + [f"weaken {on}"] * bool(on)) or "go back to an earlier checkpoint and lower --lr"


def regime_sentence(h, share, h0, share0, settings) -> str:
    """The regime, its two numbers, what it means and what to do, in one line for the console.

    Collapse is a loss. Where there was nothing to lose (share0 not above 0) the sentence says so.
    """
    name = regime(h, share, h0, share0)
    meaning = f"{MEANING[name]}; {advice(name, settings)}"
    if "collapse" in name and share0 <= 0:
        meaning = (
            "the reasoning did not depend on the prompt at the first measurement either, so this is how the model "
            "started, not what training did to it; try a stronger model, or a larger --max_tokens if replies are cut off"
        )
    return f"{name} (H(Z|X) {h:.2f}, first {h0:.2f}; MI {share:.0%} of its bound, first {share0:.0%}): {meaning}"
