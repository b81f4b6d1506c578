#!/usr/bin/env bash
# All that only a GPU can say, in under ten minutes: the GPU tests, the bench, and a short training run. From the repository root:
#     bash kernels/on_gpu.sh results
# Leaves tests.txt, bench.csv, bench.md and train.txt in the folder. A part that fails does not keep the next from running.
set -uo pipefail
out=${1:-results}
mkdir -p "$out"
export PYTHONPATH=.
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/device.txt"
timeout 120 python -m pytest -q -m gpu tests/kernels 2>&1 | tee "$out/tests.txt" | tail -5
timeout 140 python -m pytest -q tests/kernels --deselect tests/kernels/test_compile.py 2>&1 | tee -a "$out/tests.txt" | tail -5
timeout 220 python -m nanoragen.kernels.bench --out "$out" 2>&1 | tee "$out/bench.txt" | tail -60
timeout 90 python train.py --env sokoban --steps 4 --final_episodes 64 --out "$out/run" 2>&1 | tee "$out/train.txt" | tail -12
