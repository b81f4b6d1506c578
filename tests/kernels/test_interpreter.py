"""The tests of this folder once more, through the kernels: Triton's interpreter must be on before they are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoragen.kernels.dispatch import interpreted

HERE = Path(__file__).parent
NAMES = ("logprob", "logprob_inplace", "linear", "sizes", "policy", "cross", "advantage", "targets")


@pytest.mark.skipif(interpreted(), reason="this is the inner run")
def test_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    files = [str(HERE / f"test_{name}.py") for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=HERE.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
