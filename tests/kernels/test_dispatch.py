"""Machines without Triton, or with one that does not work; and the interpreter asked for too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoragen.kernels.dispatch import interpreted, triton

ROOT = Path(__file__).parent.parent.parent
USE = """
import torch
from nanoragen.kernels.advantage import group_advantages
from nanoragen.kernels.cross import cross_logprob_matrix
from nanoragen.kernels.logprob import logprob_entropy
from nanoragen.kernels.policy import policy_loss
for _ in range(2):
    logprob, entropy = logprob_entropy(torch.zeros(2, 8), torch.tensor([0, 1]))
    sums = cross_logprob_matrix(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([0, 1]), torch.tensor([0, 2]))
    a = group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0, 0])).advantages
loss, _ = policy_loss(torch.zeros(2, 8), torch.tensor([0, 1]), None, torch.ones(2), torch.ones(2))
assert loss == -2
print(round(logprob.sum().item(), 4), round(sums.item(), 4), a.tolist()[1] > 0)
"""


def run(code, **env):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.mark.skipif(interpreted(), reason="this is the inner run")
@pytest.mark.parametrize("how", ["hidden", "broken"])
def test_without_triton_everything_works_and_says_so_once(tmp_path, how):
    if how == "broken":
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('wrong driver')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" if how == "broken" else "import sys; sys.modules['triton'] = None\n"
    )
    done = run(code + USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "-4.1589 -4.1589 True"
    assert done.stderr.count("Triton") == 1 and ("not installed" if how == "hidden" else "wrong driver") in done.stderr


@pytest.mark.skipif(interpreted() or triton is None, reason="needs Triton, not yet in its interpreter")
def test_the_interpreter_asked_for_too_late():
    done = run("import os, triton; os.environ['TRITON_INTERPRET'] = '1'\n" + USE)
    assert done.returncode != 0 and "TRITON_INTERPRET: set after" in done.stderr
