"""How the report looks: its colours have contrast in both themes, charts follow the theme, and it fits on a phone."""

import re

import pytest
import report_runs
from report_runs import page_of

from nanoragen.report import charts

make = report_runs.make  # the fixture


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(dark):
    """WCAG 2.2: text 4.5 to 1 against what is behind it, lines and marks 3 to 1."""
    css = charts.CSS
    block = css.split("prefers-color-scheme: dark")[1] if dark else css.split("@media")[0]
    paint = dict(re.findall(r"--(\w+): #(\w{6})", block))

    def luminance(name):
        rgb = [int(paint[name][i : i + 2], 16) / 255 for i in (0, 2, 4)]
        return sum(w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), rgb))

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    pairs = [
        ("text", "back"),
        ("text", "raised"),
        ("muted", "back"),
        ("muted", "raised"),
        ("text", "reasoning"),
        ("text", "answer"),
    ]
    pairs += [(c, "back") for c in ("c0", "good", "watch", "bad")]  # links, and the signs of a verdict
    assert all(contrast(a, b) >= 4.5 for a, b in pairs), [(p, contrast(*p)) for p in pairs]
    marks = [*(f"c{i}" for i in range(6)), "good", "watch", "bad"]
    assert all(contrast(m, "back") >= 3 for m in marks), [(m, contrast(m, "back")) for m in marks]

    def mixed(share):  # a cell of the cross matrix: color-mix in sRGB
        return "".join(f"{round(int(paint['heat'][i : i + 2], 16) * share + int(paint['back'][i : i + 2], 16) * (1 - share)):02x}" for i in (0, 2, 4))

    for share in range(101):
        paint["cell"] = mixed(share / 100)
        assert contrast("text", "cell") >= 4.5, share


def test_charts_have_no_colour_of_their_own(make):
    page = page_of(make())
    svg = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--c0)" in svg and "var(--muted)" in svg and not re.findall(r"#fe\d\dfd", page)
    assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {"#000000", "#ffffff"}


def test_it_fits_on_a_phone(make):
    """Charts have no width of their own, the grid falls to one column, and text in a chart is about as large as on the page."""
    page = page_of(make())
    assert 'name="viewport" content="width=device-width' in page and "minmax(min(100%, 20rem), 1fr)" in page
    assert all("width=" not in start for start in re.findall(r"<svg[^>]*>", page))
    fonts = [float(a or b) for a, b in re.findall(r"font(?:-size)?: (?:([\d.]+)px|([\d.]+)px)", "".join(re.findall(r"<text[^>]*>", page)))]
    assert fonts and min(fonts) * 328 / 340 >= 10  # 360 pixels wide, 16 on both sides free
