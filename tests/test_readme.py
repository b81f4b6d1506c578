"""The front page and its companions: short enough to be read, and true where a test can see it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "nanoragen").glob("*/README.md")))]
MADE_BY_A_RUN = ("runs/", "step_", "results/", "adapter/")
TO_BE_WRITTEN = ("my_env.py", "envs/NAME.py", "kernels/NAME.py")  # by the reader
NAMED = re.compile(
    r"(?<![\w./<-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|svg|toml)\b"  # a file, with its folders or without
    r"|(?<![\w./-])(?:nanoragen|kernels|envs|tests)/[\w/]*"
)


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text):
    """The fenced blocks, and the text without them."""
    fence = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)
    return fence.findall(text), fence.sub("", text)


def prose(text):
    """The lines that are neither code nor table, links without their addresses."""
    return [re.sub(r"\]\([^)]*\)", "]", line) for line in blocks(text)[1].splitlines() if not line.startswith("|")]


def commands(page):
    """Every command line of a page that starts train.py or eval.py, in fences and between backticks: (program, flags)."""
    found = [line for block in blocks(read(page))[0] for line in block.splitlines()]
    found += re.findall(r"`((?:python|torchrun) [^`]+)`", blocks(read(page))[1])
    for line in found:
        words = shlex.split(line, comments=True) if re.match(r"(python|torchrun) .*(train|eval)\.py", line) else []
        program = next((w for w in words if w in ("train.py", "eval.py")), None)
        if program:
            yield program, [w.split("=")[0] for w in words[words.index(program) :] if w.startswith("--")]


def test_the_front_page_is_short():
    assert len(README.splitlines()) <= 180
    assert [line for line in prose(README) if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page):
    folder, tests = (ROOT / page).parent, ROOT / "tests"
    linked = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", read(page)) if "://" not in target]
    missing = [target for target in linked if not (folder / target).exists()]
    places = (ROOT, folder, tests, *(p for p in tests.rglob("*") if p.is_dir()))  # `test_fuzz.py`: a test by its name alone
    named = [path for path in NAMED.findall(read(page)) if not path.startswith(MADE_BY_A_RUN) and path not in TO_BE_WRITTEN]
    assert named and missing + [path for path in named if not any((place / path).exists() for place in places)] == []


@pytest.fixture(scope="module")
def flags():
    """{program: its flags}, from --help."""
    found = {}
    for program in ("train.py", "eval.py"):
        done = subprocess.run([sys.executable, str(ROOT / program), "--help"], capture_output=True, text=True, check=True)
        found[program] = set(re.findall(r"^ +(?:-h, )?(--\w+)", done.stdout, re.MULTILINE))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_the_commands_exist(page, flags):
    given = list(commands(page))
    assert [(program, flag) for program, used in given for flag in used if flag not in flags[program]] == []
    assert page != "README.md" or len(given) >= 8


def test_flags_that_are_named_exist(flags):
    """`--flag` between backticks, whatever program it is of; torchrun's, pip's and the report's own are listed."""
    others = {"--nproc_per_node", "--picture", "--quick", "--help", "--shutdown"}
    named = {flag for page in PAGES for flag in re.findall(r"`(--[a-z_]+)", blocks(read(page))[1])}
    assert len(named) > 20 and named - others <= flags["train.py"] | flags["eval.py"]


def test_the_first_commands_name_the_cpu_build_and_the_run():
    first = blocks(README)[0][0]
    assert "pip install torch --index-url https://download.pytorch.org/whl/cpu" in first
    assert first.index("whl/cpu") < first.index("pip install -e .") < first.index("python train.py --env sokoban\n")


def test_it_says_how_to_test_and_how_to_cite():
    block = README.split("\n## Test\n")[1].split("```")[1]
    assert block.startswith("bash\n") and "pytest" in block  # .ci/run runs it
    cite = README.split("\n## Cite\n")[1]
    entries = re.findall(r"^@(\w+)\{", cite, re.MULTILINE)
    assert "```bibtex" in cite and entries == ["article", "software"] and "2604.06268" in cite
    assert cite.count("{") == cite.count("}") and "Wang, Zihan" in cite


def test_the_reading_order_is_of_five_files():
    listed = re.findall(r"^\d\. \[([\w/.]+)\]\(([\w/.]+)\)", README, re.MULTILINE)
    assert len(listed) == 5 and all(name == target for name, target in listed) and listed[0][0] == "train.py"


def test_the_changelog_begins_with_what_is_not_released():
    heads = re.findall(r"^## (.*)", read("CHANGELOG.md"), re.MULTILINE)
    version = re.search(r'__version__ = "(.*)"', read("nanoragen/__init__.py"))[1]
    assert heads[0] == "Unreleased" and heads[1].split(",")[0] == version
