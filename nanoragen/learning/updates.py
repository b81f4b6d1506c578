"""What an update of the policy and one of the critic have in common: the order of episodes, and a step that keeps the weights finite."""

import math

import torch

from nanoragen.run import distributed


def minibatches(rows, c, rng):
    """(name, rows [n] long) of each update: c.epochs passes over rows [kept] long in random order, in c.minibatches parts each.

    rng: numpy.random.Generator.
    """
    for epoch in range(c.epochs):
        order = rows[torch.from_numpy(rng.permutation(len(rows)))]
        for n, minibatch in enumerate(order.chunk(c.minibatches)):
            yield f"{epoch * c.minibatches + n + 1}/{c.epochs * c.minibatches}", minibatch


def optimizer_step(parameters, optimizer, scheduler, max_grad_norm: float, loss: float) -> tuple[float, bool]:
    """One step with the gradients at hand, summed over the processes and clipped; none where loss or gradient is not finite.

    Returns (norm of the gradient before it was clipped, whether a step was taken). One bad gradient must not cost the weights.
    """
    parameters = list(parameters)
    distributed.sum_gradients(parameters)  # under torchrun each process has a share of the minibatch
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, finite


def means(logs: list[dict]) -> dict:
    """The mean of each quantity over the logs that have it."""
    values = {k: [log[k] for log in logs if k in log] for log in logs for k in log}
    return {k: sum(v) / len(v) for k, v in values.items()}
