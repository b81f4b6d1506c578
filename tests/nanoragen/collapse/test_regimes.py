"""The regimes: their names, sentences and advice, and that they need no torch."""

import subprocess
import sys

import pytest

from nanoragen.collapse import regimes


@pytest.mark.parametrize(
    "h, mi, name",
    [
        (1.0, 0.9, "diverse"),
        (0.51, 0.46, "diverse"),
        (0.9, 0.44, "template collapse"),
        (2.0, -0.1, "template collapse"),
        (0.49, 0.9, "compressed"),
        (0.2, 0.15, "low-entropy collapse"),
        (0.0, 0.0, "low-entropy collapse"),
    ],
)
def test_regimes(h, mi, name):
    assert regimes.regime(h, mi, 1.0, 0.9) == name
    sentence = regimes.regime_sentence(h, mi, 1.0, 0.9, {})
    assert sentence.startswith(name) and "\n" not in sentence and f"MI {mi:.0%} of its bound, first 90%" in sentence


def test_the_regime_is_that_of_the_last_few_measurements():
    measured = [(9.0, 9.0), (1.0, 2.0), (2.0, 4.0), (3.0, 6.0), (4.0, 8.0), (5.0, 0.0)]
    assert regimes.RECENT == 5 and regimes.recent(measured) == (3.0, 4.0)
    assert regimes.recent(measured[:2]) == (5.0, 5.5)


def test_a_run_that_starts_without_input_dependence_is_not_called_diverse():
    assert regimes.regime(1.0, 0.0, 1.0, 0.0) == regimes.regime(1.0, -0.2, 1.0, -0.3) == "template collapse"
    assert regimes.regime(1.0, 0.5, 1.0, 0.0) == "diverse"
    # nothing was lost, so nothing is blamed on the training
    sentence = lambda first: regimes.regime_sentence(1.0, 0.0, 1.0, first, {})
    assert "started" in sentence(0.0) and "--beta" in sentence(0.1)


def test_advice_that_is_followed_already_is_left_out():
    said = lambda **settings: regimes.advice("template collapse", settings)
    assert "--filter top_p" in said() and "weaken --beta and --entropy_coef" in said()
    assert said(filter="top_p", beta=0.1, entropy_coef=0.0) == "weaken --beta"
    assert "--filter" not in said(filter="ragen", beta=0.0, entropy_coef=0.0) and "weaken" not in said(beta=0.0, entropy_coef=0.0)
    assert "--lr" in said(filter="top_p", beta=0.0, entropy_coef=0.0)


def test_regimes_need_no_torch_and_the_public_names_are_still_there():
    code = "import sys, nanoragen.collapse.regimes; assert 'torch' not in sys.modules; from nanoragen.collapse import *; print(measure.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "measure\n", done.stderr
    with pytest.raises(ImportError, match="cannot import name 'none'"):
        from nanoragen.collapse import none  # noqa: F401
