"""run.json: which code made a run, when, and for how long; for the report. config.json stays the settings alone.

    {"commit": "5800855...", "versions": {"nanoragen": "0.1.0", ...}, "started": "2026-12-07T09:34:22+0000", "duration": 5.3}

commit: of the checkout, not there where it is none; with "-dirty" where files differ from it. duration: seconds, of all processes
of a resumed run together, up to their last checkpoint or end; started: of the first of them; the rest: of the last.
"""

import json
import platform
import subprocess
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nanoragen
from nanoragen.run.files import write_whole


class RunRecord:
    """folder/run.json, written now and at each `write`. A disk that fails costs the record, never the run."""

    def __init__(self, folder, resumed: bool = False):
        self.path, self.began = Path(folder) / "run.json", time.monotonic()
        before = _read(self.path) if resumed else {}
        self.before, now = before.get("duration", 0.0), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        found = {"commit": commit(), "versions": versions(), "started": before.get("started", now)}
        self.found = {k: v for k, v in found.items() if v}
        self.write()

    def write(self):
        record = self.found | {"duration": round(self.before + time.monotonic() - self.began, 3)}
        try:
            write_whole(self.path, json.dumps(record, indent=1) + "\n")
        except OSError as e:
            warnings.warn(f"{self.path} cannot be written ({e.strerror}); the run goes on without", stacklevel=2)


def _read(path: Path) -> dict:
    """The record of an earlier process, {} where there is none or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    kinds = {"started": str, "duration": (int, float)}
    return {k: found[k] for k, kind in kinds.items() if isinstance(found, dict) and isinstance(found.get(k), kind)}


def commit() -> str:
    """The commit of the checkout that this package is part of, "" where it is none or there is no git."""
    root = Path(nanoragen.__file__).resolve().parents[1]
    if not (root / ".git").exists():  # installed in some other checkout's folder
        return ""
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def versions() -> dict[str, str]:
    """Of this package, Python, and what the numbers of a run depend on."""
    found = {"nanoragen": nanoragen.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # triton, where it has no builds
            continue
    return found
