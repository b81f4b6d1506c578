"""What only a compiler knows, without a GPU: every kernel compiles for four targets, spills nothing, and loads wide; and how
often it would be asked to compile, whatever lengths come."""

import re

import pytest
import torch

from backends import Recorder

from nanoragen.kernels import advantage, cross, linear, logprob, policy
from nanoragen.kernels.bench import TARGETS, compile_table
from nanoragen.kernels.dispatch import interpreted, triton

pytestmark = pytest.mark.skipif(triton is None or interpreted(), reason="needs Triton's compiler")


@pytest.fixture(scope="module")
def table():
    return compile_table()


def test_every_kernel_compiles_for_every_target(table):
    assert {(r["kernel"], r["target"]) for r in table} >= {(k, t) for k in {r["kernel"] for r in table} for t in TARGETS}


def test_nothing_spills(table):
    assert [r for r in table if r["spills"] not in (0, None)] == []


def test_full_tiles_load_128_bits(table):
    wide = [r["load_bits"] for r in table if r["kernel"].startswith(("logprob", "policy")) and r["target"].startswith("sm_")]
    assert wide and set(wide) == {128}


@pytest.fixture
def versions(monkeypatch):
    """{kernel: versions asked for so far}; every call goes to the kernels, as on a GPU."""
    found = {}
    for module, names in (
        (logprob, ["_forward", "_backward"]), (policy, ["_forward"]), (advantage, ["_group_advantages"]),
        (linear, ["_walk", "_merge_spans", "_d_logits"]), (cross, ["_segment_sum", "_row_statistics"]),
    ):  # fmt: skip
        monkeypatch.setattr(module, "use_triton", lambda backend, tensor: True)
        for name in names:
            recorder = Recorder(getattr(module, name))
            monkeypatch.setattr(module, name, recorder)
            found[f"{module.__name__.rpartition('.')[2]}{name}"] = recorder.versions
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
        logprob_, entropy = linear.linear_logprob_entropy(hidden.requires_grad_(), head, targets, temperature=0.5 + n, ignore_index=-n)
        (logprob_ + entropy).sum().backward()
        cross.cross_logprob_matrix(hidden, head, targets.clone(), torch.tensor([0, n], device=device))
        cross.cross_statistics(torch.zeros(n, n, device=device), targets.clone())
        advantage.group_advantages(ones, targets, filter="top_k", num_groups=n)


def test_a_new_length_compiles_nothing(versions):
    calls([1, 2, 15, 16, 17, 64])
    expected = {**dict.fromkeys(versions, 1), "linear_walk": 2}  # the cross matrix does without the entropy
    assert {kernel: len(found) for kernel, found in versions.items()} == expected


@pytest.mark.gpu
def test_a_new_length_compiles_nothing_on_a_gpu():
    def count():
        kernels = (
            logprob._forward, logprob._backward, policy._forward, linear._walk, linear._merge_spans, linear._d_logits,
            cross._segment_sum, cross._row_statistics, advantage._group_advantages,
        )  # fmt: skip
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    calls([1, 16], "cuda")
    before = count()
    calls([2, 15, 17, 64], "cuda")
    assert count() == before and min(before) >= 1


@pytest.mark.parametrize("name", ["_walk", "_d_logits"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_fused_head_is_copied_128_bits_at_a_time_into_tensor_cores(name, capability):
    """For any number of tokens and a vocabulary of any size: neither is known to be divisible by anything."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = getattr(linear, name)
    kinds = {"HIDDEN": "*bf16", "WEIGHT": "*bf16", "BIAS_PTR": "*bf16", "OUT": "*bf16", "Y": "*i64", "scale2": "fp32"}
    kinds |= {n: "*fp32" for n in ("PARTS", "ENTROPY", "TOP", "LOG2_S", "G", "H")}
    kinds |= {n: "i64" for n in ("h_stride", "w_stride")} | {n: "i32" for n in ("P", "V", "D", "stride", "first")}
    constants = {
        "BIAS": True,
        "EVEN": True,
        **({"ENTROPY": True, "SPAN": linear.SPAN} if name == "_walk" else {}),
        **linear.BLOCKS16,
    }
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
    wide = [names.index(n) for n in ("HIDDEN", "WEIGHT", "D", "h_stride", "w_stride")]
    source = ASTSource(kernel, signature, constexprs=constants, attrs={(n,): [["tt.divisibility", 16]] for n in wide})
    ptx = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+)", ptx)
    assert copies and {int(size, 16) for size in copies} == {16}  # bytes
    assert re.search(r"mma\.sync|wgmma\.mma_async", ptx)
