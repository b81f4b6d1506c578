"""One answer at a time to a grader: counted, timed and watched by an audit hook, with the verdict it must get."""

import math
import os
import sys
import tempfile
import time

import pytest

FOUND = {}  # grader -> [answers, wrong ones, seconds, the longest]
SEEN = []  # what an audit hook saw while a grader was judging
WATCHING = False
FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir",
             "shutil.", "exec", "compile", "pty.", "webbrowser.", "urllib.", "ctypes.", "pickle.")  # fmt: skip


def hook(event, args):
    if WATCHING and (event.startswith(FORBIDDEN) or (event == "open" and _writes(args))):
        SEEN.append((event, str(args)[:200]))


def _writes(args):
    return bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or (
        isinstance(args[1], str) and set(args[1]) & set("wax+")
    )


sys.addaudithook(hook)  # it cannot be taken away again, so it looks only while WATCHING


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """judge(grader, verdict, answer, right): counts, times and watches one answer; verdict() is (reward, success)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    del SEEN[:]

    def one(grader, verdict, answer, right, limit=2.0, watch=True, chance=False):
        global WATCHING
        start, used, WATCHING = time.perf_counter(), time.process_time(), watch
        try:
            reward, success = verdict(answer)
        finally:
            WATCHING = False
        used, took = time.process_time() - used, time.perf_counter() - start  # a busy machine makes no answer slow
        assert type(reward) is float and math.isfinite(reward) and success is right, (answer[:200], reward, success)
        assert chance or (reward > 0.5 if right else reward <= 0.1), (answer[:200], reward)
        assert used < limit, (answer[:200], used)
        assert not SEEN, (answer[:200], SEEN)
        found = FOUND.setdefault(grader, [0, 0, 0.0, 0.0])
        found[0], found[1], found[2], found[3] = found[0] + 1, found[1] + (not right), found[2] + took, max(found[3], took)

    yield one
    assert os.listdir(tmp_path) == ["tmp"] and os.listdir(tmp_path / "tmp") == []
    assert handles is None or len(os.listdir("/proc/self/fd")) <= handles + 3  # the judge of mathematics keeps its three


def stepped(env, make_action="{}".format, seed=None):
    """A verdict that plays an answer from a fresh start."""

    def verdict(answer):
        env.reset(seed=seed)
        _, reward, terminated, _, info = env.step(make_action(answer))
        assert terminated or not info["success"]
        return reward, info["success"]

    return verdict
