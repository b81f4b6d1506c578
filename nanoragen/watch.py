"""What the model's logits say while `generate` samples: are they sound, and how sure was it of each id?

Left out on purpose: anything that changes what is drawn, and the values of ids that were only read. Training does not
use the values: it scores the ids itself, with gradient. B rows, R steps of a reply, V vocabulary.
"""

import torch


class Watch:
    """A logits processor, called once a step with the logits [B, V]. It waits for no device.

    bad: None, or a bool tensor: were any logits broken. Such rows are blanked: drawing from NaN aborts a CUDA process.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature or 1.0  # greedy play has no probabilities of its own: those at 1 are kept
        self.bad, self.last, self.logprobs, self.entropies = None, None, [], []

    def __call__(self, input_ids, scores):
        broken = ~scores.amax(-1, keepdim=True).isfinite()  # [B, 1]; NaN, +inf, or nothing but -inf
        self.bad = broken.any() if self.bad is None else self.bad | broken.any()
        scores = scores.masked_fill(broken, 0.0)
        self._drawn(input_ids)
        logprob = (scores if self.temperature == 1 else scores / self.temperature).log_softmax(-1)
        self.last = logprob.clamp_(min=torch.finfo(logprob.dtype).min)  # 0 log 0 = 0
        self.entropies.append(torch.linalg.vecdot(logprob.exp(), logprob).neg())
        return scores

    def _drawn(self, ids):
        """The last of ids [B, C] was drawn from the step before."""
        if self.last is not None:
            self.logprobs.append(self.last.gather(1, ids[:, -1:])[:, 0])

    def values(self, ids) -> list[list[tuple[float, float]]]:
        """(log-prob, entropy) in nats of each new id of what `generate` returned, ids [B, C + R], row by row.

        Those after a row's end are of padding. Empty rows where no step was seen.
        """
        self._drawn(ids)
        if not self.logprobs:
            return [[] for _ in ids]
        logprobs, entropies = torch.stack([torch.stack(self.logprobs, 1), torch.stack(self.entropies, 1)]).tolist()
        return [list(zip(*row)) for row in zip(logprobs, entropies)]
