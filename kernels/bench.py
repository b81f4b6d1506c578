"""Measure the kernels: `python -m nanoragen.kernels.bench`, and what the compiler makes of them: `--compile` (needs no GPU).

    python -m nanoragen.kernels.bench --out results         # also results/bench.csv, bench.md and bench.svg
    python -m nanoragen.kernels.bench --quick               # one shape of each kernel, few runs

A case declares the bytes a kernel must move, or the floating-point operations it must do. Its figure is that over its time,
and as a share of what this machine reaches in a plain copy, or a plain matrix product, measured first. The ways of a case
(ours, plain torch, torch.compile, other libraries that are installed) are timed in turns, so that a machine that slows down
slows all of them. Errors are against float64 of the same rounded input. On CUDA the Triton kernels run, on a CPU their torch
twins at smaller shapes. Logits are peaked like a language model's, not plain noise.
"""

import argparse
import csv
import datetime
import importlib
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
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
    ways: dict[str, Callable]  # name -> function that prepares, untimed, and returns the call that is timed; "ours" first
    bytes: int = 0  # that must be moved, at least
    flops: int = 0  # where these are what takes the time, instead
    error: float | None = None  # largest difference of ours from float64


def measure(ways, device, runs) -> dict[str, list[float]]:
    """Seconds of several ways, taken in turns: {name: [p20, p50, p80]}."""
    times = {name: [] for name in ways}
    flush = torch.empty(2**28, device=device) if device == "cuda" else None  # 1 GiB: more than any cache
    for run in range(runs + 2):
        for name, prepare in ways.items():
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
    """Bytes held at the worst moment of a call beside what was there before, its results included. None: nobody says."""
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
    resident = lambda key: 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # noqa: E731
    marks.write_text("5")  # Linux: sets the high-water mark VmHWM back to now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def run(case: Case, device, runs, rates) -> list[dict]:
    """A row of results for each way. A way that fails (not enough memory, no compiler) is left out, with a line."""
    torch.compiler.reset()
    ways, runs = dict(case.ways), 3 if device == "cpu" and (case.flops > 1e11 or case.bytes > 1e9) else runs  # those take seconds
    for name in [name for name in ways if name != "ours"]:
        try:
            ways[name]()()
        except Exception as e:  # other people's code, and torch.compile's: whatever is wrong, the others are measured
            print(f"  {case.kernel}: without {name} ({type(e).__name__})")
            del ways[name]
    work, unit = (case.flops, "TFLOP/s") if case.flops else (case.bytes, "GB/s")
    rows = []
    for name, (p20, p50, p80) in measure(ways, device, runs).items():
        rows.append({
            "kernel": case.kernel, "shape": " x ".join(map(str, case.shape)), "way": name, "bytes": case.bytes, "flops": case.flops,
            "p20_ms": p20 * 1e3, "p50_ms": p50 * 1e3, "p80_ms": p80 * 1e3, "rate": work / p50 / (1e12 if case.flops else 1e9),
            "unit": unit, "of_machine": work / p50 / rates[unit], "extra_bytes": extra_memory(ways[name], device),
            "error": case.error if name == "ours" else None,
        })  # fmt: skip
    return rows


# -- the ways ----------------------------------------------------------------------------------------------------------


def plain(logits, targets):
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


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
    """The backward pass of the sum of f's results, or (whole) both passes. The logits are made anew each time, as a model makes
    them: a way may write over them, as ours with inplace=True does and Liger's always does."""
    one = torch.ones((), dtype=logits.dtype, device=logits.device, requires_grad=True)

    def prepare():
        made = logits * one

        def loss():
            out = f(made, *args)
            return sum(t.sum() for t in out) if isinstance(out, tuple) else out

        ready = None if whole else loss()
        inputs = [made, *(a for a in args if a.requires_grad)]
        return lambda: torch.autograd.grad(loss() if whole else ready, inputs)[0]

    return prepare


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
    others = {"torch": plain, "torch.compile": torch.compile(plain)} | peers(device)
    step_ways = {"torch": plain_policy, "torch.compile": torch.compile(plain_policy)}
    inplace = lambda x, y: logprob_entropy(x, y, inplace=True)  # noqa: E731
    big = [(8192, 151_936), (65_536, 49_152), (1024, 262_144), (8192, 50_257)]  # the last: rows off 16 bytes
    for T, V in (big if cuda else [(256, 49_152), (2048, 151_936), (64, 262_144)])[: 1 if quick else None]:
        logits, targets = peaked_logits(T, V, device, dtype), torch.randint(V, (T,), device=device)
        size, few = logits.numel() * logits.element_size(), (logits[:32], targets[:32])
        exact, ours = plain(few[0].double(), few[1]), logprob_entropy(*few)
        yield Case("logprob_entropy forward", (T, V), {
            "ours": forward(logprob_entropy, logits, targets), **{n: forward(f, logits, targets) for n, f in others.items()}
        }, size, error=difference(ours, exact))  # fmt: skip

        slope = [backward(f, x, few[1])()() for f, x in ((logprob_entropy, few[0]), (plain, few[0].double()))]
        yield Case("logprob_entropy backward", (T, V), {
            "ours": backward(logprob_entropy, logits, targets), "ours, in place": backward(inplace, logits, targets),
            **{n: backward(f, logits, targets) for n, f in others.items()}
        }, 2 * size, error=difference(slope[:1], slope[1:]))  # fmt: skip

        yield Case("logprob_entropy both passes", (T, V), {
            "ours": backward(inplace, logits, targets, whole=True),
            **{n: backward(f, logits, targets, whole=True) for n, f in others.items()}
        }, 3 * size, error=difference(slope[:1], slope[1:]))  # fmt: skip

        masked = torch.where(torch.arange(T, device=device) % 4 == 0, targets, -100)
        yield Case("logprob_entropy forward, 3 of 4 rows ignored", (T, V), {  # the share says what ignored rows cost
            "ours": forward(logprob_entropy, logits, masked), "live rows alone": forward(logprob_entropy, logits[::4], targets[::4])
        }, size // 4)  # fmt: skip

        token = plain(logits[:1024], targets[:1024])[0].mean() + 0.3 * torch.randn(T, device=device), torch.randn(T, device=device)
        args = targets, *token, torch.full((T,), 1 / T, device=device)
        ours_step = lambda *a: policy_loss(*a, entropy_coef=0.01, inplace=True)[0]  # noqa: E731
        some = [backward(f, x, *(a[:32] for a in args))()() for f, x in ((ours_step, few[0]), (plain_policy, few[0].double()))]
        yield Case("policy_loss both passes", (T, V), {
            "ours": backward(ours_step, logits, *args, whole=True),
            **{n: backward(f, logits, *args, whole=True) for n, f in step_ways.items()}
        }, 3 * size, error=difference(some[:1], some[1:]))  # fmt: skip
        del logits, few, slope, some

    wide = [(4096, 896, 151_936), (4096, 2048, 151_936), (4096, 4096, 151_936)]
    for P, D, V in (wide if cuda else [(256, 896, 16_384), (256, 128, 49_152), (2048, 896, 151_936)])[: 1 if quick else None]:
        hidden, weight = (torch.randn(n, D, device=device, dtype=dtype) / D**0.25 for n in (P, V))
        targets, cu = torch.randint(V, (P,), device=device), torch.arange(0, P + 1, 64, device=device)
        few = hidden[:128], weight, targets[:128], cu[:3]
        exact = plain_cross(*(t.double() if t.is_floating_point() else t for t in few))
        pair = few[:2], (few[0].double(), weight.double())
        error = difference(linear_logprob_entropy(*few[:3]), plain_linear(*pair[1], few[2]))
        yield Case("linear_logprob_entropy forward", (P, D, V), {
            "ours": forward(linear_logprob_entropy, hidden, weight, targets),
            "torch": forward(plain_linear, hidden, weight, targets),
            "the product alone": forward(lambda h, w: h @ w.T, hidden, weight),
            **({"ours, float32 head": forward(linear_logprob_entropy, hidden, weight.float(), targets)} if cuda else {}),  # training's
        }, flops=2 * P * D * V, error=error)  # fmt: skip

        slope = [backward(f, h, w, few[2])()() for f, (h, w) in zip((linear_logprob_entropy, plain_linear), pair)]
        head = weight.clone().requires_grad_()  # 3 products at least, 4 for those that make the logits twice
        yield Case("linear_logprob_entropy both passes", (P, D, V), {
            "ours": backward(linear_logprob_entropy, hidden, head, targets, whole=True),
            "torch": backward(plain_linear, hidden, head, targets, whole=True),
        }, flops=6 * P * D * V, error=difference(slope[:1], slope[1:]))  # fmt: skip
        yield Case("cross_logprob_matrix", (P, D, V), {
            "ours": forward(cross_logprob_matrix, hidden, weight, targets, cu),
            "torch": forward(plain_cross, hidden, weight, targets, cu),
            "the product alone": forward(lambda h, w: h @ w.T, hidden, weight),
        }, flops=2 * P * D * V, error=difference([cross_logprob_matrix(*few)], [exact]))  # fmt: skip

    M, N = (2048, 2048) if cuda else (256, 256)
    sums, own = (20 * torch.randn(M, N, device=device)).round() - 300, torch.arange(M, device=device) % N
    found, exact = cross_statistics(sums, own), plain_statistics(sums.double(), own)
    yield Case("cross_statistics", (M, N), {
        "ours": forward(cross_statistics, sums, own), "torch": forward(plain_statistics, sums, own)
    }, 4 * M * N, error=difference((found.matched, found.marginal, found.above, found.tied), exact))  # fmt: skip

    rewards, ids = torch.randn(1024, device=device), torch.arange(1024, device=device) % 64
    ours = lambda r, i: group_advantages(r, i, filter="top_p", filter_value=0.9, num_groups=64)  # noqa: E731
    exact = torch.stack(plain_advantages(rewards.double(), ids)).T.flatten()
    yield Case("group_advantages", (1024, 64), {
        "ours": forward(ours, rewards, ids), "a loop": forward(plain_advantages, rewards, ids)
    }, 1024 * (4 + 8 + 4), error=difference([group_advantages(rewards, ids, num_groups=64).advantages], [exact]))  # fmt: skip


# -- what comes out ----------------------------------------------------------------------------------------------------

HEADER = "| kernel | shape | way | p20 / p50 / p80 ms | rate | of machine | extra MB | error |\n|---|---|---|---|---|---|---|---|"


def line(r) -> str:
    extra = "" if r["extra_bytes"] is None else f"{r['extra_bytes'] / 1e6:.0f}"
    error = "" if r["error"] is None else f"{r['error']:.1e}"
    return (
        f"| {r['kernel']} | {r['shape']} | {r['way']} | {r['p20_ms']:.3f} / {r['p50_ms']:.3f} / {r['p80_ms']:.3f} "
        f"| {r['rate']:.3g} {r['unit']} | {r['of_machine']:.0%} | {extra} | {error} |"
    )


def picture(title, rows) -> str:
    """SVG: a bar for each way of each case, as long as its share of what the machine can do."""
    out, y, before = [], 50, None
    for r in rows:
        case = f"{r['kernel']}, {r['shape']}"
        if case != before:
            y += 12
            out.append(f'<text x="10" y="{y + 12}" font-weight="bold">{escape(case)}</text>')
            y, before = y + 20, case
        width = max(1, 4 * min(100 * r["of_machine"], 110))
        color = "#2a6f97" if r["way"].startswith("ours") else "#b0bec5"
        out.append(f'<text x="150" y="{y + 12}" text-anchor="end">{escape(r["way"])}</text>')
        out.append(f'<rect x="160" y="{y}" width="{width:.0f}" height="15" fill="{color}"/>')
        out.append(f'<text x="{165 + width:.0f}" y="{y + 12}">{r["of_machine"]:.0%}, {r["p50_ms"]:.3g} ms</text>')
        y += 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{y + 20}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n<text x="10" y="20" font-size="14">{escape(title)}</text>\n'
        f'<text x="10" y="38">Share of the measured copy bandwidth or matrix rate; the line is 100%.</text>\n'
        f'<line x1="560" y1="50" x2="560" y2="{y}" stroke="#888"/>\n' + "\n".join(out) + "\n</svg>\n"
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
        if out:  # after each case: what is stopped has not measured in vain
            write(out, title, rows)
    if out:
        print(f"\n{out / 'bench.csv'}\n{out / 'bench.md'}\n{out / 'bench.svg'}")


def write(out: Path, title: str, rows: list[dict]):
    out.mkdir(parents=True, exist_ok=True)
    with (out / "bench.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["machine", *rows[0]])
        table.writeheader()
        table.writerows({"machine": title, **r} for r in rows)
    (out / "bench.md").write_text("\n".join([title, "", HEADER, *map(line, rows), ""]))
    (out / "bench.svg").write_text(picture(title, rows))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanoragen.kernels.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--compile", action="store_true", help="the compiler's table instead of times")
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel and few runs")
    parser.add_argument("--out", type=Path, help="folder for a CSV, a Markdown table and a picture")
    args = parser.parse_args(argv)
    if not args.compile:
        return bench(args.quick, args.out)
    print("registers a thread, widest global load in bits, matrix instructions, spilled bytes if any\n")
    print(compiled.markdown(compiled.compile_table()))


if __name__ == "__main__":
    main()
