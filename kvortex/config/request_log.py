"""Whether a file can become a server's request log, found before anything is loaded and once more as it is opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvortex.errors import UsageError

FIRST_BYTES: Final = b'{"timestamp":'
"""Of each line of such a log."""


def older(path: Path) -> Path:
    """Where a log goes when it is full or another server begins."""
    return path.with_name(path.name + ".1")


def check_request_log(path: Path) -> None:
    """Changes nothing.

    Raises:
        UsageError: its folder is missing or cannot be written, or it or the file before it is something else than
            such a log: a server moves the one and overwrites the other.
    """
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", hint="make it, or give another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the folder {folder} cannot be written", hint="give a file in one that can")
    for file in (path, older(path)):
        _check_is_log(file)


def _check_is_log(file: Path) -> None:
    try:
        found = file.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no plain file"
        raise UsageError(f"{file} is {kind}", hint="give a file that is not there yet")
    try:
        with file.open("rb") as lines:
            begins = lines.read(len(FIRST_BYTES))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", hint="give another file") from None
    if begins not in (b"", FIRST_BYTES):
        raise UsageError(f"{file} is there and is no request log", hint="give a file that is not there yet")
