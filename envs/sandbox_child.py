"""The other side of sandbox.py: isolate, limit, run one program, leave nothing behind. Standard library only.

    trainer -> launcher (this file) -> init (with namespaces: process 1 of its own) -> program

The launcher is trusted and keeps the time. When the program ends, is late, or the trainer says so (SIGTERM) or is gone, it ends
whatever the program has started, also what called setsid or forked twice, waits for all of it, and writes one JSON line.
With namespaces, ending process 1 ends all the others (the kernel does it). Without, orphans come back to the launcher
(PR_SET_CHILD_SUBREAPER), which ends its descendants until there are none.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time

NOBODY = 65534
FILE_SIZE, FOLDER_SIZE, OPEN_FILES = 16 << 20, 64 << 20, 64
NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000 | 0x04000000  # mounts, IPC, processes, network, host name
NEW_USER = 0x10000000
DEVICES = ("null", "zero", "full", "random", "urandom")
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    """A function of the C library; OSError naming it where it fails."""
    args = [os.fsencode(a) if isinstance(a, str) else a for a in args]
    if getattr(libc, name)(*args) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option, value):
    call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def mount(source, target, kind=None, flags=0, data=None):
    call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def change(folder, add, clear, recursive=False):
    """Mount attributes of a folder, and of all that is mounted below (mount_setattr, Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(add, clear, 0, 0)
    call("mount_setattr", -100, folder, 0x8000 if recursive else 0, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)))


def new_namespaces():
    """As root directly; otherwise inside a new user namespace, where the user stays who they are."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NEW_NAMESPACES | (NEW_USER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def private_root(root, folders, hidden, stdin):
    """Make `root` the root: `folders` of the system (read-only), a few devices, and an empty /tmp in memory. Nothing else."""
    bind, private, nosuid, nodev = 0x1000 | 0x4000, 0x40000 | 0x4000, 2, 4
    mount(None, "/", None, private)  # nothing that is mounted from here on is seen outside
    with open("main.py", "rb") as file:
        main = file.read()
    mount("none", root, "tmpfs", nosuid, "size=4m,mode=755")
    for folder in ("/dev", "/tmp", "/proc"):
        os.mkdir(root + folder)
    mount("none", root + "/tmp", "tmpfs", nosuid | nodev, f"size={FOLDER_SIZE},nr_inodes=4096,mode=1777")
    for folder in folders:
        if os.path.islink(folder):  # /lib -> usr/lib
            os.symlink(os.readlink(folder), root + folder)
        elif os.path.isdir(folder) and not os.path.isdir(root + folder):
            os.makedirs(root + folder)
            mount(folder, root + folder, None, bind)
    for folder in filter(os.path.isdir, (root + h for h in hidden)):
        mount("none", folder, "tmpfs", nosuid, "size=4k,mode=755")
    for source, name in [(f"/dev/{d}", d) for d in DEVICES] + [(stdin, "stdin")]:
        open(f"{root}/dev/{name}", "w").close()
        mount(source, f"{root}/dev/{name}", None, bind)
    with open(root + "/main.py", "wb") as file:
        file.write(main)
    read_only, no_setuid = 1, 2
    change(root, read_only | no_setuid, 0, recursive=True)
    change(root + "/tmp", 0, read_only)
    try:
        mount("none", root + "/proc", "proc", nosuid | nodev)  # of these processes only
    except OSError:
        pass  # refused inside most containers; Python does without
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", 2)  # MNT_DETACH: the old root is gone
    os.chdir("/tmp")


def become_nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def tasks_of_user():
    """Threads that run as this user now: RLIMIT_NPROC counts them all where there is no user namespace."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                found += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass  # it ended meanwhile
    return found


def program(job):
    """Limits, then the program in place of this process. Never returns."""
    os.setsid()
    if os.getuid() == 0 and job["nobody"]:
        become_nobody()
    before = 0
    if job["namespaces"]:
        call("unshare", NEW_USER)  # processes are counted per user namespace (Linux 5.14), and root's are not limited
        try:
            with open("/proc/sys/user/max_user_namespaces", "w") as file:
                file.write("0")  # of this namespace's: in a further one the program could mount, and set up networks
        except OSError:
            pass  # no /proc
    else:
        before = tasks_of_user()
    seconds = math.ceil(job["seconds"])
    for what, soft, hard in (
        (resource.RLIMIT_AS, job["memory"], job["memory"]),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, FILE_SIZE, FILE_SIZE),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, before + job["processes"], before + job["processes"]),
    ):
        most = resource.getrlimit(what)[1]
        resource.setrlimit(what, (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most)))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execve(job["argv"][0], job["argv"], job["environment"])


def forked(work, report):
    """fork; the child does `work` and reports what goes wrong."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        os.write(report, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    os._exit(1)


def init(job, report, proc):
    """Process 1 of the namespace: adopts and reaps, and ends with the program."""
    os.close(proc)
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    private_root(os.path.abspath("work"), job["folders"], job["hidden"], os.path.abspath("stdin"))
    pid = forked(lambda: program(job), report)
    os.close(report)
    while True:
        done, code = os.wait()
        if done == pid:
            os._exit(0 if code == 0 else 1)


def descendants(pid="self"):
    """Numbers of all processes below this one."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = file.read().split()
            for child in children:
                found += [int(child), *descendants(child)]
        except OSError:
            pass  # it ended meanwhile
    return found


def starved(pid, proc):
    """Seconds that process `pid` and its children were ready to run while others had the processor. proc: handle of /proc."""
    found = 0.0
    try:
        for name in [pid, *_read(f"{pid}/task/{pid}/children", proc).split()]:
            found += int(_read(f"{name}/schedstat", proc).split()[1]) / 1e9
    except OSError:
        pass  # it ended meanwhile, or the kernel does not tell
    return found


def _read(name, folder):
    with open(os.open(name, os.O_RDONLY, dir_fd=folder)) as file:
        return file.read()


def watch(pid, job, proc):
    """Wait for the end of process `pid`, the time limit, too many processes, or SIGTERM: (status, seconds without waiting)."""
    start, waited = time.monotonic(), 0.0
    while True:
        left = start + waited + job["seconds"] - time.monotonic()
        if left <= 0:  # on a busy machine a right program must not be judged by the others'
            waited, before = min(starved(pid, proc), job["patience"]), waited
            if waited <= before:
                return "timeout", time.monotonic() - start - waited
            continue
        got = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, left if job["namespaces"] else min(left, 0.01))
        if got and got.si_signo == signal.SIGTERM:
            return "killed", time.monotonic() - start - waited
        while got:
            done, code = os.waitpid(-1, os.WNOHANG)
            if done == pid:
                return "ok" if code == 0 else "error", time.monotonic() - start - waited
            if not done:
                break
        if not job["namespaces"] and len(descendants()) > job["processes"]:
            return "processes", time.monotonic() - start - waited


def end_all(pid, job):
    """Nothing of the program is left when this returns."""
    while True:
        for victim in [pid] if job["namespaces"] else descendants():
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def launch(job, report):
    prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the trainer is gone
    if os.getppid() != job["parent"]:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    os.set_inheritable(report, False)
    os.umask(0o022)
    proc = os.open("/proc", os.O_RDONLY)  # still at hand when the root is another
    if job["namespaces"]:
        new_namespaces()
        pid = forked(lambda: init(job, report, proc), report)
    else:
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        os.rename("main.py", "work/main.py")
        os.chdir("work")
        pid = forked(lambda: program(job), report)
    status, seconds = watch(pid, job, proc)
    end_all(pid, job)
    os.write(report, json.dumps({"status": status, "seconds": seconds}).encode() + b"\n")


if __name__ == "__main__":
    report = int(sys.argv[1])
    try:
        launch(json.load(open("job.json")), report)
    except Exception as error:
        os.write(report, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
