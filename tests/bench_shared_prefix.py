"""How much faster is it to encode each prompt once? The cross matrix with a shared prefix against every pair in full.

    python tests/bench_shared_prefix.py                                  # bundled model, M = N = 64
    python tests/bench_shared_prefix.py --model SmolLM2-135M.gguf        # and this model, M = N = 8

Prompts and reasonings are texts of the model's own tokens (Sokoban boards, each of another seed), about --tx and --tz long,
10% up and down. The two ways take turns in one process, after a round that is not counted; a time is the median of --rounds.
Peak memory is what a process of its own needs on top of the loaded model (Linux only). The target is that of the issue,
0.7 x (Tx + Tz) / (Tz + Tx / M). The exit status is 1 where a target is missed, or the two ways differ.

Left out: GPUs, where the kernels' own benchmark is (kernels/bench.py), and prompts that begin alike, which would only help.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from nanoragen.collapse.matrix import cross_matrix
from nanoragen.envs.registry import make
from nanoragen.policy import loading

WAYS = {"shared": True, "plain": False}


def texts(tokenizer, n: int, length: int, seed: int) -> list[list[int]]:
    """n different lists of ids, `length` long, 10% up and down."""
    rng, env, out = random.Random(seed), make("sokoban"), []
    for i in range(n):
        size, ids = round(length * rng.uniform(0.9, 1.1)), [10 * seed + i + 5]  # an id of its own: nothing in common
        for k in range(length):
            if len(ids) >= size:
                break
            ids += tokenizer(env.reset(seed=seed * 10_000 + i * 100 + k)[0] + "\n", add_special_tokens=False)["input_ids"]
        out.append(ids[:size])
    return out


def case(name: str, m: int, tx: int, tz: int):
    """(model, prompts, reasonings) of one row of the table."""
    model, tokenizer = loading.load(name, device="cpu")
    return model, texts(tokenizer, m, tx, 1), texts(tokenizer, m, tz, 2)


def status(key: str) -> float:
    """A size in /proc/self/status, MiB."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def peak(way: str, name: str, m: int, tx: int, tz: int) -> float:
    """MiB that one matrix needs on top of the loaded model; for a fresh process."""
    found = case(name, m, tx, tz)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, without that of loading
    before = status("VmRSS")
    cross_matrix(*found, shared_prefix=WAYS[way])
    return status("VmHWM") - before


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="a second model: hub id, folder or .gguf file")
    parser.add_argument("--m", type=int, default=64, help="prompts and reasonings of the bundled model")
    parser.add_argument("--model_m", type=int, default=8, help="and of the second")
    parser.add_argument("--tx", type=int, default=400)
    parser.add_argument("--tz", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # JSON: the arguments of `peak`, in a process of its own
    a = parser.parse_args(argv)
    if a.peak:
        return print(peak(*json.loads(a.peak)))
    print("| model | M = N | plain, s | shared, s | times faster | target | plain, MiB | shared, MiB | largest difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    missed = False
    for name, m in [("nano", a.m)] + ([(a.model, a.model_m)] if a.model else []):
        found, took, sums = case(name, m, a.tx, a.tz), {way: [] for way in WAYS}, {}
        for _ in range(1 + a.rounds):
            for way, shared in WAYS.items():
                start = time.perf_counter()
                sums[way] = cross_matrix(*found, shared_prefix=shared)
                took[way].append(time.perf_counter() - start)
        seconds = {way: statistics.median(t[1:]) for way, t in took.items()}
        memory = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--peak", json.dumps([way, name, m, a.tx, a.tz])]
            memory[way] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        faster, target = seconds["plain"] / seconds["shared"], 0.7 * (a.tx + a.tz) / (a.tz + a.tx / m)
        error = ((sums["plain"] - sums["shared"]).abs() / sums["plain"].abs().clamp(min=1)).max().item()
        missed |= faster < target or memory["shared"] >= memory["plain"] or error > 1e-4
        print(
            f"| {Path(name).stem} | {m} | {seconds['plain']:.2f} | {seconds['shared']:.2f} | {faster:.2f} | {target:.2f} "
            f"| {memory['plain']:.0f} | {memory['shared']:.0f} | {error:.1e} of the sum |",
            flush=True,
        )
    print(f"\nTx about {a.tx}, Tz about {a.tz}; {torch.get_num_threads()} threads; torch {torch.__version__}; median of {a.rounds}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
