"""How the next ids are drawn while `generate` runs: each row by its own numbers, so that a batch's composition changes nothing.

It also notes what each id was drawn from (log-prob and entropy, for reading; training scores the ids itself, with gradient) and
whether any logits were broken. Left out on purpose: anything that reshapes the distribution but the temperature. B rows, R steps
of a reply, V vocabulary.
"""

import math

import torch


class Draw:
    """A logits processor, called once a step with the logits [B, V], that draws the ids and leaves no others possible.

    luck [B, R] float64 in [0, 1): of the columns from `start` on; temperature 0 is greedy. bad: None, or a bool tensor: were any
    logits broken. Such rows are blanked: NaN among probabilities aborts a CUDA process. Nothing here waits for the device.
    """

    def __init__(self, luck, temperature: float, start: int):
        self.luck, self.temperature, self.start = luck, temperature, start
        self.bad, self.noted = None, []

    def __call__(self, input_ids, scores):
        broken = ~scores.amax(-1, keepdim=True).isfinite()  # [B, 1]; NaN, +inf, or nothing but -inf
        self.bad = broken.any() if self.bad is None else self.bad | broken.any()
        scores = scores.masked_fill(broken, 0.0)
        # greedy play has no probabilities of its own: those at temperature 1 are noted
        logprob = (scores / (self.temperature or 1.0)).log_softmax(-1)
        probs = logprob.exp()
        ids = draw(probs, self.luck[:, input_ids.shape[1] - self.start]) if self.temperature else scores.argmax(-1)
        entropy = -torch.linalg.vecdot(probs, logprob.clamp(min=torch.finfo(logprob.dtype).min))  # 0 log 0 = 0
        self.noted.append(torch.stack([logprob.gather(1, ids[:, None])[:, 0], entropy]))  # [2, B]
        return torch.full_like(scores, -math.inf).scatter(1, ids[:, None], 0.0)

    def values(self) -> list[list[tuple[float, float]]]:
        """(log-prob, entropy) in nats of each drawn id, row by row; those after a row's end are of padding. Empty rows before any."""
        if not self.noted:
            return [[] for _ in self.luck]
        logprobs, entropies = torch.stack(self.noted, 2).tolist()
        return [list(zip(*row)) for row in zip(logprobs, entropies)]


def draw(probs, luck) -> torch.Tensor:
    """The id at which the cumulated probabilities first exceed luck, a number in [0, 1). probs [B, V], luck [B] -> [B]."""
    cumulated = probs.cumsum(-1, dtype=torch.float64)  # in float32 the steps of a large vocabulary would be lost
    at = luck[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, at, right=True)[:, 0].clamp(max=probs.shape[1] - 1)
