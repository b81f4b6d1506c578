"""The sandbox over many runs, after a killed trainer, and for other users than the one who runs these tests."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from sandboxed import MODES, PATIENT, ROOT, SMALL, alive, children, cleanly, count_from_here, tries, word  # noqa: F401 (a fixture)

from nanoragen.envs import sandbox
from nanoragen.envs.sandbox import run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are run on Linux only")


def test_two_hundred_runs_leave_nothing(tmp_path, monkeypatch):
    """Ends, failures, children and files left behind, in turn; nothing grows from run to run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    programs = ("print(1)", "1/0", "open('f', 'w').write('x' * 1000)", "import os; os.fork()", "import os; os.abort()")
    handles, mounts = sorted(os.listdir("/proc/self/fd")), Path("/proc/self/mountinfo").read_text()
    for n in range(200):
        run(programs[n % len(programs)], **PATIENT)
    assert sorted(os.listdir("/proc/self/fd")) == handles and not children()
    assert list(tmp_path.iterdir()) == [] and Path("/proc/self/mountinfo").read_text() == mounts


def test_what_a_killed_trainer_left_is_removed_at_the_next_start_and_nothing_else(tmp_path, monkeypatch):
    word_ = word()
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom nanoragen.envs.sandbox import execute, PYTHON\nopen('made', 'w')\n"
    code += f"execute([PYTHON, '-S', '-c', 'import time; open(\"here\", \"w\"); time.sleep(300)  # {word_}'], seconds=300, memory=1 << 30, output=9, processes=4, mode='none')"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainers = [subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path) for _ in range(2)]
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob(f"{sandbox.PREFIX}*/work/here"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    folders = list(tmp_path.glob(f"{sandbox.PREFIX}*"))
    assert len(folders) == 2
    dead, living = trainers
    dead.kill(), dead.wait()
    new, other = tmp_path / f"{sandbox.PREFIX}new", tmp_path / "sandbox-of-somebody"
    new.mkdir(), other.mkdir()
    for folder in [*folders, other]:
        os.utime(folder, (1, 1))  # long ago
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox._sweep.__wrapped__()
    left = set(tmp_path.iterdir())
    living.kill(), living.wait()
    assert {new, other} < left and len(left & set(folders)) == 1  # the dead one's is gone, the living one's is not
    while [p for p in alive(word_)] and time.monotonic() < deadline:
        time.sleep(0.05)
    (kept,) = left & set(folders)
    os.utime(kept, (1, 1))
    sandbox._sweep.__wrapped__()
    assert not kept.exists()


@MODES
@pytest.mark.parametrize("how", ["fork", "double fork", "double fork, parent waits for nothing and is killed"])
def test_children_that_outlive_their_parent(how, mode):
    token = word()
    sleeper = f"os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(300)  # {token}'])"
    code = "import os, sys, time, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "r, w = os.pipe()\nif os.fork() == 0:\n  os.setsid()\n"
    code += "  if os.fork(): os._exit(0)\n  os.setpgid(0, 0)\n" if how != "fork" else ""
    code += f"  os.set_inheritable(w, False); n = os.open(os.devnull, os.O_RDWR); [os.dup2(n, i) for i in range(3)]\n  {sleeper}\n"
    code += "os.close(w); os.read(r, 1); print('started', flush=True)\n"  # the pipe closes when the sleeper has started
    code += "os.kill(os.getpid(), 9)" if "killed" in how else ""
    result = run(code, mode=mode, **PATIENT)
    assert result.stdout == "started\n" and result.status == ("error" if "killed" in how else "ok")
    assert not alive(token) and not children()


@MODES
def test_nothing_is_left_of_the_run_when_the_trainer_is_killed(mode, tmp_path):
    token = word()
    code = f"import os, sys; os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(300)  # {token}'])"
    trainer = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom nanoragen.envs.sandbox import run\nrun({code!r}, seconds=300, mode={mode!r})"
    process = subprocess.Popen([sys.executable, "-c", trainer], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60

    def sleeping():  # the trainer's own command line holds the word too
        return [p for p in alive(token) if p != process.pid]

    while not sleeping() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleeping()
    process.kill(), process.wait()
    while sleeping() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleeping()


@MODES
def test_an_exception_in_the_middle_of_a_run(mode):
    """The trainer's own time limit is a signal that raises (nanoragen/faults.py)."""
    token, before = word(), set(os.listdir("/proc/self/fd"))
    code = f"import os, sys; os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(300)  # {token}'])"

    def late(*_):
        raise TimeoutError("late")

    old = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(TimeoutError, match="late"):
            run(code, mode=mode, seconds=300)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert not alive(token) and not children() and len(os.listdir("/proc/self/fd")) == len(before)


@MODES
def test_processes_files_and_handles_as_before(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mounts = Path("/proc/self/mountinfo").read_text()
    handles = sorted(os.listdir("/proc/self/fd"))
    nested = "import os\nopen('f', 'w').write('x'); os.mkdir('shut', 0)\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    for code in (nested, "print('x' * 10**6)", "import os; os.setsid; os.fork()", "1/0", "def"):
        run(code, mode=mode, **PATIENT)
    run("while True: pass", seconds=0.2, mode=mode)
    assert sorted(os.listdir("/proc/self/fd")) == handles and not children()
    assert list(tmp_path.iterdir()) == [] and Path("/proc/self/mountinfo").read_text() == mounts


def test_runs_at_the_same_time():
    found = {}

    def one(n):
        found[n] = run(f"print({n} * {n})", **PATIENT).stdout

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert found == {n: f"{n * n}\n" for n in range(8)} and not children()


# -- other users ------------------------------------------------------------------------------------------------------


def python_of_nobody():
    """A Python that user nobody may run, None where there is none or this is not root."""
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        return None
    for python in (sandbox.PYTHON, "/usr/bin/python3"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([python, "-S", "-c", ""], user=65534, group=65534, extra_groups=[], check=True, cwd="/")
            return os.path.realpath(python)
    return None


PYTHON_OF_NOBODY = python_of_nobody()
as_nobody = pytest.mark.skipif(not PYTHON_OF_NOBODY, reason="needs root, and a Python that nobody may run")


@as_nobody
def test_as_nobody_without_namespaces(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "PYTHON", PYTHON_OF_NOBODY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for folder in [tmp_path, *(f for f in tmp_path.parents if "pytest" in str(f))]:
        folder.chmod(0o711)  # pytest's folders are closed; /tmp is not
    (tmp_path / "closed").write_text("hunter2"), (tmp_path / "closed").chmod(0o600)
    (tmp_path / "open").write_text("read"), (tmp_path / "open").chmod(0o644)
    own = dict(mode="nobody")
    assert (
        cleanly("import os; print(os.getuid(), os.getgid(), os.getgroups(), input())", stdin="in\n", **own) == "65534 65534 [] in\n"
    )
    assert cleanly("open('f', 'w').write('hi'); print(open('f').read())", **own) == "hi\n"
    assert cleanly(f"print(open('{tmp_path}/open').read())", **own) == "read\n"
    refused = tries(f"open('{tmp_path}/closed')", f"open('{tmp_path}/open', 'w')", f"open('{tmp_path}/new', 'w')", "os.setuid(0)")
    refused += tries(f"os.kill({os.getpid()}, 0)", "os.kill(os.getppid(), 9)", "os.listdir('..')", "open('../job.json', 'w')")
    assert cleanly("import os\n" + refused, **own) == "PermissionError\n" * 8
    many = "import os, time\nfor _ in range(40):\n  if os.fork() == 0: time.sleep(30); os._exit(0)\ntime.sleep(30)"
    assert run(many, **{**PATIENT, "processes": 8}, **own).status in ("error", "processes")
    assert run("while True: pass", **{**SMALL, "seconds": 0.5}, **own).status == "timeout"
    token = word()
    sleeper = f"import os, sys\nif os.fork() == 0: os.setsid(); os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(300)  # {token}'])"
    assert run(sleeper, **PATIENT, **own).status == "ok"
    assert not alive(token) and not children() and sorted(p.name for p in tmp_path.iterdir()) == ["closed", "open"]


@as_nobody
def test_in_namespaces_of_a_user_without_rights():
    """All of it as user nobody, who starts the trainer here: a copy of the two files, and a Python, that nobody may read."""
    code = (
        "import os, sys, tempfile; sys.path.insert(0, sys.argv[1]); tempfile.tempdir = sys.argv[2]\n"
        "from nanoragen.envs.sandbox import isolation, run\n"
        "mode = isolation()\n"
        "for m in {mode, 'none'}:\n"
        "  ok = run('print(input())', 'x', seconds=20, mode=m)\n"
        "  assert (ok.status, ok.stdout) == ('ok', 'x\\n'), ok\n"
        "  assert run('while True: pass', seconds=0.5, mode=m).status == 'timeout'\n"
        "  assert run('import os\\nos.fork()\\nos.setsid', seconds=20, mode=m).status == 'ok'\n"
        "  left = run('import os; print(os.listdir(\"/\"), os.getuid())', seconds=20, mode=m).stdout\n"
        "  assert '65534' in left and (m == 'none' or 'home' not in left), left\n"
        "assert not os.listdir(sys.argv[2])\n"
        "print(mode, open('/proc/self/task/%d/children' % os.getpid()).read())"
    )
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name), Path(name) / "work"
        folder.chmod(0o755), work.mkdir(), work.chmod(0o777)
        (folder / "nanoragen" / "envs").mkdir(parents=True)
        for file in (sandbox.CHILD, Path(sandbox.__file__)):
            (folder / "nanoragen" / "envs" / file.name).write_bytes(file.read_bytes())
        done = subprocess.run(
            [PYTHON_OF_NOBODY, "-c", code, name, str(work)],
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("namespaces", "none")
