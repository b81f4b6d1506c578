"""What only a compiler knows, without a GPU: every kernel compiles for four targets, spills nothing, and loads wide."""

import pytest

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
