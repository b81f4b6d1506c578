"""The import names hold from a bare checkout, an editable install and a wheel, with a package called `kernels` or without.

Each case is a process of its own that sees only what that way of installing shows it. `kernels` is the name of a Hugging
Face package: transformers must get that one where it is installed, and believe in none where it is not.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WAYS = ["checkout", "editable", "wheel"]

PROBE = """
import importlib, importlib.util, os, sys
if {script!r}:
    sys.path.insert(0, {script!r})  # what `python train.py` does
import nanoragen
import nanoragen.envs.sokoban, nanoragen.kernels, nanoragen.run.cli
from nanoragen.envs.registry import make, names
text, _ = make("sokoban").reset(seed=0)
assert text and "countdown" in names()
assert "nanoragen.kernels.logprob" not in sys.modules  # names are resolved when asked for
from nanoragen.kernels import cross_logprob_matrix, group_advantages, linear_logprob_entropy, logprob_entropy, policy_loss
from nanoragen.kernels.logprob import logprob_entropy as the_same
assert logprob_entropy is the_same and set(nanoragen.kernels.__all__) < set(dir(nanoragen.kernels))
import gymnasium
gymnasium.make("nanoragen/Sokoban-v0", disable_env_checker=True).reset(seed=1)
home = os.path.realpath({home!r})
for name in ("run.cli", "envs.sokoban", "kernels.logprob", "train", "eval"):  # found, not run: torch takes long to import
    where = os.path.realpath(importlib.util.find_spec("nanoragen." + name).origin)
    assert where.startswith(home + os.sep), where
assert "kernels" not in sys.modules and "envs" not in sys.modules
from transformers.utils import is_kernels_available
from transformers.utils.import_utils import _is_package_available
found = _is_package_available("kernels", return_version=True)[0]
assert found is {fake!r}, found
if {fake!r}:
    import kernels
    assert kernels.WHO == "hugging face"
print("fine")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (found,) = folder.glob("nanoragen-*.whl")
    return found


def pip(*args):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory, request):
    """site(way) -> the folder that this way of installing fills; None for a checkout."""
    made = {}

    def site(way):
        if way != "checkout" and way not in made:
            pytest.importorskip("hatchling")
            made[way] = tmp_path_factory.mktemp(way)
            what = ["-e", ROOT] if way == "editable" else [request.getfixturevalue("wheel")]
            pip("install", "--no-deps", "--no-build-isolation", "--no-index", "--target", made[way], *what)
        return made.get(way)

    return site


def python(code, site, tmp_path, extra=()):
    """Run code in a process whose site folders are `site`, `extra` and the installed packages, in another folder."""
    # .pth files count in site folders only, and a nanoragen that is installed here already must not be seen
    paths = [str(p) for p in (*extra, site) if p is not None]
    packages = [p for p in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))]
    start = (
        "import site, sys\n"
        f"for p in {paths!r}: site.addsitedir(p)\n"
        f"sys.path += [p for p in {packages!r} if p not in sys.path]\n"
    )  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    command = [sys.executable, "-S", "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)


@pytest.mark.parametrize("fake", [False, True], ids=["no kernels package", "with kernels package"])
@pytest.mark.parametrize("way", WAYS)
def test_import_names(way, fake, installed, tmp_path):
    if not fake and any((Path(p) / "kernels" / "__init__.py").is_file() for p in sys.path):
        pytest.skip("a package called kernels is installed here")
    extra = []
    if fake:
        package = tmp_path / "fake" / "kernels"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("WHO = 'hugging face'\n__version__ = '0.12.0'\n")
        info = tmp_path / "fake" / "kernels-0.12.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.12.0\n")
        extra = [tmp_path / "fake"]
    site = installed(way)
    code = PROBE.format(script=str(ROOT) if way == "checkout" else "", home=str(site if way == "wheel" else ROOT), fake=fake)
    if way == "checkout" and fake:  # the script's folder comes first, as in real life: no regular package may stand there
        assert not (ROOT / "kernels" / "__init__.py").exists() and not (ROOT / "envs" / "__init__.py").exists()
    done = python(code, site, tmp_path, extra)
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stderr


def test_a_name_that_the_kernels_do_not_have():
    with pytest.raises(ImportError, match="logprobs_entropy"):
        from nanoragen.kernels import logprobs_entropy  # noqa: F401


@pytest.mark.parametrize("name", ["train", "eval", "kernels.bench"])
@pytest.mark.parametrize("way", WAYS)
def test_the_programs_start(way, name, installed, tmp_path):
    if way == "checkout":
        command = ["-m", f"nanoragen.{name}"] if "." in name else [ROOT / f"{name}.py"]
        where = ROOT if "." in name else tmp_path
        done = subprocess.run([sys.executable, *map(str, command), "--help"], capture_output=True, text=True, cwd=where)
    else:
        code = f"import runpy, sys\nsys.argv = ['{name}', '--help']\nrunpy.run_module('nanoragen.{name}', run_name='__main__')"
        done = python(code, installed(way), tmp_path)
    assert done.returncode == 0 and ("--quick" if "bench" in name else "--env") in done.stdout, done.stderr


def test_what_the_wheel_holds(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names} == {"nanoragen", next(n for n in names if "dist-info" in n).split("/")[0]}
    expected = {f"nanoragen/{p.relative_to(ROOT)}" for part in ("kernels", "envs") for p in (ROOT / part).rglob("*.py")}
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "nanoragen").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert expected | {"nanoragen/train.py", "nanoragen/eval.py"} <= set(names)
    assert any(n.endswith("licenses/LICENSE") for n in names) and not any("__pycache__" in n for n in names)


def test_dependencies_have_lower_bounds_only(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    required = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    assert required and all(">=" in r and "==" not in r.split(";")[0] and "<" not in r.split(";")[0] for r in required)
    assert any(r.startswith("triton>=") and "Linux" in r for r in required)
    extras = {line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if line.startswith("Provides-Extra: ")}
    assert {"flash", "envs", "log", "test", "gguf", "lora"} <= extras


def test_ci_runs_the_readmes_test_command(tmp_path):
    """.ci/run with a stand-in for everything it would install: what it executes is the README's block, elsewhere."""
    if not shutil.which("bash"):
        pytest.skip("no bash")
    readme = (ROOT / "README.md").read_text()
    block = readme.split("\n## Test\n")[1].split("```")[1].removeprefix("bash\n").strip()
    assert "pip install -e" in block and "pytest" in block and block.count("\n") == 0
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "python3").write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\nprintf \'%s\\n\' \'#!/bin/sh\' \'echo pip "$@" >> "$CALLS"\' > "$3/bin/pip"\n'
        'cp "$3/bin/pip" "$3/bin/pytest"; sed -i s/pip/pytest/ "$3/bin/pytest"; cp "$0" "$3/bin/python"\n'
        'chmod +x "$3"/bin/*; echo \'export PATH="$(dirname "$CALLS")/none:$PATH"\' > "$3/bin/activate"; echo "$3" >> "$CALLS"\n'
    )
    (fake / "python3").chmod(0o755)
    (fake / "python").symlink_to(fake / "python3")
    for name in ("pip", "pytest"):
        (fake / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "$CALLS"\n')
        (fake / name).chmod(0o755)
    path = f"{fake}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CALLS": str(tmp_path / "calls"), "TORCH_SPEC": "torch"}
    done = subprocess.run([str(ROOT / ".ci" / "run")], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [c for c in calls if c.startswith("pip")] == ["pip install --quiet torch", "pip install -e .[test]"]
    assert calls[-1].startswith("pytest") and not (ROOT / ".venv-test").exists()
