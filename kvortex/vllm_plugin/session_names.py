"""By which name, and in whose scope, a request's session goes.

vLLM 0.32   the body's `session_id` and the header `X-Session-ID` reach the engine as `Request.session_id`
every one   `kv_transfer_params` of the body reach it as they are; KVortex's middleware puts there what vLLM drops:
            the header, `session_id` and `prompt_cache_key` (`session_middleware.py`), and which API key it was
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvortex.cache.sessions.session import Scope, scope_of, session_name

if TYPE_CHECKING:
    from vllm.v1.request import Request

SESSION_PARAM: Final = "session_id"
CALLER_PARAM: Final = "kvortex_caller"


def scope_and_name(request: Request) -> tuple[Scope, str | None]:
    """The request's scope, and its session's name; None where it gives none."""
    params = request.kv_transfer_params or {}
    caller = params.get(CALLER_PARAM)
    scope = scope_of(request.cache_salt, caller if isinstance(caller, str) else "")
    given = getattr(request, "session_id", None) or params.get(SESSION_PARAM)
    return scope, session_name(given)
