"""Targets outside the vocabulary, for every function that takes targets: an IndexError on a CPU, NaN from the kernels on a GPU."""

import pytest
import torch
from backends import BACKENDS, DEVICE

from nanoragen.kernels import cross, linear, logprob
from nanoragen.kernels.cross import cross_logprob_matrix
from nanoragen.kernels.linear import linear_logprob_entropy
from nanoragen.kernels.logprob import logprob_entropy
from nanoragen.kernels.policy import policy_loss

V = 130


def by_logits(targets, **options):
    return logprob_entropy(torch.zeros(len(targets), V, device=DEVICE), targets, **options)[0]


def by_policy_loss(targets, **options):
    one = torch.ones(len(targets), device=DEVICE)
    return policy_loss(torch.zeros(len(targets), V, device=DEVICE), targets, None, one, one, **options)[1].logprob


def by_hidden(targets, **options):
    return linear_logprob_entropy(
        torch.zeros(len(targets), 16, device=DEVICE), torch.zeros(V, 16, device=DEVICE), targets, **options
    )[0]


def by_segment(targets, **options):
    """Each token a segment of its own."""
    hidden, weight = torch.zeros(len(targets), 16, device=DEVICE), torch.zeros(V, 16, device=DEVICE)
    return cross_logprob_matrix(hidden, weight, targets, torch.arange(len(targets) + 1, device=DEVICE), **options)


WITH_IGNORE = [by_logits, by_policy_loss, by_hidden]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU looking would wait for the device")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [-5, V, V + 7])
@pytest.mark.parametrize("function", [*WITH_IGNORE, by_segment])
def test_on_a_cpu_the_error_names_the_target_and_what_is_valid(function, bad, backend):
    with pytest.raises(IndexError, match=rf"^targets: {bad}; valid: 0 to {V - 1}"):
        function(torch.tensor([0, V - 1, bad, 3]), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", WITH_IGNORE)
def test_only_the_given_ignore_index_is_ignored(function, backend):
    targets = torch.tensor([0, -5, V - 1], device=DEVICE)
    assert (function(targets, ignore_index=-5, backend=backend) != 0).tolist() == [True, False, True]
    if DEVICE == "cpu":
        with pytest.raises(IndexError, match=r"^targets: -5; valid: 0 to 129, or ignore_index \(-100\)$"):
            function(targets, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [*WITH_IGNORE, by_segment])
def test_without_the_check_the_kernels_give_nan(function, backend, monkeypatch):
    """As on a GPU, where nobody looks at the targets. (The reference implementation from logits uses torch's own indexing.)"""
    if backend == "torch" and function in (by_logits, by_policy_loss):
        pytest.skip("torch's indexing has its own errors")
    for module in (logprob, linear, cross):
        monkeypatch.setattr(module, "check_targets", lambda *args: None)
    found = function(torch.tensor([-5, 0, V], device=DEVICE), backend=backend)
    assert found.isnan().tolist() == [True, False, True]
