"""Several processes train one model: `torchrun --nproc_per_node=N train.py ...`. In one process every function here does nothing.

Each process holds the whole model. Groups of episodes are split over them, and gathered again: so advantages, filter, MI and
early stops see all episodes, and every process decides the same. Each scores and differentiates its share of every minibatch, with
weights that count tokens over all of it: the gradients add up to those of one process. Only the first process writes and prints.

The gradients are summed by hand, where the update is read. The wrapper DistributedDataParallel averages, while our weights want a
sum; it communicates in every backward pass, of which a minibatch has several; and a process without a row has none. Left out:
FSDP2, for models that do not fit one device (sampling would gather the weights for every token), a split of the MI's matrix (it is
small; every process makes all of it), and processes that join or leave.
"""

import os
import sys


def start(device: str) -> str:
    """Join the others if torchrun started this process. Returns the device to use: on CUDA each process has one of its own.

    From then on standard output of all but the first goes nowhere. ValueError where `device` names one device.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device
    import torch
    import torch.distributed as dist

    if ":" in device:
        raise ValueError(f"device: {device} under torchrun; valid: auto, cpu, cuda (each process takes its own)")
    cuda = device == "cuda" or device in ("", "auto") and torch.cuda.is_available()
    if cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(pick_device(device))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")
    return device


def pick_device(device=None):
    """A torch.device that is there: None or "auto" is CUDA if there is one, else the CPU. ValueError otherwise."""
    import torch

    if device in (None, "", "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"device: {device!r} is not a device; valid: auto, cpu, cuda, cuda:1") from e
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device: {device} is not there ({count} CUDA devices); valid: auto, cpu")
    return device


def finish():
    """Wait until all are here, and part. Not for a process that failed: torchrun ends the others."""
    if world() > 1:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


def world() -> int:
    """How many processes there are."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist and dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return sys.modules["torch.distributed"].get_rank() if world() > 1 else 0


def share(items):
    """This process's part of a list or tensor, every N-th item; perhaps none."""
    return items[rank() :: world()]


def gather(item) -> list:
    """The item of every process, in the order of ranks. Pickled, so let tensors be on the CPU."""
    if world() == 1:
        return [item]
    import torch.distributed as dist

    found = [None] * world()
    dist.all_gather_object(found, item)
    return found


def first(item):
    """The item of the first process that has one; None where none has."""
    return next(filter(None, gather(item)), None)


def on_first(make):
    """make(), called by the first process alone; all wait for it, and get what it returned or raised."""
    if world() == 1:
        return make()
    found, error = None, None
    try:
        found = make() if rank() == 0 else None
    except Exception as e:
        error = e
    found, error = gather((found, error))[0]
    if error:
        raise error
    return found


class Silent:
    """What the other processes have in place of a log: it takes every call and does nothing."""

    def __getattr__(self, name):
        return lambda *args, **more: None


def add_up(sums: dict) -> dict:
    """{name: number} summed over the processes; a name may be missing where there was nothing to add."""
    total = {}
    for part in gather(sums):
        for k, v in part.items():
            total[k] = total.get(k, 0.0) + v
    return total


def sum_tensors(tensors):
    """Sum each tensor over the processes, in place. All processes end with the same bits."""
    if world() > 1:
        import torch.distributed as dist

        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()


def sum_gradients(parameters):
    """Sum the gradients over the processes, in place. Where nothing was run it is 0, which moves an optimiser by its momentum."""
    import torch

    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    sum_tensors([p.grad for p in trained])
