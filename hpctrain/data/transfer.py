"""Prefetched batches: fetched by a thread, copied to the device during the computation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from hpctrain.data.source import Batch, leaves, map_leaves

__all__ = ["Sent", "Transfer", "read_ahead"]


class Sent(NamedTuple):
    """A batch whose copy may still be under way."""

    batch: Batch
    done: torch.cuda.Event | None


class Transfer:
    """Copies batches to a device. `send` may run in a thread; `receive` runs in the loop's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def is_idle(self) -> bool:
        """Whether batches are where they should be from the start."""
        return self.device.type == "cpu"

    def send(self, batch: Batch) -> Sent:
        """Start the copy; what is not a tensor is not changed."""
        if self._stream is None:
            return Sent(map_leaves(self._move, batch), None)
        with torch.cuda.stream(self._stream):
            moved = map_leaves(self._move, batch)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return Sent(moved, done)

    def _move(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.device == self.device:
            return leaf
        if leaf.device.type == "cpu" and self.device.type == "cuda":
            leaf = leaf.pin_memory()  # torch keeps it until the copy is over
        return leaf.to(self.device, non_blocking=True)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for the current stream: computation on it waits for the copy, Python not."""
        if sent.done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(sent.done)
            for _, leaf in leaves(sent.batch):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                    leaf.record_stream(current)
        return sent.batch


T = TypeVar("T")

_LOOK_AROUND_S = 0.2
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def read_ahead(make: Callable[[], Iterator[T]], depth: int) -> Iterator[T]:
    """What `make()` iterates over, fetched by a thread, at most `depth` items ahead.

    An exception of the thread is raised where its item would have come. Closing the iterator ends
    the thread.
    """
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()
    thread = threading.Thread(
        target=_work, args=(make, ready, stop), name="hpctrain-loader", daemon=True
    )
    thread.start()
    try:
        while True:
            item = ready.get()  # the thread always puts an end, whatever happens to it
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        thread.join(_END_S)


def _work(
    make: Callable[[], Iterator[T]], ready: queue.Queue[T | _End], stop: threading.Event
) -> None:
    try:
        for item in make():
            if not _put(ready, item, stop):
                return
    except BaseException as error:  # whatever it is, it is the loop's to know
        _put(ready, _End(error), stop)
    else:
        _put(ready, _End(None), stop)


def _put(ready: queue.Queue[T | _End], item: T | _End, stop: threading.Event) -> bool:
    """Pass an item on; False if it is no longer needed."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_LOOK_AROUND_S)
        except queue.Full:
            continue
        return True
    return False
