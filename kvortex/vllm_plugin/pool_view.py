"""KVortex's view of vLLM's block pool: told when a block becomes complete and when it is taken for something else.

vLLM files complete blocks in a map from hash to block. The view stands in for that map: the same type over the same
entries, and a listener that hears of each entry that comes or goes. It decides nothing and changes no entry.
vLLM replaces the map when its prefix cache is reset; `refresh` notices that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.block_pool import BlockHashToBlockMap

from kvortex.keys import BlockKey

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class PoolListener(Protocol):
    """Hears what happens to complete blocks, on the scheduler thread, in order."""

    def block_cached(self, block_id: int, key: BlockKey) -> None: ...
    def block_uncached(self, block_id: int, key: BlockKey) -> None: ...
    def prefix_cache_reset(self) -> None: ...


class ListenedMap(BlockHashToBlockMap):
    """vLLM's map of complete blocks, with a listener."""

    def __init__(self, listener: PoolListener) -> None:
        super().__init__()
        self._listener = listener

    def insert(self, key: Any, block: KVCacheBlock) -> None:
        super().insert(key, block)
        self._listener.block_cached(block.block_id, BlockKey(key))

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        block = super().pop(key, block_id)
        if block is not None:
            self._listener.block_uncached(block_id, BlockKey(key))
        return block


class PoolView:
    """Reads of vLLM's pool that cost the same however many blocks it has."""

    def __init__(self, pool: BlockPool, listener: PoolListener) -> None:
        self._pool = pool
        self._listener = listener
        self._blocks = pool.blocks
        self._map = ListenedMap(listener)
        self._install()

    def _install(self) -> None:
        self._map._cache = self._pool.cached_block_hash_to_block._cache
        for key, entry in self._map._cache.items():
            for block in entry.values() if isinstance(entry, dict) else (entry,):
                self._listener.block_cached(block.block_id, BlockKey(key))
        self._pool.cached_block_hash_to_block = self._map

    def refresh(self) -> None:
        """To be called before anything else in each hook: notices that vLLM has reset its prefix cache."""
        if self._pool.cached_block_hash_to_block is not self._map:
            self._listener.prefix_cache_reset()
            self._map = ListenedMap(self._listener)
            self._install()

    @property
    def capacity_blocks(self) -> int:
        """Blocks that can hold KV; vLLM keeps one as the null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self._pool.get_num_free_blocks())

    @property
    def in_use_blocks(self) -> int:
        """Blocks that requests hold now."""
        return self.capacity_blocks - self.free_blocks

    @property
    def hash_block_size(self) -> int:
        return int(self._pool.hash_block_size)

    def in_use(self, block_id: int) -> bool:
        """True while a request holds the block; a complete block not in use is cold."""
        return bool(self._blocks[block_id].ref_cnt > 0)

    def next_taken(self) -> Iterator[int]:
        """The blocks that no request holds, in the order in which vLLM takes them. Costs those asked for."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block is not self._pool.free_block_queue.fake_free_list_tail:
            yield block.block_id
            block = block.next_free_block

    def is_null(self, block_id: int) -> bool:
        return bool(self._blocks[block_id].is_null)
