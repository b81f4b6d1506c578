"""How an id is drawn: each row by its own uniform draws, so that a row gets the same ids in any batch.

Its log-prob and entropy are recorded for reading; training scores the ids itself. Left out: anything that reshapes the distribution
but the temperature. Shapes: B rows, R ids of a reply, V vocabulary.
"""

import math

import torch


class Sampler:
    """A logits processor for `generate`: it draws an id for each row, and leaves `generate` no other to choose.

    uniforms [B, R] float64 in [0, 1): for the columns from `start` on. temperature 0 is greedy. broken: False or a bool tensor, were
    any logits NaN or infinite. Such rows are set to 0: NaN among probabilities aborts a CUDA process. Nothing here waits for the device.
    """

    def __init__(self, uniforms, temperature: float, start: int):
        self.uniforms, self.temperature, self.start = uniforms, temperature, start
        self.broken, self.steps = False, []

    def __call__(self, input_ids, logits):
        """input_ids [B, columns so far], logits [B, V] -> [B, V]: 0 at the id that was drawn, -inf elsewhere."""
        broken = ~logits.amax(-1, keepdim=True).isfinite()  # [B, 1]; NaN, +inf, or nothing but -inf
        self.broken = broken.any() | self.broken
        logits = logits.masked_fill(broken, 0.0)
        # greedy play has no probabilities of its own: those at temperature 1 are recorded
        logprobs = (logits / (self.temperature or 1.0)).log_softmax(-1)
        probs = logprobs.exp()
        column = input_ids.shape[1] - self.start
        ids = inverse_cdf(probs, self.uniforms[:, column]) if self.temperature else logits.argmax(-1)
        entropy = -torch.linalg.vecdot(probs, logprobs.clamp(min=torch.finfo(logprobs.dtype).min))  # 0 log 0 = 0
        self.steps.append(torch.stack([logprobs.gather(1, ids[:, None])[:, 0], entropy]))  # [2, B]
        return torch.full_like(logits, -math.inf).scatter(1, ids[:, None], 0.0)

    def values(self) -> list[list[tuple[float, float]]]:
        """(log-prob, entropy) in nats of each drawn id [B][R]; those after a row's end are of padding. Empty rows before any step."""
        if not self.steps:
            return [[] for _ in self.uniforms]
        logprobs, entropies = torch.stack(self.steps, 2).tolist()
        return [list(zip(*row)) for row in zip(logprobs, entropies)]


def inverse_cdf(probs, uniforms) -> torch.Tensor:
    """The id at which the cumulated probabilities first exceed the uniform draw in [0, 1). probs [B, V], uniforms [B] -> [B]."""
    cumulated = probs.cumsum(-1, dtype=torch.float64)  # in float32 the steps of a large vocabulary would be lost
    at = uniforms[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, at, right=True)[:, 0].clamp(max=probs.shape[1] - 1)
