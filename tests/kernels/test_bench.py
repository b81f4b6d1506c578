"""The bench measures and reports; what it finds is no matter for a test."""

import csv
from pathlib import Path

import pytest
import torch

from nanoragen.kernels import bench


def tiny_cases(device, quick):
    x = torch.ones(1000)
    yield bench.Case("double", (1000,), {
        "ours": bench.forward(lambda t: t * 2, x), "broken": lambda: 1 / 0, "<torch>": bench.forward(torch.add, x, x)
    }, bytes=8000, error=1e-7)  # fmt: skip
    yield bench.Case("product", (10, 10, 10), {"ours": bench.backward(lambda t: t.square().sum(), x, whole=True)}, flops=2000)


def test_every_implementation_that_works_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "cases", tiny_cases)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench.main(["--quick", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "double: without broken (ZeroDivisionError)" in said
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [(r["kernel"], r["implementation"], r["unit"]) for r in rows] == [
        ("double", "ours", "GB/s"), ("double", "<torch>", "GB/s"), ("product", "ours", "TFLOP/s")
    ]  # fmt: skip
    for r in rows:
        assert 0 < float(r["p20_ms"]) <= float(r["p50_ms"]) <= float(r["p80_ms"])
        work = 8000 / 1e9 if r["unit"] == "GB/s" else 2000 / 1e12
        assert float(r["rate"]) == pytest.approx(work / (float(r["p50_ms"]) / 1e3))
    assert len((tmp_path / "bench.md").read_text().splitlines()) == 4 + len(rows)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_timed_is_the_gradient(whole):
    logits, targets = torch.randn(3, 7), torch.tensor([0, 1, 6])
    grad = bench.backward(bench.plain, logits, targets, whole=whole)()()
    leaf = logits.clone().requires_grad_()
    sum(t.sum() for t in bench.plain(leaf, targets)).backward()
    assert torch.equal(grad, leaf.grad)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux's high-water mark")
def test_extra_memory_sees_the_worst_moment():
    def call():
        held = torch.ones(64 * 2**18)  # 64 MiB that are given back
        return held.sum()

    assert 60 * 2**20 < bench.extra_memory(lambda: call, "cpu") < 200 * 2**20
    assert bench.extra_memory(lambda: lambda: None, "cpu") < 8 * 2**20
