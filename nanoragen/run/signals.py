"""A run is asked to end: by Ctrl-C, SIGTERM and SIGHUP, or by a reader of its output that ends (`| head`).

It loses nothing by it: the step is finished and saved, and `--resume` goes on from there. Left out: stopping in the middle of a
step, which would have nothing whole to save.
"""

import contextlib
import errno
import os
import signal
import sys
import threading

from nanoragen.run.faults import Leave


class Stop:
    """`with Stop() as stop:` notes the first Ctrl-C, SIGTERM or SIGHUP in stop.asked (its name, else None).

    A second leaves at once: SystemExit(128 + its number), and stop.left is its name. A reader that closes standard output
    (`| head`) asks too, as SIGPIPE; what is printed then goes nowhere.
    """

    def __enter__(self):
        self.asked, self.left, self.old = None, None, {}
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers nowhere else
            self.old = {s: signal.signal(s, self._ask) for s in _signals()}
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Unbroken(sys.stdout, self._unread), _Unbroken(sys.stderr, lambda: None)
        return self

    def _unread(self):
        if not self.asked:
            self.asked = "SIGPIPE"
            _tell("nobody reads the output any more: this step is finished and saved, then the run ends; --resume goes on")

    def _ask(self, number, frame):
        if self.asked:
            self.left = signal.Signals(number).name
            raise Leave(128 + number)
        self.asked = signal.Signals(number).name
        _tell(f"{self.asked}: this step is finished and saved, then the run ends; a second one ends it at once")

    def __exit__(self, *error):
        sys.stdout.flush()
        sys.stdout, sys.stderr = self.streams
        for s, handler in self.old.items():
            signal.signal(s, handler)


class _Unbroken:
    """A stream whose reader may go away: that is told once, and the rest goes nowhere. Each line is sent as it is written."""

    def __init__(self, file, broken):
        self.file, self.broken = file, broken

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, text):
        self._try(self.file.write, text)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self):
        self._try(self.file.flush)

    def _try(self, act, *args):
        try:
            act(*args)
        except OSError as e:
            if e.errno not in (errno.EPIPE, errno.EIO):  # the reader has ended; the terminal is closed
                raise
            with contextlib.suppress(OSError):  # also what is still in its buffer
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            self.broken()


def _signals() -> list:
    """Those that ask a run to end. SIGHUP (the terminal closes) is one, but not under nohup."""
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    heard = hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + [hangup] * heard


def leave_on_signals():
    """Ctrl-C, SIGTERM and SIGHUP end the process with one line: for programs that lose nothing by it, and while others still load."""

    def leave(number, frame):
        _tell(f"ended by {signal.Signals(number).name}; what is saved stays as it is")
        os._exit(128 + number)  # an exception could be caught by whatever is being imported

    for number in _signals():
        signal.signal(number, leave)


def _tell(text: str):
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"\n{text}\n".encode())  # print() within a signal handler may meet itself in mid-print
