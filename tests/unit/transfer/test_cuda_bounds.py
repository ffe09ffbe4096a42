"""How much of the link the GPU engine enqueues in one go, and ahead."""

from __future__ import annotations

import pytest

from kvortex.messages import Direction
from kvortex.transfer.cuda import _bounds

LINK = 50e9


@pytest.mark.parametrize(
    ("direction", "block_bytes", "rows", "blocks", "pieces"),
    [
        (Direction.LOAD, 16 << 20, 32, 3, 8),  # 1 ms of the link, 96 copies
        (Direction.STORE, 16 << 20, 32, 14, 4),  # 4.7 ms and 448 copies
        (Direction.LOAD, 2 << 20, 32, 28, 8),
        (Direction.STORE, 2 << 20, 32, 32, 14),  # no more than 1,024 copies
        (Direction.STORE, 128 << 10, 32, 32, 16),
        (Direction.STORE, 1 << 30, 32, 1, 4),
    ],
)
def test_a_piece_is_some_milliseconds_or_a_thousand_copies(
    direction: Direction, block_bytes: int, rows: int, blocks: int, pieces: int
) -> None:
    bounds = _bounds(direction, LINK, block_bytes, rows)
    assert bounds.piece_bytes == blocks * block_bytes
    assert bounds.ahead_bytes == pieces * bounds.piece_bytes


def test_only_pieces_of_few_copies_are_enqueued_by_the_models_thread() -> None:
    assert _bounds(Direction.LOAD, LINK, 16 << 20, 32).inline_pieces > 0
    assert _bounds(Direction.LOAD, LINK, 2 << 20, 32).inline_pieces == 0
