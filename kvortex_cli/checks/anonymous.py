"""Makes what `doctor` prints fit for a public issue: no secrets, no names of people or of the host."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path

from kvortex.config.redaction import HIDDEN, hide_secrets

_HOME_OF_SOMEBODY = re.compile(r"(?<=/home/)[^/\s'\"]+|(?<=/Users/)[^/\s'\"]+")
_SHORTEST_HOST = 3


def anonymous(text: str, environ: Mapping[str, str], *, host: str | None = None) -> str:
    """The text with ~ for this user's home, and *** for what else names somebody or opens something.

    Args:
        host: this machine's name; asked of the kernel when None.
    """
    home = environ.get("HOME", "")
    if len(Path(home).parts) > 1:
        text = re.sub(re.escape(home.rstrip("/")) + r"(?![\w.-])", "~", text)
    text = _HOME_OF_SOMEBODY.sub(HIDDEN, text)
    host = socket.gethostname() if host is None else host
    for name in dict.fromkeys((host, host.split(".")[0])):
        if len(name) >= _SHORTEST_HOST and name != "localhost":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", HIDDEN, text)
    return hide_secrets(text, environ)
