"""One direction's way through a GPU: orders wait in a queue, and a bounded part of them is enqueued on a stream.

    add -> OrderQueue -> a piece is enqueued (at most AHEAD bytes) -> its end is reached -> OrderQueue -> collect
                            +-- held: its slots are not pinned yet
                            +-- copied by the lane's own thread: they never will be

What is enqueued runs without the host. The lane's thread only tops it up while more is waiting, so the link
does not wait for whoever holds the interpreter. What has not been enqueued can still be dropped.

Stores and prefetches have time: few requests ever wait for one, and all wait while the model's thread, from which
enqueueing takes the interpreter, launches a step. So while a lane has nothing else, its own thread enqueues them, and
not during a launch.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvortex.messages import CopyOrder, Direction, IntArray, JobId, JobResult
from kvortex.transfer.base import Fence
from kvortex.transfer.queue import OrderQueue, Piece

MAX_PIECES: Final = 64
"""Bound on the pieces enqueued at once, however small they are."""

_POLL_S: Final = 0.001


class End(Protocol):
    """A point of a stream. Both methods raise RuntimeError when the device has failed."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None: ...

    def hold(self, stream: Any) -> None:
        """What `stream`, the device's own type, is given from now on runs behind it."""
        ...


class StreamMover(Protocol):
    """Enqueues copies on one stream, in order. Raises RuntimeError for what the device refuses."""

    def enter_thread(self) -> None:
        """Prepares the calling thread, which is the lane's own."""
        ...

    def wait_for(self, fence: Fence) -> None:
        """What is enqueued from now on runs behind the fence."""
        ...

    def enqueue(self, piece: Piece, *, pinned: bool) -> None:
        """Enqueues a piece's copies; where its slots are not `pinned`, returns when they have been moved.

        Part of them may have been enqueued when it raises.
        """
        ...

    def mark(self) -> End:
        """The end of all that has been enqueued."""
        ...


class Pinning(Protocol):
    """How far a slab has been pinned: `PinnedSlab`."""

    @property
    def is_pinning(self) -> bool: ...

    @property
    def refusal(self) -> str: ...

    def is_pinned(self, slots: IntArray) -> bool: ...


@dataclass(frozen=True, slots=True)
class LaneBounds:
    """
    Attributes:
        piece_bytes: enqueued in one go.
        ahead_bytes: enqueued and not ended; what the link works through while nobody looks.
        inline_pieces: how many of them whoever adds or collects enqueues at most, before the lane's thread takes
            over, where a request waits for the bytes. 0 where a piece is so many copies that enqueueing it takes the
            model's thread too long.
        bytes_per_s: what the lane moves beside a running model, for promises.
        patience_s: how long the lane's thread, if it has time, lets whoever called it go on.
    """

    piece_bytes: int
    ahead_bytes: int
    inline_pieces: int
    bytes_per_s: float
    patience_s: float = 0.0


@dataclass(slots=True)
class _Waiting:
    """A job not answered yet: what its first byte must wait for, until when it counts, and whether a request waits."""

    fence: Fence | None
    late_at_s: float
    is_awaited: bool


@dataclass(slots=True)
class _UnderWay:
    piece: Piece
    end: End
    fault: str | None


class Lane:
    """Serves the orders of one direction, first come first served. `add` and `collect`: one thread only.

    Args:
        queue: this lane's own.
        mover: used by one thread at a time.
        block_bytes: bytes of one block.
        clock: the queue's.
        must_wait: while it is true, nothing is begun. Whoever makes it false collects soon after.
        is_launching: while it is true, nothing is begun that has time. The same.
    """

    def __init__(
        self,
        name: str,
        queue: OrderQueue,
        mover: StreamMover,
        slab: Pinning,
        bounds: LaneBounds,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        must_wait: Callable[[], bool] = lambda: False,
        is_launching: Callable[[], bool] = lambda: False,
    ) -> None:
        self._queue = queue
        self._mover = mover
        self._must_wait = must_wait
        self._is_launching = is_launching
        self._slab = slab
        self._bounds = bounds
        self._block_bytes = block_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: dict[JobId, _Waiting] = {}
        self._num_awaited = 0
        self._under_way: deque[_UnderWay] = deque()
        self._bytes_ahead = 0
        self._held: Piece | None = None
        self._is_enqueueing = False
        self._fault: tuple[JobId, str] | None = None
        self._thread_is_needed = False
        self._closed = False
        self._thread = threading.Thread(target=self._top_up, name=f"kvortex-{name}", daemon=True)
        self._thread.start()

    def add(self, orders: Sequence[CopyOrder], fence: Fence) -> None:
        """Takes orders whose first byte must wait for the fence."""
        with self._changed:
            now_s = self._clock()
            for order in orders:
                is_awaited = order.direction is Direction.LOAD and not order.is_prefetch
                self._jobs[order.job_id] = _Waiting(fence, now_s + order.deadline_s, is_awaited)
                self._num_awaited += is_awaited
            self._queue.add(orders)
        self._go_on()

    def collect(self) -> list[JobResult]:
        """The answers since the last call; never waits for a copy."""
        if not self._jobs:
            return []
        with self._changed:
            self._take_note()
            answers = self._queue.answers()
            self._drop_held_if_late()
        self._go_on()
        answers += self._queue.answers()
        for answer in answers:
            self._num_awaited -= self._jobs.pop(answer.job_id).is_awaited
        return answers

    def promise(self, window_s: float, never: Collection[JobId] = ()) -> list[JobId]:
        """Loads that will have ended within `window_s`, but `never` these; see `CopyEngine.promise`."""
        if not self._jobs or self._slab.refusal or not self._changed.acquire(blocking=False):
            return []
        try:
            self._take_note()
            if self._held is not None:
                return []
            max_blocks = int(window_s * self._bounds.bytes_per_s) // self._block_bytes
            return self._queue.promise(max_blocks, never)
        finally:
            self._changed.release()

    def end_of(self, job_ids: Collection[JobId]) -> End | None:
        """The end of these promised jobs, after enqueueing what of them is not yet, past every bound; None if ended.

        Raises:
            RuntimeError: one of them was refused. Kernels would run on bytes that are not there.
        """
        while True:
            with self._changed:
                # The lane's thread may be in the middle of a piece, which comes first.
                self._changed.wait_for(lambda: not self._is_enqueueing)
                self._take_note()
                if not self._queue.has_waiting(job_ids):
                    if fault := self._queue.fault_of(job_ids):
                        raise RuntimeError(f"a promised load failed: {fault}")
                    self._call_thread()  # it may have left the queue to this thread
                    ends = [way.end for way in self._under_way if way.piece.job_id in job_ids]
                    return ends[-1] if ends else None
                full = len(self._under_way) >= MAX_PIECES
                piece = None if full else self._queue.take(self._bounds.piece_bytes, 0)
                self._is_enqueueing = piece is not None
                first = self._under_way[0].end if full else None
            if piece is not None:
                self._settle(piece, *self._start(piece, pinned=True))
            else:
                assert first is not None, f"jobs {job_ids} wait in a queue that gives nothing"
                self._wait(first)

    def close(self, end_s: float) -> bool:
        """Drops what is not enqueued and waits for the rest until `end_s` of time.monotonic. True if it ended."""
        with self._changed:
            self._closed = True
            self._queue.close()
            self._held = None
            self._changed.notify_all()
        # The thread first: it may be enqueueing one more piece.
        self._thread.join(max(0.0, end_s - time.monotonic()))
        while True:
            with self._changed:
                self._take_note()
                has_ended = not self._under_way and not self._thread.is_alive()
            if has_ended or time.monotonic() >= end_s:
                break
            time.sleep(_POLL_S)
        if has_ended:
            self._jobs.clear()
            self._num_awaited = 0
        return has_ended

    def _go_on(self) -> None:
        """Does a bounded part of what can be done now, and has the lane's thread do the rest."""
        if self._has_time:
            is_left = self._held is not None or self._queue.has_waiting(self._jobs)
        else:
            is_left = self._enqueue_what_fits(self._bounds.inline_pieces, may_block=False)
        if is_left:
            with self._changed:
                self._call_thread()

    @property
    def _has_time(self) -> bool:
        return not self._num_awaited

    def _enqueue_what_fits(self, max_pieces: float, *, may_block: bool) -> bool:
        """Enqueues pieces, without the lock; one thread at a time, the other leaves it to that one.

        Returns:
            True when it stopped at `max_pieces`. What is enqueued ends meanwhile, so there is no other bound.
        """
        num_pieces = 0
        while num_pieces < max_pieces:
            begun = self._begin_piece(may_block)
            if begun is None:
                return False
            num_pieces += 1
            piece, pinned = begun
            self._settle(piece, *self._start(piece, pinned=pinned))
        return True

    def _settle(self, piece: Piece, end: End | None, fault: str | None) -> None:
        """What `_start` has enqueued is under way; another thread may enqueue."""
        with self._changed:
            self._is_enqueueing = False
            if end is None:
                self._queue.finish(piece, fault)
            else:
                if fault is not None:
                    self._queue.fail(piece, fault)
                self._under_way.append(_UnderWay(piece, end, fault))
                self._bytes_ahead += self._bytes_of(piece)
            self._changed.notify_all()

    def _begin_piece(self, may_block: bool) -> tuple[Piece, bool] | None:
        """The piece to enqueue now, and whether its slots are pinned."""
        with self._changed:
            self._take_note()
            if self._is_enqueueing or self._closed or self._must_wait() or (self._has_time and self._is_launching()):
                return None
            if self._bytes_ahead >= self._bounds.ahead_bytes or len(self._under_way) >= MAX_PIECES:
                self._call_thread()
                return None
            piece, self._held = self._held or self._queue.take(self._bounds.piece_bytes, 0), None
            if piece is None:
                return None
            # Asked first: once pinning has ended, what is not pinned never will be.
            is_pinning = self._slab.is_pinning
            is_pinned = self._slab.is_pinned(piece.slots)
            if not is_pinned and (is_pinning or not may_block):
                self._held = piece
                if not is_pinning:
                    self._call_thread()
                return None
            self._is_enqueueing = True
            return piece, is_pinned

    def _start(self, piece: Piece, *, pinned: bool) -> tuple[End | None, str | None]:
        """Enqueues a piece: its end, where something of it may be under way, and what went wrong."""
        if self._fault is not None and piece.job_id == self._fault[0]:
            return None, self._fault[1]
        fault: str | None = None
        try:
            job = self._jobs.get(piece.job_id)
            if job is not None and job.fence is not None:
                self._mover.wait_for(job.fence)
                job.fence = None
            self._mover.enqueue(piece, pinned=pinned)
        except Exception as error:  # noqa: BLE001 - a kernel's compiler may raise anything: it is this order's answer
            fault = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            self._fault = piece.job_id, fault
        try:
            return self._mover.mark(), fault
        except RuntimeError as error:  # the device has failed: nothing runs on it any more
            return None, fault or str(error)

    def _take_note(self) -> None:
        """Finishes the pieces whose end is reached. Holds the lock, like the rest."""
        while self._under_way:
            first = self._under_way[0]
            try:
                if not first.end.is_reached():
                    return
            except RuntimeError as error:  # the device has failed: nothing runs on it any more
                first.fault = first.fault or str(error)
            self._under_way.popleft()
            self._bytes_ahead -= self._bytes_of(first.piece)
            self._queue.finish(first.piece, first.fault)

    def _drop_held_if_late(self) -> None:
        """A held piece has not begun; the queue, which handed it out, waits for it before it answers."""
        if self._held is not None and self._clock() >= self._jobs[self._held.job_id].late_at_s:
            piece, self._held = self._held, None
            self._queue.finish(piece, "its slots were not pinned in time")

    def _bytes_of(self, piece: Piece) -> int:
        return len(piece.gpu_blocks) * self._block_bytes

    def _call_thread(self) -> None:
        self._thread_is_needed = True
        self._changed.notify_all()

    def _top_up(self) -> None:
        """The thread's life: until the lane is closed."""
        self._mover.enter_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._thread_is_needed or self._closed)
                if self._closed:
                    return
                self._thread_is_needed = False
            if self._bounds.patience_s and self._has_time:
                time.sleep(self._bounds.patience_s)
            self._enqueue_what_fits(math.inf, may_block=True)
            with self._changed:
                # Needed again at once: there is more than fits.
                first = self._under_way[0].end if self._thread_is_needed and self._under_way else None
            if first is not None:
                self._wait(first)

    def _wait(self, end: End) -> None:
        try:
            end.wait()
        except RuntimeError:
            return  # whoever takes note of it meets the same error and answers with it
