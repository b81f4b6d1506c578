"""The collapse measurements of a run: both samplings at a step, their moving averages, and the regime that they show."""

from nanoragen.collapse.estimator import SAMPLINGS, STD_EPS, Measurement, measure
from nanoragen.run import regimes


def diagnose(model, episodes, ema=None, **how) -> tuple[Measurement, dict[str, float]]:
    """Both samplings: (the measurement of first turns, the metrics of both by the names they have in a log).

    ema: an Ema that takes part. how: what `measure` takes beside `sampling`.
    """
    found = {sampling: measure(model, episodes, sampling=sampling, **how) for sampling in SAMPLINGS}
    logged = {f"{SAMPLINGS[sampling]}{k}": v for sampling, m in found.items() for k, v in m.items()}
    for prefix in SAMPLINGS.values() if ema else ():
        logged.update(ema.update(logged, prefix))
    return found["first_turn"], logged


class Ema:
    """Moving averages over steps of the standard deviations, and the z-scores taken with them; those of each sampling."""

    def __init__(self, decay=0.9):
        self.decay, self.values = decay, {}

    def update(self, found, prefix="") -> dict[str, float]:
        """found: metrics of this step, their names with `prefix`. Returns marginal_std_ema, mi_zscore_ema, and both with _seq."""
        out = {}
        for end in ("", "_seq"):
            if f"{prefix}marginal_std{end}" not in found:  # nothing measured: the average waits
                continue
            new, name = found[f"{prefix}marginal_std{end}"], f"{prefix}marginal_std_ema{end}"
            old = self.values.get(name, new)  # the first value starts it
            self.values[name] = out[name] = self.decay * old + (1 - self.decay) * new
            out[f"{prefix}mi_zscore_ema{end}"] = found[f"{prefix}mi{end}_estimate"] / (out[name] + STD_EPS)
        return out

    def state_dict(self) -> dict:
        return {"decay": self.decay, "values": dict(self.values)}

    def load_state_dict(self, state):
        self.decay, self.values = state["decay"], dict(state["values"])


class Monitor:
    """What a run remembers of its measurements, so that a step is judged against the first."""

    def __init__(self):
        self.ema, self.measured, self.regime = Ema(), [], ""  # measured: (H(Z|X), MI / H(X)) of the first and of the last few

    def measure(self, model, episodes, step: int, settings: dict, temperature: float) -> tuple[dict, Measurement | None]:
        """(what of a step's episodes goes into the log, the first turns' Measurement or None where there is nothing to tell apart)."""
        found, line = diagnose(model, episodes, self.ema, temperature=temperature, seed=step)
        if not found.get("mi_upper_bound"):  # with one prompt or no reasoning there is nothing to tell apart, so no regime
            self.regime = ""  # what was true many steps ago is not said at the end
            return line, None
        self.measured.append((found["conditional_entropy_est"], found["mi_seq_estimate"] / found["mi_upper_bound"]))
        del self.measured[1 : -regimes.RECENT]
        judged = *regimes.recent(self.measured), *self.measured[0]  # the last few against the run's first
        self.regime = regimes.regime_sentence(*judged, settings)
        return line | {"regime": regimes.regime(*judged)}, found

    def state_dict(self) -> dict:
        return {"measured": self.measured, "regime": self.regime, "ema": self.ema.state_dict()}

    def load_state_dict(self, state: dict):
        self.measured, self.regime = state["measured"], state["regime"]
        self.ema.load_state_dict(state["ema"])
