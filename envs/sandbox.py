"""Run a program that nobody has read: time, memory, output, files and processes are limited, and nothing of it is left behind.

    run("print(input())", "hello\n").stdout       # "hello\n"
    run("while True: pass", seconds=1).status     # "timeout"
    isolation()                                   # "namespaces", "nobody" or "none": what this machine allows

Linux only. What is in force, found out once by trying, and said in one line on standard error:

    namespaces   its own processes, no network, an empty /tmp in memory, Python's and the system's libraries (read-only), no
                 other file. As root it runs as nobody. Needs Linux 5.14 and namespaces allowed.
    nobody       limits only, as another user (the trainer is root): it reads what everybody may read, and has the network
    none         limits only: it can do whatever the user who started the trainer can

envs/README.md has the whole table. The limit on memory is one process's: `processes` of them may hold that many times as much.
sandbox_child.py does the work.

Left out: seccomp, and cgroups (they need rights that a trainer seldom has). The kernel is shared, so this is no defence
against a program that attacks the kernel itself.
"""

import contextlib
import functools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)  # not the virtual environment's link
FOLDERS = ("/usr", "/lib", "/lib64", "/lib32", "/nix/store", sys.base_prefix)
HIDDEN = (str(Path(__file__).resolve().parents[1]),)  # this project, should it be installed below one of them
PATIENCE = 10  # times its seconds may pass where a program has to wait for a processor
SETUP = 60.0  # seconds that the launcher may take beyond those of the program
PREFIX = "nanoragen-sandbox-"
NOBODY = 65534
WARNINGS = {
    "namespaces": "in its own namespaces, without network and without your files",
    "nobody": "as nobody, with limits, but WITHOUT namespaces: it has the network, and reads what everybody may read",
    "none": "with limits, but NOT isolated: it can read, write and send whatever you can",
}


@dataclass
class Result:
    """status: "ok" (exit code 0), "error" (any other, or a signal), "timeout", "output" (more than allowed), "processes"."""

    status: str
    stdout: str
    stderr: str
    seconds: float  # wall time of the program, without what it had to wait for a processor
    isolation: str


def run(code: str, stdin: str = "", *, seconds=2.0, memory=256 << 20, output=1 << 16, processes=16, mode=None) -> Result:
    """Run a Python program (standard library only) with this standard input.

    seconds: wall time of all, not counting time in which the machine was too busy to run it (at most PATIENCE times as much
    passes), and CPU time of each process; memory: bytes of address space of each process; output: bytes of
    standard output and error together; processes: threads and processes at a time. mode: an isolation other than the best one.
    RuntimeError where the sandbox itself fails, never for what the program does.
    """
    # -I would ignore PYTHONHASHSEED, without which the order of a set changes from run to run. The environment is empty anyway.
    argv = [PYTHON, "-s", "-S", "-X", "utf8", "/main.py" if (mode or isolation()) == "namespaces" else "main.py"]
    return execute(
        argv, stdin, code, environment={"PYTHONHASHSEED": "0"},
        seconds=seconds, memory=memory, output=output, processes=processes, mode=mode,
    )  # fmt: skip


def execute(
    argv, stdin="", main="", *, environment=None, folders=(), seconds, memory, output, processes, mode=None
) -> Result:  # fmt: skip
    """Run any program under the limits of `run`. main: text of the file main.py; folders: more to show it (namespaces only)."""
    mode = mode or isolation()
    _sweep()
    job = {
        "argv": list(argv), "environment": environment or {}, "folders": [*FOLDERS, *folders], "hidden": HIDDEN,
        "seconds": seconds, "memory": int(memory), "processes": processes,
        "namespaces": mode == "namespaces", "nobody": mode != "none", "parent": os.getpid(),
        "patience": (PATIENCE - 1) * seconds,
    }  # fmt: skip
    with _folder() as folder:
        (folder / "work").mkdir()
        (folder / "work").chmod(0o777)  # nobody writes there; the folder above it is closed
        if mode == "nobody" and os.getuid() == 0:  # and must be passed through, to the path of main.py
            os.chown(folder, -1, NOBODY)
            folder.chmod(0o710)
        for file, text in (("main.py", main), ("stdin", stdin), ("job.json", json.dumps(job))):
            (folder / file).write_bytes(text.encode(errors="replace"))
            (folder / file).chmod(0o444)
        try:
            report, out, err, full = _launch(folder, seconds, output)
        finally:
            _remove(folder / "work")
    lines = report.decode().splitlines()
    found = json.loads(lines[0]) if lines else {"failed": "the launcher died"}
    if "failed" in found:
        raise RuntimeError(f"sandbox: {found['failed']} {err.decode(errors='replace')[-500:]}".strip())
    status = "output" if full else found["status"]
    return Result(status, out.decode(errors="replace"), err.decode(errors="replace"), found["seconds"], mode)


@contextlib.contextmanager
def _folder():
    """A temporary folder that this process holds a lock on, so that others can tell it from what a killed trainer left."""
    import fcntl  # not on every system, and this file can be imported on all

    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        handle = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(handle)


@functools.cache
def _sweep():
    """Once in a process: remove the folders of trainers that were killed. Theirs are not locked; new ones not yet, so they stay."""
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            about = folder.lstat()
            if about.st_uid != os.getuid() or not folder.is_dir() or time.time() - about.st_mtime < SETUP:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue  # another process has removed it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        finally:
            os.close(handle)
        if (folder / "work").is_dir():
            _remove(folder / "work")
        shutil.rmtree(folder, ignore_errors=True)


def _launch(folder, seconds, output):
    """(report, stdout, stderr, whether there was more output than allowed) of the launcher, which is gone afterwards."""
    reader, writer = os.pipe()
    with open(folder / "stdin", "rb") as stdin:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), str(writer)],
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writer],
            cwd=folder, env={}, start_new_session=True, bufsize=0,
        )  # fmt: skip
    os.close(writer)
    got = {reader: bytearray(), process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    streams, full = list(got), False
    try:
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream, selectors.EVENT_READ)
            end = time.monotonic() + PATIENCE * seconds + SETUP
            while selector.get_map() and time.monotonic() < end:
                for key, _ in selector.select(end - time.monotonic()):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd == reader:
                        got[reader] += data
                    else:
                        room = output - sum(len(got[s]) for s in streams[1:])
                        got[key.fd] += data[: max(0, room)]
                        if len(data) > room and not full:
                            full = True
                            process.terminate()  # the launcher ends the program; what is still in the pipes is dropped
    finally:  # also when the caller's own time limit strikes
        process.terminate()
        try:
            process.wait(SETUP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(reader)
        process.stdout.close()
        process.stderr.close()
    return (*(bytes(got[s]) for s in streams), full)


def _remove(folder):
    """Remove what the program left, however deep (shutil.rmtree recurses, and a program can nest folders without end)."""
    if os.listdir(folder):
        subprocess.run(["rm", "-rf", str(folder)], stderr=subprocess.DEVNULL, check=False)


@functools.cache
def isolation() -> str:
    """The best that works here. RuntimeError where nothing does."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError("sandbox: programs are run on Linux only; valid: Linux, or an environment without programs")
    why = ""
    for mode in ("namespaces", "nobody", "none") if os.getuid() == 0 else ("namespaces", "none"):
        try:
            probe = run("import os\nos.fork()", processes=1, seconds=5.0, mode=mode)  # must be refused: EAGAIN
        except RuntimeError as error:
            why = why or f" ({error})"
            continue
        if "BlockingIOError" in probe.stderr or (mode == "none" and probe.status in ("ok", "processes")):
            print(f"sandbox: programs run {WARNINGS[mode]}{why if mode != 'namespaces' else ''}", file=sys.stderr)
            return mode
        why = why or f" ({probe.status}: {probe.stderr.strip()[-200:]})"
    raise RuntimeError(f"sandbox: no program can be run here{why}")
