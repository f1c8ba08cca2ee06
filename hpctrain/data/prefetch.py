"""A thread that fetches batches ahead of the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["read_ahead"]

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
    """Hand an item over; False when nobody wants it any more."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_LOOK_AROUND_S)
        except queue.Full:
            continue
        return True
    return False
