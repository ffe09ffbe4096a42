"""GPU blocks that KVortex itself takes from vLLM's pool, fills, and gives back as cached ones.

vLLM's own calls only, and its own order: what is taken is what the next request would have been given, and what is
given back lies at the warm end of the free list, where blocks of a request that has just ended lie. Scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvortex.keys import BlockKey

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class PoolBlocks:
    """Takes, publishes and gives back."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def next_free(self) -> Iterator[tuple[int, BlockKey | None]]:
        """The free blocks in the order in which vLLM takes them, with what they would be found under."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block.next_free_block is not None:  # the list's end is no block
            key = block.block_hash
            yield block.block_id, None if key is None else BlockKey(key)
            block = block.next_free_block

    def take(self, count: int) -> list[int]:
        """`count` free blocks; what they held is not found any more. No more than are free."""
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def publish(self, block_ids: Sequence[int], keys: Sequence[BlockKey], start: int) -> None:
        """The blocks hold the KV of these keys, a prompt's blocks from `start` on: they are found from now on."""
        for i, (block_id, key) in enumerate(zip(block_ids, keys, strict=True), start + 1):
            self._pool._insert_block_hash(key, self._pool.blocks[block_id], num_tokens=i * self._block_size)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """They are free: the last one is taken first, and those not published before all others."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def warm(self, keys: Sequence[BlockKey]) -> None:
        """Those of a prompt's blocks that are found count as used now, its tail to be taken before its head."""
        blocks: list[KVCacheBlock] = []
        for key in keys:
            block = self._pool.cached_block_hash_to_block.get_one_block(key)
            if block is not None:
                blocks.append(block)
        self._pool.touch(blocks)
        self._pool.free_blocks(reversed(blocks))
