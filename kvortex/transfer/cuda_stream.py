"""Points of CUDA streams: what a copy waits for, and what tells that it has ended."""

from __future__ import annotations

from typing import Final

import torch

_QUIET_LOOKS: Final = 8


class CudaFence:
    """All that a stream had been given when the fence was made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = _recorded(stream, blocks_thread=False)

    def is_reached(self) -> bool:
        return _has_happened(self._event)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What `stream` is given from now on runs behind the fence."""
        stream.wait_event(self._event)


class StreamEnd:
    """All that one of our streams had been given when it was marked. For `Lane`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = _recorded(stream, blocks_thread=True)

    def move(self, stream: torch.cuda.Stream) -> None:
        """Marks `stream` as it is now instead. Streams that it holds still wait for the point of before."""
        self._event.record(stream)

    def is_reached(self) -> bool:
        return _has_happened(self._event)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What `stream` is given from now on runs behind it."""
        stream.wait_event(self._event)

    def wait(self) -> None:
        """Sleeps, without the interpreter lock, until it is reached."""
        self._event.synchronize()


class ComputeWatch:
    """Whether the model has been still for a while, by looking at its stream now and then."""

    def __init__(self) -> None:
        self._num_idle_looks = 0

    @property
    def is_quiet(self) -> bool:
        """Every step is looked at once while it runs, so a running model is not idle at many looks in a row."""
        return self._num_idle_looks >= _QUIET_LOOKS

    def look(self, stream: torch.cuda.Stream) -> None:
        try:
            is_idle = bool(stream.query())
        except RuntimeError:  # the device has failed, which will be each order's answer
            is_idle = False
        self._num_idle_looks = self._num_idle_looks + 1 if is_idle else 0


class StreamTimer:
    """Measures what a stream is given from here on, by the device's own clock."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin = _timed_event(stream)

    def seconds(self) -> float:
        """Waits until the stream has done it all."""
        end = _timed_event(self._stream)
        end.synchronize()
        return self._begin.elapsed_time(end) / 1e3  # type: ignore[no-any-return]


class CudaStopwatch:
    """From the point at which it was made to `stop`, on one stream, by the device's own clock."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin = _timed_event(stream)
        self._end: torch.cuda.Event | None = None

    def stop(self) -> None:
        self._end = _timed_event(self._stream)

    def seconds(self) -> float | None:
        if self._end is None or not _has_happened(self._end):
            return None
        return self._begin.elapsed_time(self._end) / 1e3  # type: ignore[no-any-return]


def borrowed_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """torch's view of a stream that is not torch's; whoever made it destroys it."""
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]


def _recorded(stream: torch.cuda.Stream, *, blocks_thread: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=blocks_thread)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _has_happened(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
