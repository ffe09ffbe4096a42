"""`MiniVllm` with real bytes: vLLM's block pool and the scheduler side above, the CPU copy engine's threads below.

A complete block holds its key, over and over; 0xEE is what nobody has written. A request that hits a block finds that
block's key in every byte, or the run ends with an assertion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvortex.keys import BlockKey
from kvortex.messages import CopyOrder, Direction, JobResult, LinkFacts, Outcome, StepPlan, StepReport
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cpu import BlockMover, CpuCopyEngine, HostMover
from kvortex.transfer.slab import HostSlab
from tests.fakes.mini_vllm import NOTHING, MiniVllm
from tests.unit.transfer.builders import block_contents, packed, set_block

UNWRITTEN = b"\xee"
TORN = BlockKey(b"bytes of more than one block")
_PAUSE_S = 0.0005


class VramBytes:
    """GPU blocks by number, as the keys that their bytes spell."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def get(self, block_id: int, _default: BlockKey = NOTHING) -> BlockKey:
        return spelled(block_contents(self._layout, block_id))

    def __setitem__(self, block_id: int, key: BlockKey) -> None:
        size = self._layout.block_bytes
        set_block(self._layout, block_id, ((key or UNWRITTEN) * size)[:size])

    def update(self, blocks: Mapping[int, BlockKey]) -> None:
        for block_id, key in blocks.items():
            self[block_id] = key


def spelled(contents: bytes) -> BlockKey:
    """The key that a block's bytes repeat; TORN where they are of several blocks."""
    if contents.strip(UNWRITTEN) == b"":
        return NOTHING
    key = contents[:36]
    return BlockKey(key) if contents == (key * len(contents))[: len(contents)] else TORN


class ByteVllm(MiniVllm):
    """See the module's text.

    Args:
        mover: moves the bytes, given the real one.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        *,
        mover: Callable[[BlockMover], BlockMover] = lambda real: real,
        num_threads: int = 4,
        prefetch: bool = False,
    ) -> None:
        super().__init__(num_blocks, num_slots, prefetch=prefetch)
        self.layout = packed(num_blocks + 1, [40, 100, 64])
        self.slab = HostSlab(num_slots, self.layout.block_bytes)
        for memory in (*self.layout.regions, self.slab.tensor):
            memory.fill_(UNWRITTEN[0])
        self.copier = CpuCopyEngine(
            self.layout,
            self.slab,
            num_threads,
            mover=mover(HostMover(self.layout, self.slab)),
            piece_bytes=self.layout.block_bytes,
        )
        self.in_vram = VramBytes(self.layout)  # type: ignore[assignment]
        self.unanswered = 0
        self._stores: list[CopyOrder] = []

    def _submit(self, plan: StepPlan) -> None:
        """Loads before the step's kernels; stores are kept until they have run."""
        assert not plan.step_loads
        self.request_of.update(plan.requests)
        loads = [*plan.loads, *plan.prefetches]
        for load in loads:
            self.in_vram.update(dict.fromkeys(load.gpu_blocks.tolist(), NOTHING))
        self._stores += plan.stores
        self._send(loads)

    def _send(self, orders: list[CopyOrder]) -> None:
        self.unanswered += len(orders)
        self.copier.submit(orders)

    def answer(self, _rng: object = None) -> None:
        stores, self._stores = self._stores, []
        self._send(stores)
        results = self.copier.poll()
        if not results and self.unanswered:
            time.sleep(_PAUSE_S)
        self.unanswered -= len(results)
        for result in results:
            self._ended(result)
        self.side.answers(StepReport({0: results}, links={0: LinkFacts(1e6, by_layer=False)}))

    def _ended(self, result: JobResult) -> None:
        asked = self.loading.pop(self.request_of.pop(result.job_id, ""), None)
        if asked is not None:
            asked.hit_blocks = asked.hit_blocks if result.outcome is Outcome.DONE else 0
            self.running.append(asked)

    def ram_contents(self) -> dict[BlockKey, BlockKey]:
        """What the bytes spell of every block that a lookup may find in RAM, by its key."""
        index = self.side._index
        keys = [key for slot in range(index.num_slots) if (key := index.key_at(slot)) is not None]
        found = [(keys[i], slot) for i, slot in index.ready_slots(keys).items()]
        size = self.layout.block_bytes
        return {key: spelled(self.slab.tensor[slot].numpy().tobytes()[:size]) for key, slot in found}

    def check_ended(self) -> None:
        """Nothing is under way, nothing is held, and every block of RAM is what it is found as."""
        index = self.side._index
        assert (index.pinned, index.writing, index.doomed, self.unanswered) == (0, 0, 0, 0)
        assert index.free + index.ready == index.num_slots
        wrong = {key: content for key, content in self.ram_contents().items() if content != key}
        assert not wrong, wrong
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1

    def close(self) -> None:
        assert self.copier.close(30)
        self.slab.close()


class SlowMover:
    """Each block of one direction takes so many seconds more, half of them before a byte is moved, half after."""

    def __init__(self, inner: BlockMover, direction: Direction, seconds: float) -> None:
        self._inner = inner
        self._direction = direction
        self._seconds = seconds

    def copy_piece(self, direction: Direction, gpu_blocks, slots) -> None:  # type: ignore[no-untyped-def]
        pause = self._seconds * len(slots) / 2 if direction is self._direction else 0
        time.sleep(pause)
        self._inner.copy_piece(direction, gpu_blocks, slots)
        time.sleep(pause)
