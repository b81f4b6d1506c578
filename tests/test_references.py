"""The algorithms against independent references: TRL's `_compute_loss` and verl's `core_algos`, live and recorded.

Where TRL 1.16 or verl 0.9 is installed their own functions are called; everywhere the numbers they gave are compared
(`PYTHONPATH=. python tests/test_references.py` prints anew those of what is installed). All in float64, on ragged rows with gaps
where observations would be. verl's `core_algos` needs few of verl's dependencies: `pip install --no-deps verl==0.9.0`, then
what its import asks for (ray, tensordict 0.10, omegaconf, codetiming and small ones of theirs).
Left out: what no reference computes; it is worked out by hand in test_algorithms.py.
"""

import json
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanoragen.learning.advantages import bi_level_gae, gae, group_relative, group_statistics, last_tokens, whiten
from nanoragen.learning.critic import value_errors
from train import Config, kl_estimate, policy_loss, token_weight

LENGTH = 9  # what dr_grpo divides by
MASK = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0],
                     [0, 0, 1, 0, 0, 0, 0, 0, 0],
                     [1, 1, 1, 1, 1, 1, 1, 1, 1],
                     [0, 1, 0, 1, 0, 1, 0, 1, 0]]).bool()  # fmt: skip
TURN = torch.tensor([[-1, 0, 0, -1, 1, 1, 1, -1, -1],
                     [-1, -1, 0, -1, -1, -1, -1, -1, -1],
                     [0, 0, 0, 1, 1, 2, 2, 2, 2],
                     [-1, 0, -1, 1, -1, 2, -1, 3, -1]])  # fmt: skip
IDS = [0, 1, 1, 0]  # groups
TASK = torch.tensor([0.0, 1, 0, 10, 3, 3, 3, 3], dtype=torch.float64)  # two rewards of each of eight episodes,
FORMAT = torch.tensor([0.0, -0.1, -0.2, 0, 0, -0.1, 0, -0.3], dtype=torch.float64)
EVEN, UNEVEN = [0, 0, 0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 1, 0]  # in groups of four, or of five and three


def wave(scale, shift, offset=0.0):
    """A table [4, 9] that looks random and is the same everywhere."""
    n = torch.arange(36, dtype=torch.float64).view(4, 9)
    return offset + scale * torch.sin(3.7 * n + shift)


LOGPROB, OLD, REF, ENTROPY = wave(0.9, 0.1, -1.5), wave(0.9, 0.4, -1.5), wave(0.8, 0.2, -1.6), wave(0.4, 2.0, 1.0)
ADVANTAGE, VALUE = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64), wave(0.5, 1.0, 0.3)
REWARD = torch.zeros(4, 9, dtype=torch.float64)
REWARD[[0, 1, 2, 3, 0], [6, 2, 8, 7, 2]] = torch.tensor([1.0, -0.5, 0.0, 2.0, 0.25], dtype=torch.float64)
PROJECT = wave(1.0, 0.7)  # a fixed direction, to compare a gradient by one number

# What trl 1.16.0 and verl 0.9.0 gave, rounded to 9 digits. Losses, kl: value and gradient on LOGPROB along PROJECT (trl: and the
# shares of tokens clipped low and high); gae: advantages whitened, returns; bi_level: returns; the others: advantages.
RECORDED = {
    "trl grpo beta 0.0": [0.181968441, -0.385446169, 0.052631579, 0.263157904],
    "trl grpo beta 0.1": [0.182976074, -0.387613651, 0.052631579, 0.263157904],
    "trl dr_grpo beta 0.0": [-0.087831738, -0.139253654, 0.052631579, 0.263157904],
    "trl dr_grpo beta 0.1": [-0.087355388, -0.139120295, 0.052631579, 0.263157904],
    "trl dapo beta 0.0": [-0.175985023, -0.125857752, 0.052631579, 0.0],
    "trl dapo beta 0.1": [-0.175082466, -0.125605071, 0.052631579, 0.0],
    "verl seq_mean_token_mean": [0.173877465, -0.262101009],
    "verl token_mean": [-0.175985023, -0.125857752],
    "verl seq_mean_token_sum": [-0.835928857, -0.597824323],
    "verl seq_mean_token_sum_norm": [-0.092880984, -0.066424925],
    "verl gae 1.0 1.0": [[1.058661343, 0.073294097, 0.310536961, -0.060038903, 0.75861099, -0.929870752, -0.270453979,
        -1.235194123, -0.59491955, -0.716213178, -1.150749491, -0.292395341, -1.313799392, -0.439647926, -0.900979646,
        1.749480838, 1.797251469, 1.314018942, 0.842407644], [1.25, 1.25, 1.0, 1.0, 1.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0]],
    "verl gae 0.9 0.8": [[0.838769568, -0.421156807, 0.091121704, -0.298754702, 1.296578894, -1.049320705, 0.204732663,
        -1.265789205, -0.334600848, -0.487445039, -1.220329499, 0.090979984, -1.517952917, -0.263487717, -1.009180719,
        0.947099203, 1.544033258, 1.44170074, 1.413002147], [0.657562087, 0.731455813, 0.605176986, 0.689831108, 1.0, -0.5,
        0.228857883, 0.140701326, 0.168891213, 0.179508569, 0.092026866, 0.172458958, 0.043876989, 0.070941817, 0.0,
        0.830852871, 1.190211772, 1.575637163, 2.0]],
    "verl kl k1": [0.107267327, -0.11579266],
    "verl kl k2": [0.009597339, 0.003326149],
    "verl kl k3": [0.009025568, 0.002526815],
    "verl bi_level 0.9 0.8 0.95 0.7": [0.755321364, 0.867232587, 0.605176986, 0.689831108, 1.0, -0.5, 0.272981956, 0.201984762,
        0.254007096, 0.194122897, 0.112324544, 0.172458958, 0.043876989, 0.070941817, 0.0, 0.700509883, 1.115540235, 1.544758842,
        2.0],
    "verl rloo": [-0.75, -0.5, 0.5, 0.75],
    "verl rloo none": [-3.925, -1.95, -4.175, 8.575, 1.2, -0.3, -0.175, 0.75],
    "verl grpo std": [-0.760711945, -1.14458517, -0.809164935, 1.661937562, 0.704360105, -0.058143588, -0.033917093, 0.440225066],
    "verl grpo none": [-3.14, -1.3, -3.34, 6.86, 0.8, -0.24, -0.14, 0.5],
    "verl value 0.1": [1.757944344, -0.050369542],
    "verl value 0.5": [1.673592913, 0.313457779],
    "verl gdpo": [0.164972261, -0.472331941, -1.422641993, 1.730001926, 0.537411749, -1.1e-08, 0.537411749, -1.074823618],
}  # fmt: skip


def projected(loss, leaf):
    (gradient,) = torch.autograd.grad(loss, leaf)
    return [loss.item(), (gradient * PROJECT).sum().item()]


def trl_loss(algo, beta):
    """TRL's own function on our tensors, without a model: the per-token log-probs are handed over."""
    trainer = pytest.importorskip("trl").GRPOTrainer
    leaf, nothing = LOGPROB.clone().requires_grad_(), torch.zeros(4, 0, dtype=torch.long)
    c = Config(algo=algo)
    args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, ENTROPY, None), aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=beta, args=args, loss_type=algo, use_vllm=False,
        epsilon_low=c.clip_low, epsilon_high=c.clip_high, model=SimpleNamespace(training=True), accelerator=accelerator,
        current_gradient_accumulation_steps=1, max_completion_length=LENGTH, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros(4, 9, dtype=torch.long),
        "completion_mask": MASK.long(), "advantages": ADVANTAGE, "old_per_token_logps": OLD, "ref_per_token_logps": REF,
        "num_items_in_batch": MASK.sum(),
    }  # fmt: skip
    loss = trainer._compute_loss(fake, None, inputs)
    low, high = (fake._metrics["train"][f"clip_ratio/{side}_mean"][0] for side in ("low", "high"))
    return [*projected(loss, leaf), low, high]


def core_algos():
    pytest.importorskip("verl")
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def verl_loss(aggregation):
    core = core_algos()
    leaf = LOGPROB.clone().requires_grad_()

    class Settings(SimpleNamespace):
        def get(self, key, default):
            return 1e9 if key == "clip_ratio_c" else default  # its third, outer clip is not ours

    c = Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={"loss_scale_factor": LENGTH})
    mode, longer = aggregation.replace("_", "-"), lambda x: torch.cat([x, x[:1]])
    mask = torch.cat([MASK, torch.zeros(1, 9).bool()]).double()  # a fifth episode without a sampled token counts nowhere
    loss, _ = core.compute_policy_loss_vanilla(longer(OLD), longer(leaf), longer(ADVANTAGE)[:, None].expand(5, 9), mask, mode, c)
    return projected(loss, leaf)


def verl_kl(kind):
    leaf = LOGPROB.clone().requires_grad_()
    return projected(core_algos().kl_penalty(leaf, REF, kind)[MASK].mean(), leaf)


def verl_gae(gamma, lam):
    found = core_algos().compute_gae_advantage_return(REWARD, VALUE, MASK.double(), gamma, lam)
    return [table[MASK].tolist() for table in found]


def verl_bi_level(gamma, lam, turn_gamma, turn_lam):
    """Returns by verl's GAE, called as bi-level GAE is defined (verl has none of its own): over the last tokens of turns, where
    rewards are paid; then over each turn as if it were an episode, which is paid the return just found for it."""
    call, last, n = core_algos().compute_gae_advantage_return, last_tokens(TURN).double(), int(TURN.max()) + 1
    _, paid = call(REWARD, VALUE, last, turn_gamma, turn_lam)
    each = torch.cat([TURN == i for i in range(n)]).double()  # every turn in a row of its own
    _, found = call((paid * last).repeat(n, 1) * each, VALUE.repeat(n, 1), each, gamma, lam)
    return (found * each).view(n, 4, 9).sum(0)[MASK].tolist()


def verl_rloo():
    found, _ = core_algos().compute_rloo_outcome_advantage(REWARD.clone(), MASK.double(), np.array(IDS))
    return (found.sum(1) / MASK.sum(1)).tolist()  # one value an episode


def verl_outcome(kind, scale):
    """Advantages of eight episodes, one token each, in groups of five and three."""
    core, reward = core_algos(), (TASK + FORMAT)[:, None]
    more = {"norm_adv_by_std_in_grpo": scale == "std"} if kind == "grpo" else {}
    function = getattr(core, f"compute_{kind}_outcome_advantage")
    return function(reward, torch.ones_like(reward), np.array(UNEVEN), **more)[0][:, 0].tolist()


def verl_value_loss(clip):
    leaf = LOGPROB.clone().requires_grad_()
    return projected(core_algos().compute_value_loss(leaf, VALUE, OLD, MASK.double(), clip)[0], leaf)


def verl_gdpo():
    """Two rewards of each of eight episodes in two groups; one token each, as verl whitens over tokens. It computes in float32."""
    reward, one = (TASK + FORMAT)[:, None], torch.ones(8, 1)
    batch = {"prompts": torch.zeros(8, 0), "attention_mask": torch.ones(8, 1, dtype=torch.long)}
    parts, config = {"task": TASK.numpy(), "format": FORMAT.numpy()}, {"gdpo_reward_keys": ["task", "format"]}
    call = core_algos().compute_gdpo_outcome_advantage
    return call(reward, one, np.array(EVEN), config=config, non_tensor_batch=parts, batch=batch)[0][:, 0].tolist()


REFERENCES = {
    **{f"trl {algo} beta {beta}": (trl_loss, algo, beta) for algo in ("grpo", "dr_grpo", "dapo") for beta in (0.0, 0.1)},
    **{f"verl {a}": (verl_loss, a) for a in ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")},
    **{f"verl gae {g} {lam}": (verl_gae, g, lam) for g, lam in ((1.0, 1.0), (0.9, 0.8))},
    **{f"verl kl {kind}": (verl_kl, kind) for kind in ("k1", "k2", "k3")},
    "verl bi_level 0.9 0.8 0.95 0.7": (verl_bi_level, 0.9, 0.8, 0.95, 0.7),
    "verl rloo": (verl_rloo,),
    **{f"verl {kind} {s}": (verl_outcome, kind, s) for kind, s in (("rloo", "none"), ("grpo", "std"), ("grpo", "none"))},
    **{f"verl value {clip}": (verl_value_loss, clip) for clip in (0.1, 0.5)},
    "verl gdpo": (verl_gdpo,),
}  # fmt: skip


# -- ours on the same tensors -------------------------------------------------------------------------------------------


def our_loss(c, order=None, pieces=1):
    """[loss, projected gradient, share clipped low, high] on the tensors above: rows in any order, in so many micro-batches."""
    rows = torch.arange(4) if order is None else torch.tensor(order)
    leaf = LOGPROB.clone().requires_grad_()
    weight, loss, parts = token_weight(MASK[rows].sum(1).double(), c), 0.0, []
    for part in torch.arange(4).chunk(pieces):
        r = rows[part]
        pick = lambda table: table[r][MASK[r]]  # noqa: B023
        ref = pick(REF) if c.beta else None
        of_row = lambda x: pick(x[:, None].expand(4, 9))  # noqa: B023
        spread = torch.zeros(4, dtype=torch.float64).index_put((rows,), weight)
        found, stats = policy_loss(pick(leaf), pick(OLD), of_row(ADVANTAGE), of_row(spread), pick(ENTROPY), ref, c)
        loss, parts = loss + found, [*parts, stats]
    total = {k: sum(p[k] for p in parts) for k in parts[0]}
    share = [total[f"clip_ratio/{side}_mean"] / total["weight"] for side in ("low", "high")]
    return [*projected(loss, leaf), *share]


def ours(name):
    kind, *args = name.split()
    if kind == "trl":
        c = Config(algo=args[0], beta=float(args[2]), loss_length=LENGTH)
        share = our_loss(replace(c, aggregation="token_mean"))[2:]  # TRL counts clipped tokens as a token mean, whatever the loss
        return our_loss(c)[:2] + share
    if args[0] == "gae":
        table = gae(REWARD, VALUE, MASK, float(args[1]), float(args[2]))
        return [whiten(table, MASK)[MASK].tolist(), (table + VALUE)[MASK].tolist()]
    if args[0] == "bi_level":
        table = bi_level_gae(REWARD, VALUE, TURN, *map(float, args[1:]))
        return (table + VALUE)[MASK].tolist()
    if args[0] == "kl":
        leaf = LOGPROB.clone().requires_grad_()
        return projected(kl_estimate(leaf[MASK], REF[MASK], args[1]).mean(), leaf)
    if args[0] in ("rloo", "grpo"):
        algo, scale = args if len(args) == 2 else (args[0], "auto")
        c = Config(algo=algo, scale=scale, groups=2, filter="none")
        ids, rewards = (torch.tensor(UNEVEN), TASK + FORMAT) if len(args) == 2 else (torch.tensor(IDS), REWARD.sum(1))
        found = group_statistics(c, [], rewards, ids)
        none = torch.zeros_like(rewards)
        return group_relative(c, found, rewards, none[:, None], none, ids)[:, 0].tolist()
    if args[0] == "value":
        leaf = LOGPROB.clone().requires_grad_()
        error, _ = value_errors(leaf[MASK], OLD[MASK], VALUE[MASK], float(args[1]))
        return projected(error.mean(), leaf)
    if args[0] == "gdpo":
        c, ids, rewards = Config(scale="per_reward", groups=2, filter="none"), torch.tensor(EVEN), TASK + FORMAT
        found = group_statistics(c, [], rewards, ids)
        table = group_relative(c, found, rewards, torch.zeros(8, 1), FORMAT, ids)
        return whiten(table, torch.ones(8, 1).bool())[:, 0].tolist()
    return our_loss(Config(aggregation=args[0], clip_high=0.28, loss_length=LENGTH))[:2]


def close(got, want, tolerance=1e-6):
    got, want = (torch.tensor(x, dtype=torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", RECORDED)
def test_equals_what_the_references_gave(name):
    close(ours(name), RECORDED[name])


@pytest.mark.parametrize("name", REFERENCES)
def test_equals_the_references_where_they_are_installed(name):
    call, *args = REFERENCES[name]
    close(ours(name), call(*args))


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
def test_micro_batches_and_row_order_change_nothing(aggregation):
    c = Config(aggregation=aggregation, beta=0.1, entropy_coef=0.05, loss_length=LENGTH)
    want = our_loss(c)
    for order, pieces in (([0, 1, 2, 3], 4), ([3, 1, 0, 2], 1), ([2, 0, 3, 1], 3)):
        close(our_loss(c, order, pieces), want, 1e-12)


def test_entropy_bonus_and_kl_are_weighed_like_the_policy_term():
    leaf = ENTROPY.clone().requires_grad_()
    weight = torch.full((int(MASK.sum()),), 0.125, dtype=torch.float64)
    zero = torch.zeros_like(weight)
    loss, part = policy_loss(zero, zero, zero, weight, leaf[MASK], REF[MASK], Config(entropy_coef=0.3, beta=0.2, kl="k2"))
    (gradient,) = torch.autograd.grad(loss, leaf)
    close(gradient.tolist(), (-0.3 * 0.125 * MASK.double()).tolist(), 1e-12)
    assert loss.item() == pytest.approx((0.125 * (0.2 * REF**2 / 2 - 0.3 * ENTROPY))[MASK].sum().item(), rel=1e-12)
    assert part["kl"] == pytest.approx((0.125 * kl_estimate(zero, REF[MASK], "k2")).sum().item())


if __name__ == "__main__":
    for name, (call, *args) in REFERENCES.items():
        if find_spec(name.split()[0]):
            rounded = json.loads(json.dumps(call(*args)), parse_float=lambda digits: round(float(digits), 9))
            print(f'    "{name}": {json.dumps(rounded)},')
