"""Measure the kernels: `python -m nanoragen.kernels.bench`, and what the compiler makes of them: `--compile` (needs no GPU).

Each case declares the bytes it must move; its figure is those bytes over its time, and as a share of the copy bandwidth of
this machine, measured in the same process. Ours and plain torch are timed in turns, so that a machine that slows down slows
both. The error is against float64 of the same rounded input. On CUDA the Triton kernels run, on a CPU their torch twins,
at smaller shapes. Logits are peaked like a language model's, not plain noise.
"""

import argparse
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from nanoragen.kernels.advantage import group_advantages
from nanoragen.kernels.cross import cross_logprob_matrix
from nanoragen.kernels.logprob import logprob_entropy

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


# -- time --------------------------------------------------------------------------------------------------------------


def seconds(calls, device, runs):
    """Times of several functions, called in turns: a list of p20, p50, p80 for each."""
    times = [[] for _ in calls]
    flush = torch.empty(2**26, device=device) if device == "cuda" else None  # 256 MB: more than any cache
    for run in range(runs + 2):
        for call, found in zip(calls, times):
            if flush is not None:
                flush.zero_()
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if run >= 2:  # the first two warm up and compile
                found.append(time.perf_counter() - start)
    return [[statistics.quantiles(t, n=10)[i] for i in (1, 4, 7)] for t in times]


def peaked_logits(T, V, device, dtype):
    """A few likely tokens over a long tail, as a trained model has."""
    logits = torch.randn(T, V, device=device) * 2
    logits[torch.arange(T, device=device), torch.randint(V, (T,), device=device)] += 14
    return logits.to(dtype)


def plain(logits, targets):
    logprob = torch.log_softmax(logits.float(), -1)
    return logprob.gather(-1, targets[:, None])[:, 0], -(logprob.exp() * logprob).sum(-1)


def bench(quick: bool):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    runs = 5 if quick else 20
    size = 2**24 if quick else 2**27
    a, b = torch.randn(size, device=device), torch.empty(size, device=device)
    ((_, copy, _),) = seconds([lambda: b.copy_(a)], device, runs)
    bandwidth = 2 * 4 * size / copy
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, copy {bandwidth / 1e9:.0f} GB/s\n")
    print(
        "| kernel | shape | p20 / p50 / p80 ms | GB/s | of copy | against plain torch | largest error |\n|---|---|---|---|---|---|---|"
    )
    shapes = [(8192, 151_936), (16384, 49_152), (4096, 262_144)] if device == "cuda" else [(256, 49_152), (128, 151_936)]
    for T, V in shapes[:1] if quick else shapes:
        logits, targets = peaked_logits(T, V, device, dtype), torch.randint(V, (T,), device=device)
        few = slice(0, 64)
        exact = plain(logits[few].double(), targets[few]) if device == "cpu" else _double(logits[few], targets[few])
        ours = logprob_entropy(logits[few], targets[few])
        error = max((o.double() - e.double()).abs().max().item() for o, e in zip(ours, exact))
        size = logits.numel() * logits.element_size()
        row("logprob_entropy forward", (T, V), size, error, bandwidth,
            seconds([lambda: logprob_entropy(logits, targets), lambda: plain(logits, targets)], device, runs))  # fmt: skip
        leaf = logits.requires_grad_()
        graphs = [f(leaf, targets) for f in (logprob_entropy, plain)]
        back = [lambda g=g: torch.autograd.grad(g[0].sum() + g[1].sum(), leaf, retain_graph=True) for g in graphs]
        row("logprob_entropy backward", (T, V), 2 * size, None, bandwidth, seconds(back, device, runs))
    P, D, V = (4096, 896, 151_936) if device == "cuda" else (256, 128, 4096)
    hidden, weight = (
        torch.randn(P, D, device=device, dtype=dtype),
        torch.randn(V, D, device=device, dtype=dtype) / D**0.5,
    )
    targets, cu = torch.randint(V, (P,), device=device), torch.arange(0, P + 1, 64, device=device)

    def plain_cross():
        logprob = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
        return logprob.view(-1, 64).sum(1)

    size = (hidden.numel() + weight.numel()) * weight.element_size()
    row("cross_logprob_matrix", (P, D, V), size, None, bandwidth,
        seconds([lambda: cross_logprob_matrix(hidden, weight, targets, cu), plain_cross], device, runs))  # fmt: skip
    rewards, ids = torch.randn(1024, device=device), torch.arange(1024, device=device) % 64

    def loop():
        return [(r - r.mean()) / (r.std() + 1e-6) for r in (rewards[ids == g] for g in range(64))]

    row("group_advantages", (1024, 64), 1024 * 16, None, bandwidth,
        seconds([lambda: group_advantages(rewards, ids, filter="top_p", filter_value=0.9, num_groups=64), loop], device, runs))  # fmt: skip


def _double(logits, targets):
    logprob = torch.log_softmax(logits.double(), -1)
    return logprob.gather(-1, targets[:, None])[:, 0], -(logprob.exp() * logprob).sum(-1)


def row(kernel, shape, size, error, bandwidth, times):
    (p20, p50, p80), (_, other, _) = times
    print(f"| {kernel} | {' x '.join(map(str, shape))} | {p20 * 1e3:.3f} / {p50 * 1e3:.3f} / {p80 * 1e3:.3f} | {size / p50 / 1e9:.0f} "
          f"| {size / p50 / bandwidth:.0%} | {other / p50:.2f}x faster | {'' if error is None else f'{error:.1e}'} |")  # fmt: skip


# -- compiler ----------------------------------------------------------------------------------------------------------


def compile_table() -> list[dict]:
    """Every kernel compiled ahead of time for every target: registers, spills, widest global load. None = not said."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from nanoragen.kernels import advantage, cross, linear, logprob

    i, l, f, p = "i32", "i64", "fp32", "*fp32"
    row = {"ALIGNED": True, "TILE": 4096}
    chosen = dict(VALUE=0.9, SELECTION_EPS=0.0, EPS=1e-6, SCALE=True, DDOF=1, RULE="top_p", SOFTMAX=False, VARIANCE=False,
                  ZERO=False, BLOCK_G=advantage.BLOCK_G, BLOCK_B=advantage.BLOCK_B)  # fmt: skip
    cases = [  # name, kernel, argument types, constants, arguments divisible by 16, warps
        ("logprob forward", logprob._forward, ["*bf16", "*i64", p, p, p, p, i, l, l, i, i, f], row, (0, 1), 8),
        ("logprob backward", logprob._backward, ["*bf16", "*i64", p, p, p, p, p, "*bf16", i, l, l, i, i, f, f],
         {"ALIGNED": True, "ALIGNED_OUT": True, "TILE": 4096}, (0, 1, 7), 8),
        *((f"linear, tokens{of}", linear._walk, ["*bf16", "*bf16", "*bf16", "*i64", p, i, i, i, l, l, f],
           {"BIAS": bias, "ENTROPY": entropy, "SPAN": linear.SPAN, "EVEN": True, **linear.BLOCKS16}, (0, 1, 2, 4, 7, 8, 9), 8)
          for of, bias, entropy in (("", False, True), (" and bias", True, True), (" (cross)", False, False))),
        ("linear, spans", linear._merge_spans, [p, "*i64", p, p, p, p, i, i, i, f], {"BLOCK": 128}, (0,), 4),
        ("linear, d logits", linear._d_logits,
         ["*bf16", "*bf16", "*bf16", "*i64", p, p, p, p, p, "*bf16", i, i, i, l, l, i, i, f],
         {"BIAS": False, "EVEN": True, **linear.BLOCKS16}, (0, 1, 2, 9, 12, 13, 14, 15), 8),
        ("cross, segments", cross._segment_sum, [p, "*i32", p], {"BLOCK": 128}, (0, 1, 2), 1),
        ("advantage", advantage._group_advantages, [p, "*i64", p, "*i1", p, p, p, "*fp64", i, i, i], chosen, (0, 1, 2, 7), 8),
    ]  # fmt: skip
    rows = []
    for name, kernel, types, constants, aligned, warps in cases:
        signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants)))
        source = ASTSource(kernel, signature, constexprs=constants, attrs={(n,): [["tt.divisibility", 16]] for n in aligned})
        for target in TARGETS:
            where = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
            built = compile(source, target=where, options={"num_warps": warps})
            rows.append({"kernel": name, "target": target, **(_nvidia(built) if "ptx" in built.asm else _amd(built))})
    return rows


def _nvidia(built) -> dict:
    import triton

    widest = max(
        (int(v or 1) * int(b) for v, b in re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", built.asm["ptx"])),
        default=0,
    )
    arch = re.search(r"\.target (\w+)", built.asm["ptx"])[1]
    found = {"registers": None, "spills": None, "load_bits": widest}
    for ptxas in sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"), reverse=True):
        with tempfile.TemporaryDirectory() as folder:  # the newer assembler first: the older may not know the PTX version
            source = Path(folder) / "kernel.ptx"
            source.write_text(built.asm["ptx"])
            done = subprocess.run(
                [ptxas, "-v", f"-arch={arch}", source, "-o", Path(folder) / "out"], capture_output=True, text=True
            )
        said = done.stdout + done.stderr
        if done.returncode == 0:
            found["registers"] = int(re.search(r"Used (\d+) registers", said)[1])
            found["spills"] = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
            break
    return found


def _amd(built) -> dict:
    text = built.asm["amdgcn"]
    widths = [32 * int(n or 1) for n in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", text)]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
        "spills": int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1]),
        "load_bits": max(widths, default=0),
    }


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanoragen.kernels.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--compile", action="store_true", help="the compiler's table instead of times")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and runs")
    args = parser.parse_args(argv)
    if not args.compile:
        return bench(args.quick)
    print("| kernel | target | registers | spilled bytes | widest load, bits |\n|---|---|---|---|---|")
    for r in compile_table():
        print(f"| {r['kernel']} | {r['target']} | {r['registers']} | {r['spills']} | {r['load_bits']} |")


if __name__ == "__main__":
    main()
