"""The critic of PPO: what return to expect before each token, learned by regression.

    critic = Critic(model, lr, schedule)
    value = critic.values(batch, rows, c)                                       # [B, T], before the update
    line.update(critic.update(batch, rows, returns, value, c, rng, progress))

It is a linear head on a copy of the policy's trunk: features of a shared one would follow the value loss too, which knows nothing
of reasoning. The head starts at 0, so that the first advantages are plain returns. Left out: a warm-up of the critic alone.
"""

import copy

import torch

from nanoragen.learning.updates import means, minibatches, optimizer_step
from nanoragen.policy.loading import autocast
from nanoragen.policy.scoring import micro_batches, token_table
from nanoragen.run import distributed
from nanoragen.run.checkpoint import restore_optimizer


class Critic:
    def __init__(self, model, lr: float, schedule, weight_decay: float = 0.0):
        """model: a causal language model of transformers; schedule: update number -> factor of the peak rate lr."""
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}  # under adapters: shared, not copied
        self.trunk = copy.deepcopy(model.base_model, frozen)
        self.head = torch.nn.Linear(model.get_output_embeddings().weight.shape[1], 1).to(model.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.parameters = [p for p in self.trunk.parameters() if p.requires_grad] + [*self.head.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def state_dict(self) -> dict:
        """Weights, moments and schedule: all that a resumed run needs."""
        return {k: getattr(self, k).state_dict() for k in ("trunk", "head", "optimizer", "scheduler")}

    def load_state_dict(self, state: dict):
        self.trunk.load_state_dict(state["trunk"])
        self.head.load_state_dict(state["head"])
        restore_optimizer(self.optimizer, self.scheduler, state["optimizer"], state["scheduler"])

    def value(self, micro) -> torch.Tensor:
        """Value of the state before every sampled token of a MicroBatch. fp32 [P]"""
        return self.head(self.trunk(**micro.inputs).last_hidden_state[micro.wanted]).squeeze(1).float()

    def values(self, batch, rows, c) -> torch.Tensor:
        """The values of some episodes, 0 elsewhere. [B, T]"""
        return token_table(self.trunk, batch, rows, c, self.value)

    def update(self, batch, rows, returns, old, c, rng, progress=lambda text: None) -> dict:
        """c.epochs passes of c.minibatches updates. returns, old [B, T]: targets, and the values from before; rows [kept] long.

        The loss is a token mean over the minibatch. Returns the mean of each logged quantity, and `critic/explained_variance`:
        1 - Var(return - value) / Var(return) over all tokens, before the update; 1 is a perfect critic, 0 or less a useless one.
        """
        logs, nonfinite = [], 0
        for name, minibatch in minibatches(rows, c, rng):
            progress(f"critic {name}")
            tokens, log = batch.mask[minibatch].sum(), {"critic/loss": 0.0, "critic/clip_ratio": 0.0}
            for micro in micro_batches(self.trunk, batch, minibatch, c):
                with autocast(batch.ids.device, c.dtype):
                    value = self.value(micro)
                error, clipped = value_errors(value, micro.pick(old), micro.pick(returns), c.value_clip)
                loss = error.sum() / tokens
                loss.backward()
                micro.finish_prefix()
                log["critic/loss"] += loss.item()
                log["critic/clip_ratio"] += (clipped.sum() / tokens).item()
            log = distributed.add_up(log)
            step = self.optimizer, self.scheduler, c.max_grad_norm, log["critic/loss"]
            log["critic/grad_norm"], finite = optimizer_step(self.parameters, *step)
            nonfinite += not finite
            logs += [log] if finite else []
        mask = torch.zeros_like(batch.mask)
        mask[rows] = batch.mask[rows]
        spread = returns[mask].var(correction=0)
        explained = 1 - ((returns - old)[mask].var(correction=0) / spread).item() if spread > 0 else 0.0
        return means(logs) | {"critic/explained_variance": explained, "critic/nonfinite_updates": nonfinite}


def value_errors(value, old, returns, clip: float):
    """Half squared error of each token, clipped: the worse of V and of V held within clip of what it was (PPO2; 0: not clipped).

    All [P]. Returns (error [P], whether the clip decided [P]).
    """
    error = (value - returns).square() / 2
    if not clip:
        return error, torch.zeros_like(error, dtype=torch.bool)
    held = (old + (value - old).clamp(-clip, clip) - returns).square() / 2
    return torch.maximum(error, held), held > error
