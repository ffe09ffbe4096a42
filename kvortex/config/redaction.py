"""Secrets are shown as ***: in every table, JSON output and message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "***"
# Given to vLLM by environment variable: a command line can be read by every user of the machine.
SECRET_OPTIONS: Final = {"api_key": "VLLM_API_KEY", "hf_token": "HF_TOKEN"}
_SECRET_KEY: Final = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|pwd|credentials?|authorization|headers?|cookies?|(api|access|secret|private)[_-]?key)$",
    re.IGNORECASE,
)
_USER_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHORTEST_SECRET: Final = 6
# The working directory, in the environment.
_NOT_SECRET_VARIABLES: Final = frozenset({"PWD", "OLDPWD"})
# Names of headers, not headers.
_NOT_SECRET: Final = frozenset({"allowed_headers"})


def redact(name: str, value: Any) -> Any:
    """The value, with *** for a secret option, for a secret key below, and for the user in a URL.

    Args:
        name: of the option or key that holds the value.
    """
    if value is None or isinstance(value, bool) or value == "":
        return value
    if name in SECRET_OPTIONS or (_SECRET_KEY.search(name) and name not in _NOT_SECRET):
        return HIDDEN
    if isinstance(value, dict):
        return {key: redact(str(key), below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact("", below) for below in value)
    if isinstance(value, str):
        return _USER_IN_URL.sub(HIDDEN, value)
    return value


def hide_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Text of others, such as an exception's, with *** for what the environment holds as a secret and for the user in a
    URL."""
    for name, value in environment.items():
        # A short value would blot out words that are no secret.
        is_secret = _SECRET_KEY.search(name) is not None and name not in _NOT_SECRET_VARIABLES
        if is_secret and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, HIDDEN)
    return _USER_IN_URL.sub(HIDDEN, text)
