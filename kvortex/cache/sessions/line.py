"""A session as one line of `/kvortex/sessions`."""

from __future__ import annotations

import math
from typing import Any, Final

from kvortex.cache.index import BlockIndex
from kvortex.cache.residency import Residency
from kvortex.cache.sessions.book import SessionBook
from kvortex.cache.sessions.session import Session

MOST_SESSIONS: Final = 100
"""Lines that the document has."""


def session_line(
    session: Session, book: SessionBook, residency: Residency, index: BlockIndex, now: float
) -> dict[str, Any]:
    """When it spoke, when it is expected, where its blocks are, what was brought for it. Costs its blocks."""
    silent_s = now - session.silent_since if session.is_silent else None
    expected_s = book.expected_in_s(session, now) if session.is_silent else 0.0
    return {
        "session": session.name or f"#{session.number}",
        "named": session.name is not None,
        "salted": bool(session.scope.salt),
        "turns": session.turns,
        "requests": session.requests,
        "tokens": session.num_tokens,
        "silent_s": None if silent_s is None else round(silent_s, 3),
        "expected_in_s": round(expected_s, 3) if math.isfinite(expected_s) else None,
        "p_return_60s": round(book.p_return_within(session, now, 60.0), 4),
        "blocks": len(session.keys),
        "vram_blocks": sum(map(residency.holds, session.keys)),
        "ram_blocks": len(index.ready_slots(session.keys)),
        "prefetch": {
            "issued_blocks": session.issued,
            "used_blocks": session.used,
            "wasted_blocks": session.wasted,
            "late_blocks": session.late,
        },
    }
