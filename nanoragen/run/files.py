"""Files that survive a kill and a full disk: the old one or the new one is there, never a part. Every such write is this one."""

import os
from pathlib import Path


def write_whole(path, text: str):
    """Replace a text file: written beside it, synced to disk, then renamed. OSError leaves the old one, and nothing beside it."""
    path = Path(path)
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        sync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # half a file, where the disk is full


def sync(path: Path):
    """Make a file, or the names in a folder, survive a power cut."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot sync a folder
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
