"""Environments are other people's code. What goes wrong inside one costs its episode, not the run.

    with containing(episode, seconds): env.step(action)     # an exception, a hang, nonsense: episode.error, truncated "error"

A hang is ended by a timer signal, which reaches Python code of the main thread (also a sleep or a blocking read); elsewhere
there is no limit. Left out: hangs inside C code that never returns to Python, and memory; a worker process would catch those.
"""

import signal
import threading
import traceback
from contextlib import contextmanager


class Leave(SystemExit):
    """Our own end of the process, which no environment's time may swallow."""


class TooManyFaults(RuntimeError):
    """More of a step's episodes were lost to errors than --max_faults allows."""

    def __init__(self, failed, episodes: int, most: float):
        last = failed[-1]
        super().__init__(
            f"env: {len(failed)} of {episodes} episodes failed, the last with seed {last.seed}: "
            f"{last.error.strip().splitlines()[-1]} (see errors.jsonl); valid: at most {most:.0%} (--max_faults)"
        )


@contextmanager
def time_limit(seconds: float | None):
    """TimeoutError in the body after this many seconds, and each second after in case the body catches it. None: no limit."""
    if not seconds or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(number, frame):
        raise TimeoutError(f"longer than {seconds:g} s (--env_timeout)")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def containing(episode, seconds: float | None):
    """Whatever the body raises ends the episode as truncated "error", with the traceback in episode.error.

    Also an exit or a KeyboardInterrupt of the environment's own making. The user's own come as `Leave` (nanoragen/run/signals.py), or, in
    a program that leaves Ctrl-C as Python has it, as KeyboardInterrupt, and go through.
    """
    try:
        with time_limit(seconds):
            yield
    except BaseException as e:
        users = isinstance(e, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if isinstance(e, Leave) or users:
            raise
        episode.error, episode.truncated = traceback.format_exc(), "error"


def split(episodes) -> tuple[list[int], list]:
    """(which episodes were played, the failed ones)."""
    return [i for i, e in enumerate(episodes) if not e.error], [e for e in episodes if e.error]
