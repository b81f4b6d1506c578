"""The sandbox: what a program may do, what it may not, and that nothing of it is left."""

import os
import resource
import socket
import subprocess
import sys

import pytest
from sandboxed import BEST, MODES, PATIENT, PROC, ROOT, SMALL, apart, children, cleanly, count_from_here, tries  # noqa: F401 (a fixture)

from nanoragen.envs import sandbox
from nanoragen.envs.sandbox import run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are run on Linux only")

# -- what a program may do ---------------------------------------------------------------------------------------------


@MODES
def test_e16_input_arrives_and_ends(mode):
    assert cleanly("print(int(input()) + int(input()))", stdin="2\n3\n", mode=mode) == "5\n"
    assert cleanly("print(sum(map(int, open(0))))", stdin="1\n2", mode=mode) == "3\n"
    result = run("input()", mode=mode, **PATIENT)
    assert result.status == "error" and "EOFError" in result.stderr
    big = "x" * (1 << 20)  # more than any pipe holds
    assert cleanly("import sys; print(len(sys.stdin.read()))", stdin=big, mode=mode) == f"{len(big)}\n"


@MODES
def test_status_says_how_it_ended(mode):
    for code, status in (("", "ok"), ("raise SystemExit(0)", "ok"), ("raise SystemExit(3)", "error"), ("1/0", "error")):
        assert run(code, mode=mode, **PATIENT).status == status
    for code in ("import os; os.abort()", "import os; os.kill(os.getpid(), 9)", "def"):
        assert run(code, mode=mode, **PATIENT).status == "error"
    result = run("import sys; print('a'); print('b', file=sys.stderr)", mode=mode, **PATIENT)
    assert (result.stdout, result.stderr, result.isolation) == ("a\n", "b\n", mode)


@MODES
def test_any_bytes(mode):
    assert cleanly("import sys; sys.stdout.buffer.write(b'\\xff\\x00a\\r\\n')", mode=mode) == "\ufffd\x00a\r\n"
    assert cleanly("print(ascii(input()))  # \ud800 \u00e9", stdin="\ud800\u00e9", mode=mode) == "'?\\xe9'\n"


@MODES
def test_work_folder_and_order_of_sets(mode):
    assert cleanly("open('a', 'w').write('hi'); print(open('a').read())", mode=mode) == "hi\n"
    code = "print({str(i) for i in range(50)}, hash('a'))"
    assert cleanly(code, mode=mode) == cleanly(code, mode=mode)


@MODES
def test_threads_and_processes_within_the_limit(mode):
    code = "import threading, os\nt = threading.Thread(target=print, args=('t',)); t.start(); t.join()\n"
    assert cleanly(code + "os.waitpid(os.fork() or os._exit(0), 0); print('p')", mode=mode) == "t\np\n"


# -- time, memory, output ----------------------------------------------------------------------------------------------

HANGS = {
    "loop": "while True: pass",
    "caught": "while True:\n  try:\n    while True: pass\n  except: pass",
    "signals": "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "sleep": "import time; time.sleep(1000)",
    "waits for a child": "import os, time\nos.fork() or time.sleep(1000)\nos.wait()",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@MODES
@pytest.mark.parametrize("name", HANGS)
def test_e15_what_never_ends_is_ended(name, mode):
    result = run(HANGS[name], **{**SMALL, "seconds": 0.5}, mode=mode)
    assert result.status in ("timeout", "error") and 0.5 <= result.seconds <= 2.5
    assert not children()


@MODES
def test_e17_a_hundred_gigabytes(mode):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for code in ("x = bytearray(10**11)", "x = []\nwhile True: x.append(bytearray(10**6))"):
        result = run(code, mode=mode, **PATIENT)
        assert result.status == "error" and "MemoryError" in result.stderr
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000  # KiB, of this process
    assert cleanly("print('next')", mode=mode) == "next\n"


@MODES
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_e17_endless_printing_is_cut(stream, mode):
    result = run(f"import sys\nwhile True: print('x' * 1000, file=sys.{stream})", output=10_000, mode=mode, **PATIENT)
    assert result.status == "output" and len(getattr(result, stream)) == 10_000
    assert cleanly("print('x' * 9_999)", output=10_000, mode=mode) == "x" * 9_999 + "\n"
    assert run("print('x' * 10_000)", output=10_000, mode=mode, **PATIENT).status == "output"


@MODES
def test_big_files_are_refused(mode):
    code = "f = open('big', 'wb')\nfor _ in range(100): f.write(bytes(10**6))\nf.close()"
    result = run(code, mode=mode, **PATIENT)
    assert result.status == "error" and "File too large" in result.stderr


@apart
def test_the_folder_is_small():
    result = run("for i in range(99): open(f'f{i}', 'wb').write(bytes(10**7))", **PATIENT)
    assert result.status == "error" and "No space left" in result.stderr


# -- processes ---------------------------------------------------------------------------------------------------------


@apart
def test_fork_bomb():
    """A real one: the limit of its user namespace holds it, whoever runs this."""
    result = run("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", **SMALL)
    assert result.status in ("timeout", "error") and not children()
    for start in ("", "import ctypes; ctypes.CDLL(None).unshare(0x10000000)\n"):  # also from a namespace of its own
        code = start + "import os, time\nn = 1\ntry:\n  while os.fork() or time.sleep(60): n += 1\nexcept OSError: print(n)"
        assert cleanly(code) == "16\n"
    threads = "import threading, time\nn = 1\ntry:\n  while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1"
    assert cleanly(threads + "\nexcept RuntimeError: print(n, flush=True)", memory=1 << 33) == "16\n"


@MODES
def test_too_many_processes(mode):
    """40 at most where nothing but the launcher's counting may hold them: this runs as root as well."""
    code = "import os, time\nfor _ in range(40):\n  if os.fork() == 0: time.sleep(30); os._exit(0)\ntime.sleep(30)"
    result = run(code, mode=mode, **{**PATIENT, "processes": 8})
    assert result.status == ("error" if mode == "namespaces" else result.status) and result.status in ("error", "processes")
    assert "BlockingIOError" in result.stderr or result.status == "processes"
    assert result.seconds < 20 and not children()


# -- what it must not see or touch -------------------------------------------------------------------------------------


@MODES
def test_e18_no_environment(mode, monkeypatch):
    monkeypatch.setenv("A_SECRET", "hunter2")
    code = "import glob, os; print(dict(os.environ)); print([open(p).read() for p in glob.glob('/proc/self/environ')])"
    out = cleanly(code, mode=mode)
    assert "hunter2" not in out and "A_SECRET" not in out and "PATH" not in out
    names = cleanly("import os; print(*sorted(os.environ))", mode=mode).split()
    assert set(names) <= {"PYTHONHASHSEED", "LC_CTYPE"}


@apart
def test_e18_nothing_can_be_written_outside(tmp_path):
    (tmp_path / "mine").write_text("mine")
    tmp_path.chmod(0o777), (tmp_path / "mine").chmod(0o666)
    places = [f"{tmp_path}/new", f"{tmp_path}/mine", "/usr/new", "/new", "/etc/new", "/dev/shm/new", "/proc/new"]
    out = cleanly(tries(*[f"open({p!r}, 'w').write('x')" for p in places]) + tries(f"open({sys.base_prefix + '/x'!r}, 'w')"))
    assert "done" not in out
    assert [p.name for p in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine").read_text() == "mine"


@apart
def test_what_is_shown_cannot_be_written_even_where_permissions_allow_it(tmp_path, monkeypatch):
    """A Python in one's own home is one's own to write to."""
    (tmp_path / "lib.py").write_text("mine")
    tmp_path.chmod(0o777), (tmp_path / "lib.py").chmod(0o666)
    monkeypatch.setattr(sandbox, "FOLDERS", (*sandbox.FOLDERS, str(tmp_path)))
    code = f"print(open('{tmp_path}/lib.py').read())\n" + tries(f"open('{tmp_path}/lib.py', 'w')", f"open('{tmp_path}/new', 'w')")
    assert cleanly(code) == "mine\nOSError\nOSError\n"  # read-only file system
    assert [p.name for p in tmp_path.iterdir()] == ["lib.py"] and (tmp_path / "lib.py").read_text() == "mine"


@apart
def test_e18_no_file_of_mine_can_be_read(tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "secret").chmod(0o644)
    tmp_path.chmod(0o755)
    places = [f"{tmp_path}/secret", "/etc/passwd", __file__, sandbox.__file__, f"/proc/{os.getpid()}/cmdline"]
    assert "done" not in cleanly(tries(*[f"open({p!r}).read()" for p in places]))
    said = cleanly("import os; print(*sorted(os.listdir('/dev')), os.listdir('/tmp'))")
    assert said == "full null random stdin urandom zero []\n"
    with socket.socket(socket.AF_UNIX) as server:  # of the work folders of runs at the same time, none is to be seen
        server.bind(f"{tmp_path}/socket"), server.listen()
        assert "done" not in cleanly(tries(f"import socket; socket.socket(socket.AF_UNIX).connect('{tmp_path}/socket')"))


@apart
def test_the_project_is_hidden_even_where_the_system_libraries_are(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir(), (tmp_path / "project").mkdir(), (tmp_path / "project" / "tests.json").write_text("[]")
    tmp_path.chmod(0o755), (tmp_path / "project").chmod(0o755)
    show = f"import os; print(os.listdir({str(tmp_path)!r}), os.listdir({str(tmp_path / 'project')!r}))"
    monkeypatch.setattr(sandbox, "FOLDERS", (*sandbox.FOLDERS, str(tmp_path)))
    assert "tests.json" in cleanly(show)
    monkeypatch.setattr(sandbox, "HIDDEN", (str(tmp_path / "project"),))
    assert "tests.json" not in cleanly(show) and "project" in cleanly(show)


@apart
def test_e18_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # it is there
        ways = f"socket.create_connection(('127.0.0.1', {port}), 2)", "socket.gethostbyname('a.b')"
        out = cleanly("import socket\n" + tries(*ways))
    assert "done" not in out


@apart
def test_no_other_process_can_be_seen_or_ended():
    code = "import os, signal\nprint(os.getpid() < 10, os.getuid() != 0)\nsignal.signal(15, signal.SIG_IGN)\n"
    code += tries(f"os.kill({os.getpid()}, 0)", "os.kill(os.getppid(), 9)", "os.setuid(0)", "os.setgroups([0])")
    lines = cleanly(code + "try: os.kill(-1, 15)\nexcept OSError: pass").split()
    assert lines[:3] == ["True", "True", "ProcessLookupError"] and "done" not in lines[4:] and len(lines) == 6


@apart
def test_the_root_cannot_be_left_or_changed():
    setup = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code = setup + "".join(
        f"print({call} >= 0)\n"
        for call in (
            "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
            "libc.mount(None, b'/usr', None, 0x20 | 0x1000, None)",  # make it writable again
            "libc.umount2(b'/tmp', 2)",
            "libc.chroot(b'/tmp')",
            "libc.sethostname(b'x', 1)",
            "libc.setns(0, 0)",
            "libc.ptrace(16, 1, None, None)",  # attach to process 1
            "libc.unshare(0x10000000 | 0x20000)" if PROC else "-1",  # user and mount namespaces of its own
        )
    )
    assert cleanly(code) == "False\n" * 8


# -- nothing is left ---------------------------------------------------------------------------------------------------


def test_a_sandbox_that_cannot_start_says_so():
    with pytest.raises(RuntimeError, match="^sandbox: FileNotFoundError"):
        sandbox.execute(["/no/such/program"], **SMALL, output=1000, mode="none")


def test_isolation_is_said_in_one_line():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom nanoragen.envs.sandbox import isolation\nisolation(); isolation()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("sandbox: programs run ")
    assert ("WARNING" in done.stderr or "NOT" in done.stderr) == (BEST != "namespaces")


def test_without_namespaces_it_falls_back_and_warns(monkeypatch, capfd):
    real = sandbox.run

    def refused(*args, mode=None, **options):
        if mode == "namespaces":
            raise RuntimeError("sandbox: unshare: Operation not permitted")
        return real(*args, mode=mode, **options)

    monkeypatch.setattr(sandbox, "run", refused)
    assert sandbox.isolation.__wrapped__() in ("nobody", "none")
    said = capfd.readouterr().err
    assert "NOT" in said or "WITHOUT" in said
    assert "Operation not permitted" in said and said.count("\n") == 1
