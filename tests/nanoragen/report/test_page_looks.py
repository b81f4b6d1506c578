"""How the report looks: its colours have contrast, and a browser draws it on a phone and on a desk (where one is installed)."""

import html
import json
import re
import shutil
import subprocess

import pytest
import report_runs
from helpers import byte_tokenizer, encode
from report_runs import lines, nasty_run, page_of, rollout_line

from nanoragen.report import charts
from nanoragen.report import page as report

make = report_runs.make  # the fixture


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(dark):
    """WCAG 2.2: text 4.5 to 1 against what is behind it, lines and marks 3 to 1."""
    css = (report.ASSETS / "report.css").read_text()
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
        ("back", "deep"),
    ]
    assert all(contrast(a, b) >= 4.5 for a, b in pairs), [(p, contrast(*p)) for p in pairs]
    marks = [*(f"c{i}" for i in range(6)), "good", "watch", "bad", "late"]
    assert all(contrast(m, "back") >= 3 for m in marks), [(m, contrast(m, "back")) for m in marks]


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
PROBE = """<!DOCTYPE html><meta charset="utf-8"><pre id="result">none</pre>
<iframe id="phone" width="390" height="844" srcdoc="{page}"></iframe><iframe id="desk" width="1280" height="800" srcdoc="{page}"></iframe>
<script>
function look(frame) {
  const w = frame.contentWindow, d = frame.contentDocument, box = d.getElementById("viewer"), shown = () => box.querySelector(".facts").textContent;
  const key = (name, shift) => box.dispatchEvent(new w.KeyboardEvent("keydown", { key: name, shiftKey: shift, bubbles: true, cancelable: true }));
  const out = { wide: d.documentElement.scrollWidth, inner: w.innerWidth, charts: {}, pwned: w.pwned === undefined && window.pwned === undefined ? 0 : 1 };
  for (const s of d.querySelectorAll("section")) out.charts[s.id] = s.querySelectorAll("svg[role=img] > *").length;
  out.images = d.querySelectorAll("img").length;
  out.bad = [...d.querySelectorAll("svg *")].filter((n) => [...n.attributes].some((a) => /NaN|Infinity|undefined/.test(a.value))).length;
  out.start = shown(); key("ArrowRight", false); out.right = shown(); key("ArrowLeft", true); out.step = shown();
  out.text = box.querySelector(".text").textContent;
  key("ArrowRight", true); // to the first episode of the last step
  out.colours = {};
  for (const name of ["mask", "logprobs", "entropies"]) {
    const radio = box.querySelector(`input[value=${name}]`);
    if (!radio) continue;
    radio.click();
    const tokens = [...box.querySelectorAll(".text span[title]")];
    const alpha = (t) => { const c = w.getComputedStyle(t).backgroundColor, a = c.match(/[\\/,] *([\\d.]+)\\)$/); return c.startsWith("rgb(") ? 1 : a ? Number(a[1]) : 1; };
    out.colours[name] = { alpha: tokens.map(alpha), said: d.getElementById("colours").textContent, scale: box.querySelectorAll(".scale").length, title: tokens[3].title };
  }
  const slider = d.querySelector("#cross input");
  slider.value = 0; slider.dispatchEvent(new w.Event("input"));
  out.cross = d.querySelector("#cross output").textContent;
  const details = d.querySelector("#information details");
  details.open = true; details.dispatchEvent(new w.Event("toggle"));
  out.rows = details.querySelectorAll("tr").length;
  return out;
}
addEventListener("load", () => {
  let found;
  try { found = ["phone", "desk"].map((id) => look(document.getElementById(id))); } catch (e) { found = String(e.stack); }
  document.getElementById("result").textContent = JSON.stringify(found);
});
</script>"""


def browse(page, folder):
    """What PROBE finds in the page on a phone and on a desk, in a headless browser; the page itself is unchanged."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if not browser:
        pytest.skip(f"no browser on the PATH (looked for {', '.join(BROWSERS)})")
    probe = folder / "probe.html"
    probe.write_text(PROBE.replace("{page}", html.escape(page)))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000",
         "--dump-dom", probe.as_uri()],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    text = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text, done.stderr[-2000:]
    found = json.loads(html.unescape(text[1]))
    assert isinstance(found, list), found
    return found


def coloured_run(make):
    """Two tokens of reasoning, two of the answer; log-probs 0, -1, -5, -9 and entropies 0, 0.5, 1, 2."""
    folder, tokenizer = make(), byte_tokenizer()
    tokenizer.save_pretrained(folder / "step_000008")
    ids = encode(tokenizer, "map" + "hm" + "up")
    record = rollout_line(8)
    record.update(ids=ids, mask=[0, 0, 0, 1, 1, 1, 1], logprobs=[0.0, -1.0, -5.0, -9.0], entropies=[0.0, 0.5, 1.0, 2.0])
    record["turns"] = [{"start": 3, "think_end": 5, "end": 7, "reward": 1.0}]
    lines(folder / "rollouts.jsonl", [rollout_line(1), rollout_line(1, 1), record, rollout_line(8, 1)])
    return folder


def test_a_browser_draws_it(make, tmp_path):
    folder = nasty_run(make)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    log[3]["reward"] = None
    lines(folder / "metrics.jsonl", log)
    for seen, width in zip(browse(page_of(folder), tmp_path), (390, 1280)):
        assert seen["inner"] == width and seen["wide"] <= width  # nothing to scroll sideways
        drawn = {k: n for k, n in seen["charts"].items() if k != "episodes"}
        assert set(drawn) == set(charts.CHARTS) and min(drawn.values()) > 8, drawn
        assert (seen["pwned"], seen["images"], seen["bad"]) == (0, 0, 0)
        assert (
            "step 8" in seen["start"] and "reward 0" in seen["start"] and "reward 1" in seen["right"] and "step 1" in seen["step"]
        )
        assert seen["colours"] == {}  # no values, no choice
        assert "</script><img src=x" in seen["text"] and seen["cross"] == "step 1" and seen["rows"] == 9


def test_a_browser_colours_tokens_by_mask_log_prob_or_entropy(make, tmp_path):
    for seen in browse(page_of(coloured_run(make)), tmp_path):
        found = seen["colours"]
        assert found["mask"]["alpha"] == [0, 0, 0, 0] and "blue is sampled reasoning" in found["mask"]["said"]
        # full colour is 0.6 opaque: at -5 nats and below, and at the highest entropy
        assert found["logprobs"]["alpha"] == pytest.approx([0, 0.12, 0.6, 0.6], abs=0.01) and "0.7%" in found["logprobs"]["said"]
        assert found["entropies"]["alpha"] == pytest.approx([0, 0.15, 0.3, 0.6], abs=0.01)
        assert "2 nats" in found["entropies"]["said"] and found["entropies"]["title"] == "log-prob -9, entropy 2"
        assert [found[k]["scale"] for k in ("mask", "logprobs", "entropies")] == [0, 1, 1] and seen["wide"] <= seen["inner"]


def test_a_browser_draws_next_to_nothing_too(make, tmp_path):
    """One step, one of everything: no range is empty, nothing is divided by zero."""
    folder = make(steps=1)
    lines(folder / "rollouts.jsonl", [rollout_line(1), rollout_line(1, 1)])
    for seen in browse(page_of(folder), tmp_path):
        assert seen["bad"] == 0 and seen["wide"] <= seen["inner"] and seen["rows"] == 2
