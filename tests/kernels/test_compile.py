"""What only a compiler knows, without a GPU: every kernel compiles for four targets, spills nothing, and loads wide; and how
often it would be asked to compile, whatever lengths come."""

import pytest
import torch
from backends import Recorder

from nanoragen.kernels import advantage, cross, linear, logprob, policy
from nanoragen.kernels.compiled import TARGETS, compile_table
from nanoragen.kernels.dispatch import interpreted, triton

pytestmark = pytest.mark.skipif(triton is None or interpreted(), reason="needs Triton's compiler")


@pytest.fixture(scope="module")
def table():
    return compile_table()


def test_every_variant_compiles_for_every_target(table):
    assert {r["target"] for r in table} == set(TARGETS) and len(table) == len(TARGETS) * len({r["kernel"] for r in table}) >= 120


def test_nothing_spills(table):
    assert [r for r in table if r["spills"] != 0] == []  # None: the assembler said nothing


def test_registers_leave_room_for_two_programs_of_8_warps_on_a_multiprocessor(table):
    """65,536 registers: 128 for each of 2 x 256 threads. The products keep a tile of sums, so one program fits."""
    for r in table:
        product = r["kernel"].startswith("linear, ") and r["matrix"]
        alone = r["kernel"].startswith("advantage") or product  # the first: one program in all
        bound = 255 if alone else 128
        assert r["registers"] <= bound, r


def test_full_tiles_load_128_bits(table):
    """For any vocabulary: its size is no constant, so divisible by nothing. Rows off 16 bytes cannot, and say so."""
    kernels = ("logprob", "policy", "linear, tokens", "linear, d")
    rows = [r for r in table if r["kernel"].startswith(kernels) and "rows off" not in r["kernel"] and "odd D" not in r["kernel"]]
    assert all(r["load_bits"] <= 32 for r in table if "rows off" in r["kernel"])
    assert len(rows) > 60 and {r["load_bits"] for r in rows} == {128}


def test_16_bit_products_run_on_tensor_cores(table):
    rows = [r for r in table if r["kernel"].startswith(("linear, tokens", "linear, d")) and "fp32" not in r["kernel"]]
    assert len(rows) == 10 * len(TARGETS) and all(r["matrix"] for r in rows)


@pytest.fixture
def versions(monkeypatch):
    """{kernel: versions asked for so far}; every call goes to the kernels, as on a GPU."""
    found = {}
    for module, names in (
        (logprob, ["_logprob_entropy_fwd_kernel", "_logprob_entropy_bwd_kernel"]), (policy, ["_policy_loss_fwd_kernel"]),
        (linear, ["_partial_softmax_kernel", "_combine_kernel", "_grad_logits_kernel"]),
        (cross, ["_segment_sum_kernel", "_row_statistics_kernel"]), (advantage, ["_group_advantages_kernel"]),
    ):  # fmt: skip
        monkeypatch.setattr(module, "use_triton", lambda backend, tensor: True)
        for name in names:
            recorder = Recorder(getattr(module, name))
            monkeypatch.setattr(module, name, recorder)
            found[name] = recorder.versions
    return found


def calls(lengths, device="cpu"):
    """Every kernel, on batches of these lengths, vocabularies of several sizes, and arrays that start anywhere."""
    for n in lengths:
        targets, ones = torch.zeros(n + 1, dtype=torch.long, device=device)[1:], torch.ones(n + n % 3, device=device)[n % 3 :]
        for V in (8192, 16_384 + 8, 20_000):
            logits = torch.zeros(n, V, dtype=torch.bfloat16, device=device, requires_grad=True)
            logprob_, entropy = logprob.logprob_entropy(logits, targets, temperature=0.5 + n, ignore_index=-n)
            (logprob_ + entropy).sum().backward()
            policy.policy_loss(logits, targets, ones, ones, ones, clip_low=0.1 / n, entropy_coef=0.5 / n)[0].backward()
        hidden, head = torch.zeros(n, 64, device=device), torch.zeros(96, 64, device=device)
        logprob_, entropy = linear.linear_logprob_entropy(
            hidden.requires_grad_(), head, targets, temperature=0.5 + n, ignore_index=-n
        )
        (logprob_ + entropy).sum().backward()
        cross.cross_logprob_matrix(hidden, head, targets.clone(), torch.tensor([0, n], device=device))
        cross.cross_statistics(torch.zeros(n, n, device=device), targets.clone())
        advantage.group_advantages(ones, targets, filter="top_k", num_groups=n)


def test_a_new_length_compiles_nothing(versions):
    calls([1, 2, 15, 16, 17, 64])
    expected = {**dict.fromkeys(versions, 1), "_partial_softmax_kernel": 2}  # the cross matrix does without the entropy
    assert {kernel: len(found) for kernel, found in versions.items()} == expected


def test_a_new_number_of_tokens_compiles_nothing(monkeypatch):
    """What Triton would compile for each launch, by its own rules; nothing is run."""
    names = "_partial_softmax_kernel", "_combine_kernel", "_grad_logits_kernel"
    recorders = {name: Recorder(getattr(linear, name)) for name in names}
    for name, recorder in recorders.items():
        monkeypatch.setattr(linear, name, recorder)
    monkeypatch.setattr(linear, "use_triton", lambda backend, tensor: True)
    weight, bias = torch.zeros(1100, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1100, requires_grad=True)
    for P in (1, 2, 15, 16, 17, 129, 300):
        hidden = torch.zeros(P, 64, dtype=torch.bfloat16)
        values = linear.linear_logprob_entropy(
            hidden, weight, torch.zeros(P, dtype=torch.long), bias=bias, temperature=1 + P, workspace=90_000 * P
        )
        sum(v.sum() for v in values).backward()
    assert {name: len(recorder.versions) for name, recorder in recorders.items()} == dict.fromkeys(recorders, 1)


@pytest.mark.gpu
def test_a_new_length_compiles_nothing_on_a_gpu():
    def count():
        kernels = (
            logprob._logprob_entropy_fwd_kernel, logprob._logprob_entropy_bwd_kernel, policy._policy_loss_fwd_kernel,
            linear._partial_softmax_kernel, linear._combine_kernel, linear._grad_logits_kernel, cross._segment_sum_kernel,
            cross._row_statistics_kernel, advantage._group_advantages_kernel,
        )  # fmt: skip
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    calls([1, 16], "cuda")
    before = count()
    calls([2, 15, 17, 64], "cuda")
    assert count() == before and min(before) >= 1
