"""What only a compiler knows, without a GPU: every kernel compiles for four targets, spills nothing, and loads wide."""

import re

import pytest

from nanoragen.kernels import linear
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
    wide = [r["load_bits"] for r in table if r["kernel"].startswith("logprob") and r["target"].startswith("sm_")]
    assert wide and set(wide) == {128}


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
