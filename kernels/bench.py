"""Measure the kernels: `python -m nanoragen.kernels.bench`, and what the compiler makes of them: `--compile` (needs no GPU).

    python -m nanoragen.kernels.bench --out results         # also results/bench.csv and bench.md
    python -m nanoragen.kernels.bench --quick               # one shape of each kernel, few runs

A case declares the bytes a kernel must move, or the floating-point operations it must do. Its figure is that over its time,
and as a share of what this machine reaches in a plain copy, or a plain matrix product, measured first. The implementations of
a case (ours, plain torch, torch.compile, other libraries that are installed) are timed in turns, so that a machine that slows
down slows all of them. Errors are against float64 of the same rounded input. On CUDA the Triton kernels run, on a CPU the
reference implementations at smaller shapes. Logits are peaked like a language model's, not plain noise.
"""

import argparse
import csv
import datetime
import functools
import importlib
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoragen.kernels import compiled
from nanoragen.kernels.advantage import group_advantages
from nanoragen.kernels.cross import cross_logprob_matrix, cross_statistics
from nanoragen.kernels.linear import linear_logprob_entropy
from nanoragen.kernels.logprob import logprob_entropy
from nanoragen.kernels.policy import policy_loss

# -- one measurement ---------------------------------------------------------------------------------------------------


@dataclass
class Case:
    kernel: str
    shape: tuple[int, ...]
    impls: dict[str, Callable]  # name -> function that prepares, untimed, and returns the call that is timed; "ours" first
    bytes: int = 0  # that must be moved, at least
    flops: int = 0  # instead, where these take the time
    error: float | None = None  # largest difference of ours from float64


def measure(impls, device, runs) -> dict[str, list[float]]:
    """Seconds of several implementations, timed in turns: {name: [p20, p50, p80]}."""
    times = {name: [] for name in impls}
    flush = torch.empty(2**28, device=device) if device == "cuda" else None  # 1 GiB: more than any cache
    for run in range(runs + 2):
        for name, prepare in impls.items():
            call = prepare()
            if flush is None:
                start = time.perf_counter()
                call()
                took = time.perf_counter() - start
            else:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()  # empties the cache, and keeps the device busy until the call is in its queue
                begin.record()
                call()
                end.record()
                end.synchronize()
                took = begin.elapsed_time(end) / 1e3
            if run >= 2:  # the first two warm up
                times[name].append(took)
    return {name: [statistics.quantiles(found, n=10)[i] for i in (1, 4, 7)] for name, found in times.items()}


def extra_memory(prepare, device) -> int | None:
    """Peak bytes during a call beyond those held before it, its results included. None where the system does not tell."""
    call = prepare()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    marks = Path("/proc/self/clear_refs")
    if not os.access(marks, os.W_OK):
        return None

    def resident(key):
        return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    marks.write_text("5")  # Linux: sets the high-water mark VmHWM back to now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def run(case: Case, device, runs, rates) -> list[dict]:
    """A row of results for each implementation. One that fails (not enough memory, no compiler) is left out, with a line."""
    torch.compiler.reset()
    if device == "cpu" and (case.flops > 1e11 or case.bytes > 1e9):  # seconds a call
        runs = 3
    impls = dict(case.impls)
    for name in [name for name in impls if name != "ours"]:
        try:
            impls[name]()()
        except Exception as e:  # other people's code, and torch.compile's: whatever is wrong, the others are measured
            print(f"  {case.kernel}: without {name} ({type(e).__name__})")
            del impls[name]
    work, unit = (case.flops, "TFLOP/s") if case.flops else (case.bytes, "GB/s")
    rows = []
    for name, (p20, p50, p80) in measure(impls, device, runs).items():
        rows.append({
            "kernel": case.kernel, "shape": " x ".join(map(str, case.shape)), "implementation": name, "bytes": case.bytes,
            "flops": case.flops, "p20_ms": p20 * 1e3, "p50_ms": p50 * 1e3, "p80_ms": p80 * 1e3,
            "rate": work / p50 / (1e12 if case.flops else 1e9), "unit": unit, "of_machine": work / p50 / rates[unit],
            "extra_bytes": extra_memory(impls[name], device), "error": case.error if name == "ours" else None,
        })  # fmt: skip
    return rows


# -- what is compared --------------------------------------------------------------------------------------------------


def plain(logits, targets):
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def step_loss(*args):
    return policy_loss(*args, entropy_coef=0.01, inplace=True)[0]


def plain_policy(logits, targets, old, advantages, weights):
    logprob, entropy = plain(logits, targets)
    ratio = (logprob - old).exp()
    return -(weights * (torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)) + 0.01 * entropy)).sum()


def plain_linear(hidden, weight, targets):
    return plain(hidden @ weight.T, targets)


def plain_cross(hidden, weight, targets, cu):
    return plain(hidden @ weight.T, targets)[0].view(len(cu) - 1, -1).sum(1)  # segments of one length


def plain_statistics(sums, own):
    log_w = (torch.bincount(own, minlength=sums.shape[1]) / len(own)).log()
    matched = sums.gather(1, own[:, None])
    return matched[:, 0], (sums + log_w).logsumexp(1), (sums > matched).sum(1), (sums == matched).sum(1)


def plain_advantages(rewards, ids):
    return [(r - r.mean()) / (r.std() + 1e-6) for r in (rewards[ids == g] for g in range(int(ids.max()) + 1))]


PEERS = {  # how to call others on (logits, targets); Liger and flash-attn have no entropy, so they do less
    "TRL": ("trl.kernels.logprob_entropy", lambda m: m.selective_log_softmax_and_entropy),
    "Liger": ("liger_kernel.transformers.functional", lambda m: lambda x, y: (-m.liger_cross_entropy(x, y, reduction="none"),)),
    "flash-attn": ("flash_attn.ops.triton.cross_entropy", lambda m: lambda x, y: (-m.cross_entropy_loss(x, y)[0],)),
}


def peers(device) -> dict[str, Callable]:
    found = {}
    for name, (module, call) in PEERS.items():
        try:
            found[name] = call(importlib.import_module(module))
        except ImportError:
            print(f"{name} is not installed: left out")
    return found if device == "cuda" else {}


def forward(f, *args):
    def call():
        with torch.no_grad():
            return f(*args)

    return lambda: call


def backward(f, logits, *args, whole=False):
    """The backward pass of the sum of f's results, or (whole) both passes. The logits are computed anew each time, as by a model:
    an implementation may write over them, as ours with inplace=True does and Liger's always does."""
    one = torch.ones((), dtype=logits.dtype, device=logits.device, requires_grad=True)

    def prepare():
        fresh = logits * one

        def loss():
            out = f(fresh, *args)
            return sum(t.sum() for t in out) if isinstance(out, tuple) else out

        ready = None if whole else loss()
        inputs = [fresh, *(a for a in args if a.requires_grad)]
        return lambda: torch.autograd.grad(loss() if whole else ready, inputs)[0]

    return prepare


def each(prepare, functions, *args, **options) -> dict[str, Callable]:
    """The same call, `forward` or `backward`, of several functions by name."""
    return {name: prepare(f, *args, **options) for name, f in functions.items()}


# -- the cases ---------------------------------------------------------------------------------------------------------


def peaked_logits(T, V, device, dtype):
    """A few likely tokens over a long tail, as a trained model has."""
    logits = torch.randn(T, V, device=device) * 2
    logits[torch.arange(T, device=device), torch.randint(V, (T,), device=device)] += 14
    return logits.to(dtype)


def difference(ours, exact) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, exact))


def cases(device, quick):
    """All of them, one at a time: each is measured before the next one's tensors are made."""
    torch.manual_seed(0)
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    inplace = functools.partial(logprob_entropy, inplace=True)
    others = {"torch": plain, "torch.compile": torch.compile(plain)} | peers(device)
    steps = {"ours": step_loss, "torch": plain_policy, "torch.compile": torch.compile(plain_policy)}
    shapes = [(8192, 151_936), (65_536, 49_152), (1024, 262_144), (8192, 50_257)]  # the last: rows off 16 bytes
    for T, V in (shapes if cuda else [(256, 49_152), (2048, 151_936), (64, 262_144)])[: 1 if quick else None]:
        logits, targets = peaked_logits(T, V, device, dtype), torch.randint(V, (T,), device=device)
        size, x, y = logits.numel() * logits.element_size(), logits[:32], targets[:32]
        error = difference(logprob_entropy(x, y), plain(x.double(), y))
        impls = each(forward, {"ours": logprob_entropy, **others}, logits, targets)
        yield Case("logprob_entropy forward", (T, V), impls, size, error=error)

        error = difference([backward(logprob_entropy, x, y)()()], [backward(plain, x.double(), y)()()])
        impls = each(backward, {"ours": logprob_entropy, "ours, in place": inplace, **others}, logits, targets)
        yield Case("logprob_entropy backward", (T, V), impls, 2 * size, error=error)
        impls = each(backward, {"ours": inplace, **others}, logits, targets, whole=True)
        yield Case("logprob_entropy both passes", (T, V), impls, 3 * size, error=error)

        masked = torch.where(torch.arange(T, device=device) % 4 == 0, targets, -100)
        live = {"live rows alone": forward(logprob_entropy, logits[::4], targets[::4])}  # against these: what ignored rows cost
        impls = {"ours": forward(logprob_entropy, logits, masked), **live}
        yield Case("logprob_entropy forward, 3 of 4 rows ignored", (T, V), impls, size // 4)

        old = plain(logits[:1024], targets[:1024])[0].mean() + 0.3 * torch.randn(T, device=device)
        args = targets, old, torch.randn(T, device=device), torch.full((T,), 1 / T, device=device)
        slopes = [backward(f, z, *(a[:32] for a in args))()() for f, z in ((step_loss, x), (plain_policy, x.double()))]
        impls = each(backward, steps, logits, *args, whole=True)
        yield Case("policy_loss both passes", (T, V), impls, 3 * size, error=difference(slopes[:1], slopes[1:]))
        del logits, x, slopes, impls, live

    shapes = [(4096, 896, 151_936), (4096, 2048, 151_936), (4096, 4096, 151_936)]
    for P, D, V in (shapes if cuda else [(256, 896, 16_384), (256, 128, 49_152), (2048, 896, 151_936)])[: 1 if quick else None]:
        hidden, weight = (torch.randn(n, D, device=device, dtype=dtype) / D**0.25 for n in (P, V))
        targets, cu = torch.randint(V, (P,), device=device), torch.arange(0, P + 1, 64, device=device)
        product = {"the product alone": forward(lambda h, w: h @ w.T, hidden, weight)}
        few, exact = (hidden[:128], weight, targets[:128]), (hidden[:128].double(), weight.double(), targets[:128])
        impls = each(forward, {"ours": linear_logprob_entropy, "torch": plain_linear}, hidden, weight, targets) | product
        if cuda:  # what training runs
            impls["ours, float32 head"] = forward(linear_logprob_entropy, hidden, weight.float(), targets)
        error = difference(linear_logprob_entropy(*few), plain_linear(*exact))
        yield Case("linear_logprob_entropy forward", (P, D, V), impls, flops=2 * P * D * V, error=error)

        error = difference([backward(linear_logprob_entropy, *few)()()], [backward(plain_linear, *exact)()()])
        head = weight.clone().requires_grad_()  # 3 products at least, 4 for those that compute the logits twice
        functions = {"ours": linear_logprob_entropy, "torch": plain_linear}
        impls = each(backward, functions, hidden, head, targets, whole=True)
        yield Case("linear_logprob_entropy both passes", (P, D, V), impls, flops=6 * P * D * V, error=error)

        error = difference([cross_logprob_matrix(*few, cu[:3])], [plain_cross(*exact, cu[:3])])
        impls = each(forward, {"ours": cross_logprob_matrix, "torch": plain_cross}, hidden, weight, targets, cu) | product
        yield Case("cross_logprob_matrix", (P, D, V), impls, flops=2 * P * D * V, error=error)

    M, N = (2048, 2048) if cuda else (256, 256)
    sums, own = (20 * torch.randn(M, N, device=device)).round() - 300, torch.arange(M, device=device) % N
    found = cross_statistics(sums, own)
    error = difference((found.matched, found.marginal, found.above, found.tied), plain_statistics(sums.double(), own))
    impls = each(forward, {"ours": cross_statistics, "torch": plain_statistics}, sums, own)
    yield Case("cross_statistics", (M, N), impls, 4 * M * N, error=error)

    rewards, ids = torch.randn(1024, device=device), torch.arange(1024, device=device) % 64
    top_p = functools.partial(group_advantages, filter="top_p", filter_value=0.9, num_groups=64)
    exact = torch.stack(plain_advantages(rewards.double(), ids)).T.flatten()
    error = difference([group_advantages(rewards, ids, num_groups=64).advantages], [exact])
    impls = each(forward, {"ours": top_p, "a loop": plain_advantages}, rewards, ids)
    yield Case("group_advantages", (1024, 64), impls, 1024 * (4 + 8 + 4), error=error)


# -- the results -------------------------------------------------------------------------------------------------------

HEADER = "| kernel | shape | implementation | p20 / p50 / p80 ms | rate | of machine | extra MB | error |\n" + "|---" * 8 + "|"


def line(r) -> str:
    extra = "" if r["extra_bytes"] is None else f"{r['extra_bytes'] / 1e6:.0f}"
    error = "" if r["error"] is None else f"{r['error']:.1e}"
    return (
        f"| {r['kernel']} | {r['shape']} | {r['implementation']} | {r['p20_ms']:.3f} / {r['p50_ms']:.3f} / {r['p80_ms']:.3f} "
        f"| {r['rate']:.3g} {r['unit']} | {r['of_machine']:.0%} | {extra} | {error} |"
    )


def machine(device) -> dict[str, float]:
    """Bytes and operations a second of a plain copy and a plain matrix product, in the better runs."""
    size, n, dtype = (2**28, 8192, torch.bfloat16) if device == "cuda" else (2**24, 1024, torch.float32)
    a, b, square = torch.randn(size, device=device), torch.empty(size, device=device), torch.randn(n, n, device=device, dtype=dtype)
    best = measure({"copy": forward(b.copy_, a), "product": forward(torch.mm, square, square)}, device, 20)
    return {"GB/s": 2 * 4 * size / best["copy"][0], "TFLOP/s": 2 * n**3 / best["product"][0]}


def bench(quick: bool, out: Path | None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda, runs, rates = device == "cuda", 5 if quick else 20, machine(device)
    name = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    title = (
        f"{name}, torch {torch.__version__}, {datetime.date.today()}: copy {rates['GB/s'] / 1e9:.3g} GB/s, "
        f"{'bf16' if cuda else 'fp32'} product {rates['TFLOP/s'] / 1e12:.3g} TFLOP/s"
    )
    print(f"{title}\n\n{HEADER}")
    rows = []
    for case in cases(device, quick):
        for r in run(case, device, runs, rates):
            rows.append(r)
            print(line(r), flush=True)
        if out:  # after each case, so that a run that is stopped leaves what it has measured
            write(out, title, rows)
    if out:
        print(f"\n{out / 'bench.csv'}\n{out / 'bench.md'}")


def write(out: Path, title: str, rows: list[dict]):
    out.mkdir(parents=True, exist_ok=True)
    with (out / "bench.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["machine", *rows[0]])
        table.writeheader()
        table.writerows({"machine": title, **r} for r in rows)
    (out / "bench.md").write_text("\n".join([title, "", HEADER, *map(line, rows), ""]))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanoragen.kernels.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--compile", action="store_true", help="the compiler's table instead of times")
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel and few runs")
    parser.add_argument("--out", type=Path, help="folder for a CSV and a Markdown table")
    args = parser.parse_args(argv)
    if not args.compile:
        return bench(args.quick, args.out)
    print("registers a thread, widest global load in bits, matrix instructions, spilled bytes if any\n")
    print(compiled.markdown(compiled.compile_table()))


if __name__ == "__main__":
    main()
