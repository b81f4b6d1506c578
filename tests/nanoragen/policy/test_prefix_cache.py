"""Rows that begin alike are run behind a common prefix: the numbers and the gradient of each row alone, and fewer tokens run."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from families import FALLS_BACK, MODELS
from helpers import byte_tokenizer, score, tiny_model

from nanoragen.learning.critic import Critic
from nanoragen.policy import loading, lora, support
from nanoragen.policy import prefix_cache as prefixes
from nanoragen.policy.batches import make_batch
from nanoragen.policy.scoring import micro_batch, micro_batches, token_logprobs
from nanoragen.rollout.episodes import Episode

KINDS = ["llama", "llama-eager", "qwen2", "gpt2", "phi", "mistral"]


def model_of(kind, dtype=torch.float64):
    """In float64 all through: transformers' own norm of these models goes by float32."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(dtype).eval()
    for m in model.modules():
        if "RMSNorm" in type(m).__name__:
            m.forward = partial(lambda m, x: m.weight * x * (x.square().mean(-1, keepdim=True) + m.variance_epsilon).rsqrt(), m)
    return model


def adapted(kind):
    """With adapters that do something."""
    pytest.importorskip("peft")
    model = model_of(kind)
    lora.adapt(model, 3, 12.0)
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model


def group_of(rows, prompt, seed, shortest=3, longest=24):
    """Episodes of one prompt: replies of several lengths, and some tokens between them that were not sampled."""
    g, found = torch.Generator().manual_seed(seed), []
    for _ in range(rows):
        rest = torch.randint(5, 50, (int(torch.randint(shortest, longest, (1,), generator=g)),), generator=g).tolist()
        mask = (torch.rand(len(rest), generator=g) < 0.7).int().tolist()
        found.append(Episode("game", 0, 0, prompt + rest, [0] * len(prompt) + [1] + mask[1:], []))
    return found


def prompt_of(instruction, observation, seed):
    draw = lambda n, seed: torch.randint(5, 50, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return draw(instruction, 1000) + draw(observation, seed)


CASES = {  # name: (episodes, P)
    "one group": (group_of(5, prompt_of(0, 16, 1), 1), 15),
    "groups of one instruction": ([e for s in (1, 2, 3) for e in group_of(4, prompt_of(12, 5, s), s)], 16),
    "one row a group": ([e for s in (1, 2, 3, 4) for e in group_of(1, prompt_of(12, 5, s), s, 8)], 12),
    "prompts of several lengths": ([e for s in (1, 2, 3) for e in group_of(4, prompt_of(8, 3 + 3 * s, s), s)], 13),
    "nothing in common": ([e for s in (1, 2) for e in group_of(3, prompt_of(0, 12, s), s)], 11),
}


def by_row(model, batch, temperature):
    """Each row alone, unpadded, through the model's own logits."""
    found = []
    for ids, real, mask in zip(batch.ids, batch.attention_mask.bool(), batch.mask):
        ids, mask = ids[real][None], mask[real][None]
        table = (model(input_ids=ids, use_cache=False).logits[:, :-1][mask[:, 1:]] / temperature).log_softmax(-1)
        found.append(torch.stack([table.gather(1, ids[:, 1:][mask[:, 1:]][:, None])[:, 0], -(table.exp() * table).sum(1)]))
    return torch.cat(found, 1)


def gradient(scores, model, rows=None):
    """Of a weighted sum, as one vector. scores [2, P]"""
    weight = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(scores.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad((weight * scores).sum(), trained)])


def close(found, want, tolerance):
    return (found - want).norm() <= tolerance * want.norm()


@pytest.fixture
def shared(monkeypatch):
    """P of each prefix that was asked for, 0 where the rows were run in full."""
    seen, length = [], prefixes.prefix_length

    def noting(*args):
        seen.append(length(*args))
        return seen[-1]

    monkeypatch.setattr(prefixes, "prefix_length", noting)
    return seen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_gradient_are_those_of_each_row_alone(kind, case, shared):
    model, (episodes, P) = model_of(kind), CASES[case]
    batch = make_batch(episodes, 0)
    exact = 1e-6 if kind == "llama-eager" else 1e-10  # its softmax goes by float32
    for m, tolerance in ((model, exact), (copy.deepcopy(model).float(), 1e-5)):
        found = torch.stack(score(m, batch, torch.arange(len(episodes)), 0.7))
        want = by_row(model, batch, 0.7)
        assert shared.pop() == P
        assert close(found, want, tolerance) and close(gradient(found, m), gradient(want, model), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_split_and_the_order_of_rows_change_nothing(dtype, tolerance, shared):
    model, episodes = model_of("llama", dtype), CASES["prompts of several lengths"][0]
    batch, want = make_batch(episodes, 0), None
    for order, size in ((torch.arange(12), 12), (torch.randperm(12), 12), (torch.randperm(12), 5), (torch.arange(12), 1)):
        table = torch.zeros(12, 2, batch.ids.shape[1], dtype=dtype)
        for rows in order.split(size):
            row, (b, t) = score(model, batch, rows, 1.0), batch.mask[rows].nonzero().unbind(1)
            for n in (0, 1):
                table = table.index_put((rows[b], torch.tensor(n), t), row[n].to(dtype))
        found = table, gradient(table.flatten(1), model)
        want = want or found
        assert all(close(f, w, tolerance) for f, w in zip(found, want))
    assert shared[0] == shared[1] == 13 and 0 < min(shared[2:5]) and set(shared[5:]) == {0}  # one row has nobody to share with


def test_the_critics_values_and_their_gradient(shared):
    model, (episodes, P) = model_of("qwen2"), CASES["groups of one instruction"]
    critic, batch = Critic(model, 1e-3, lambda n: 1.0), make_batch(episodes, 0)
    critic.head.double()
    torch.nn.init.normal_(critic.head.weight)
    value = lambda rows: critic.value(
        micro_batch(critic.trunk, batch, rows, prefixes.prefix_cache(critic.trunk, batch, rows, "float32", detach=False))
    )
    found, want = value(torch.arange(12)), torch.cat([value(torch.tensor([r])) for r in range(12)])
    assert shared == [P] + [0] * 12 and close(found, want, 1e-6)  # values are float32
    weight = torch.randn(len(found))
    grads = [torch.cat([g.flatten() for g in torch.autograd.grad((weight * x).sum(), critic.parameters)]) for x in (found, want)]
    assert close(*grads, 1e-6)


def test_adapters(shared):
    model, (episodes, P) = adapted("qwen2"), CASES["groups of one instruction"]
    batch = make_batch(episodes, 0)
    found, want = torch.stack(score(model, batch, torch.arange(12), 1.3)), by_row(model, batch, 1.3)
    assert shared == [P] and close(found, want, 1e-10) and close(gradient(found, model), gradient(want, model), 1e-10)


def test_each_beginning_is_run_once():
    model, (episodes, P) = tiny_model(byte_tokenizer()), CASES["groups of one instruction"]
    batch, rows = make_batch(episodes, 0), torch.arange(12)
    score(model, batch, rows, 1.0)  # asked whether it can, once
    seen = []
    model.base_model.layers[1].mlp.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    score(model, batch, rows, 1.0)
    assert seen == [(3, P), (12, batch.ids.shape[1] - P)]


def test_a_shared_prefix_is_as_long_as_pays():
    """8 rows of 4 prompts that begin with the same 12 of 20 tokens: (8 - 1) * 12 > (8 - 4) * 19; with 2 prompts (8 - 2) * 19 is more."""
    model, sampled = model_of("qwen2"), torch.zeros(8, 30, dtype=torch.bool)
    sampled[:, 20:] = True
    for prompts, P in ((4, 12), (2, 19)):
        ids = torch.tensor([prompt_of(12, 8, r % prompts) + [7] * 10 for r in range(8)])
        for order in (torch.arange(8), torch.randperm(8)):
            assert prefixes.prefix_length(model, ids[order], sampled.roll(-1, 1)) == P


def test_short_prefixes_are_not_shared():
    model, wanted = model_of("qwen2"), torch.zeros(4, 50, dtype=torch.bool)
    ids = torch.randint(5, 50, (4, 50))
    wanted[:, 20:] = True
    for P in range(1, 20):
        ids[:, :P] = ids[0, :P].clone()
        assert prefixes.prefix_length(model, ids, wanted) == (P if 3 * P >= prefixes.MIN_SAVED * 4 * 50 else 0)
    assert prefixes.prefix_length(model, ids, wanted | True) == prefixes.prefix_length(model, ids[:0], wanted[:0]) == 0


def test_layers_that_run_twice_do_not_share(shared):
    model, (episodes, P) = tiny_model(byte_tokenizer()), CASES["one group"]
    batch, rows = make_batch(episodes, 0), torch.arange(5)
    want = gradient(torch.stack(score(model, batch, rows, 1.0)), model)
    loading.checkpoint_activations(model)
    copied = copy.deepcopy(model)
    for m in (model, copied):
        assert close(gradient(torch.stack(score(m, batch, rows, 1.0)), m), want, 1e-5)
    assert shared == [P, 0, 0]


@pytest.mark.parametrize("kind", FALLS_BACK)
def test_other_models_share_or_are_run_in_full(kind, shared):
    """What the cross matrix cannot run may well be run here: no mask, no positions and no head of our own."""
    torch.manual_seed(0)
    model, (episodes, P) = FALLS_BACK[kind][0]().eval(), CASES["one group"]
    found = torch.stack(score(model, make_batch(episodes, 0), torch.arange(5), 1.0))
    assert shared == [0 if kind in ("mistral", "gpt-neo", "longrope") else P]
    if kind != "longrope":  # there a row's numbers depend on the longest beside it
        assert close(found, by_row(model, make_batch(episodes, 0), 1.0), 1e-5)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_to_lack_memory_is_not_to_differ(error):
    def fails():
        raise error

    with pytest.raises(type(error)):
        support.close_to(fails, lambda: torch.zeros(1))


@pytest.mark.parametrize("fault", ["positions start again", "the cache is left out", "an error"])
def test_a_model_that_gives_other_numbers_with_a_cache_is_run_in_full(fault, shared):
    model, (episodes, _) = model_of("qwen2"), CASES["groups of one instruction"]
    batch, asked = make_batch(episodes, 0), []

    def wrong(module, args, kwargs):
        name = support.cache_argument(module)
        if kwargs.get(name) and kwargs[name].get_seq_length():
            asked.append(1)
            if fault == "an error":
                raise TypeError("no cache")
            again = {"position_ids": torch.arange(kwargs["input_ids"].shape[1])[None]}
            kwargs |= again if fault == "positions start again" else {name: None}
        return args, kwargs

    model.base_model.register_forward_pre_hook(wrong, with_kwargs=True)
    for _ in range(2):
        found = torch.stack(score(model, batch, torch.arange(12), 1.0))
        assert close(found, by_row(model, batch, 1.0), 1e-10)
    assert shared == [0, 0] and len(asked) == 1


# -- prompts run once for all micro-batches of an update -----------------------------------------------------------------------------


def limits(rows, tokens, dtype="float32"):
    return SimpleNamespace(micro_batch=rows, micro_tokens=tokens, dtype=dtype)


def summed(model, batch, rows, c):
    """Scores of all rows and the gradient of their weighted sum, micro-batch by micro-batch, as an update takes it."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    weight = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    table, seen, shared = torch.zeros(2, *batch.ids.shape, dtype=dtype), [], 0
    for micro in micro_batches(model, batch, rows, c):
        with loading.autocast("cpu", c.dtype):
            logprob, entropy = token_logprobs(model, micro, 0.7)
        ((logprob + entropy) * micro.pick(weight)).sum().backward()
        micro.finish_prefix()
        for n, x in enumerate((logprob, entropy)):
            part = table[n][micro.rows]
            part[micro.mask] = x.detach().to(dtype)
            table[n][micro.rows] = part
        seen, shared = seen + micro.rows.tolist(), shared + (micro.prefix is not None)
    assert sorted(seen) == sorted(rows.tolist())
    return table, torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]), shared


def alone(model, batch, rows):
    """The same from each row by itself."""
    model.zero_grad()
    weight = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = torch.zeros(2, *batch.ids.shape, dtype=torch.float64)
    for row in rows.tolist():
        found = by_row(model, batch.select(torch.tensor([row])), 0.7)
        (found.sum(0) * weight[row][batch.mask[row]]).sum().backward()
        table[:, row, batch.mask[row]] = found.detach().double()
    return table, torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    "c", [limits(100, 0), limits(3, 0), limits(1, 0), limits(32, 50), limits(32, 1)], ids=lambda c: f"{vars(c)}"
)
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_the_sum_of_each_row_alone(case, c):
    model, (episodes, _) = model_of("llama"), CASES[case]
    batch, rows = make_batch(episodes, 0), torch.randperm(len(episodes))
    want = alone(model, batch, rows)
    for m, tolerance in ((model, 1e-10), (copy.deepcopy(model).float(), 1e-5)):
        *found, shared = summed(m, batch, rows, c)
        assert all(close(f, w, tolerance) for f, w in zip(found, want))
        assert shared or case == "one row a group" or c.micro_tokens == 1


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "llama-eager"])
def test_an_update_of_other_models(kind):
    model, batch, rows = model_of(kind), make_batch(CASES["groups of one instruction"][0], 0), torch.arange(3, 12)
    want, (*found, shared) = alone(model, batch, rows), summed(model, batch, rows, limits(2, 0))
    assert shared and all(close(f, w, 1e-10) for f, w in zip(found, want))


def test_an_update_of_adapters_whose_first_keys_have_no_gradient():
    model, batch = adapted("qwen2"), make_batch(CASES["groups of one instruction"][0], 0)
    for name, p in model.named_parameters():
        if "layers.0" in name and (".k_proj" in name or ".v_proj" in name):
            p.requires_grad_(False)
    want, (*found, shared) = alone(model, batch, torch.arange(12)), summed(model, batch, torch.arange(12), limits(5, 0))
    assert shared and all(close(f, w, 1e-10) for f, w in zip(found, want))


def test_under_autocast_an_update_is_near_the_one_in_full():
    model, batch = model_of("llama", torch.float32), make_batch(CASES["one group"][0], 0)
    want, (*found, shared) = alone(model, batch, torch.arange(5)), summed(model, batch, torch.arange(5), limits(2, 0, "bfloat16"))
    assert shared and close(found[0], want[0], 0.05) and close(found[1], want[1], 0.15)


def test_each_prompt_is_run_once_an_update_and_no_pass_is_larger_than_allowed():
    model, (episodes, _) = tiny_model(byte_tokenizer()), CASES["groups of one instruction"]
    batch, rows = make_batch(episodes, 0), torch.randperm(12)
    summed(model, batch, rows, limits(4, 0))  # asked whether it can, once
    seen = []
    model.base_model.layers[1].mlp.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    summed(model, batch, rows, limits(4, 0))
    assert seen[0] == (3, 16) and [b for b, _ in seen[1:]] == [4, 4, 4] and max(T for _, T in seen[1:]) < batch.ids.shape[1] - 15
    seen.clear()
    summed(model, batch, rows, limits(2, 40))  # two prompts of 16 fit, not three
    assert seen[0] == (2, 16) and (1, 16) in seen and all(b <= 2 and b * T <= 40 for b, T in seen)


def test_without_gradient_nothing_is_kept_and_where_it_cannot_be_shared_nothing_is():
    model, (episodes, _) = model_of("qwen2"), CASES["one group"]
    batch, rows = make_batch(episodes, 0), torch.arange(5)
    with torch.no_grad():
        for micro in micro_batches(model, batch, rows, limits(2, 0)):
            keys = micro.inputs[support.cache_argument(model)].layers[0].keys
            assert not keys.requires_grad and keys.shape[0] == len(micro.rows)
    loading.checkpoint_activations(model)
    assert [micro.prefix for micro in micro_batches(model, batch, rows, limits(2, 0))] == [None] * 3
    assert list(micro_batches(model, batch, rows[:0], limits(2, 0))) == []
