"""How the code is laid out: which room may import which, how long a file may be, what a room says of itself."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A room may import those that stand before it. train.py, eval.py and evaluate.py may import all.
ROOMS = ["envs", "kernels", "run", "policy", "rollout", "learning", "collapse", "report", "science"]
TIED = {("learning", "rollout"), ("collapse", "rollout"), ("collapse", "learning"), ("report", "policy"), ("report", "rollout"),
        ("report", "learning"), ("report", "collapse")}  # (room, what it does not import although that stands before it)  # fmt: skip


def python_files():
    asked = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True)
    names = asked.stdout.split() if asked.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py")]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    parts = parts[1:] if parts[0] == "nanoragen" else parts
    return parts[0] if parts[0] in ROOMS else ""


def imported(path: Path):
    """The rooms of nanoragen that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if isinstance(node, ast.ImportFrom) and node.module == "nanoragen":
            names = [f"nanoragen.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "nanoragen" and len(parts) > 1 and parts[1] in ROOMS:
                yield parts[1]
            elif parts[0] == "train":
                yield "train"


def test_imports_point_one_way():
    wrong = []
    for path in python_files():
        room = room_of(path)
        if not room or path.is_relative_to(ROOT / "tests"):
            continue
        allowed = set(ROOMS[: ROOMS.index(room) + 1]) - {other for mine, other in TIED if mine == room}
        allowed |= {"train"} if room == "science" else set()
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in imported(path) if name not in allowed]
    assert not wrong, "\n".join(wrong)


def test_each_room_says_what_comes_in_what_goes_out_and_how_to_read_it():
    folders = [p for p in (ROOT / "nanoragen").iterdir() if p.is_dir() and (p / "__init__.py").is_file() and p.name in ROOMS]
    assert len(folders) >= 7
    for folder in folders:
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert folder.name == "kernels" or 5 <= len(said.splitlines()) <= 15, folder.name


def test_few_files_lie_outside_of_a_room():
    assert len(list((ROOT / "nanoragen").glob("*.py"))) <= 8


def test_no_file_is_long():
    long = {str(p.relative_to(ROOT)): n for p in python_files() if (n := len(p.read_text().splitlines())) > (450 if p.name == "train.py" else 400)}
    assert not long


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "9"}, {"KMP_BLOCKTIME": "200"}])
def test_threads_that_wait_do_not_spin_unless_the_user_wants_it(own):
    """The user's setting stays, and none of ours works against it (GOMP_SPINCOUNT counts more than OMP_WAIT_POLICY)."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    env = {k: v for k, v in os.environ.items() if k not in names} | own
    code = f"import sys, nanoragen, os; assert 'torch' not in sys.modules; print({{k: os.environ[k] for k in {names} if k in os.environ}})"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert ast.literal_eval(said.stdout) == (own or {"OMP_WAIT_POLICY": "PASSIVE"}), said.stderr


@pytest.mark.parametrize("program", ["train.py", "eval.py"])
def test_nanoragen_is_imported_before_torch(program):
    """Else the threads' wait policy comes too late."""
    code = (
        "import sys, runpy\nclass Watch:\n    def find_spec(self, name, *more):\n"
        "        assert name != 'torch' or 'nanoragen' in sys.modules\n"
        f"sys.meta_path.insert(0, Watch())\nrunpy.run_path({program!r})\nassert 'nanoragen' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
