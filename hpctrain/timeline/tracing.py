"""From a world's first connection to its end: a file of events on every rank, then one trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.timeline.clocks import measure
from hpctrain.timeline.merging import merge_folder
from hpctrain.timeline.recording import TraceRecorder, rank_file
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.timeline.clocks import Offset
    from hpctrain.timeline.recording import TracedWatch
    from hpctrain.world import World

__all__ = ["start"]

_MERGE_BELOW_BYTES = 200 << 20
"""Larger traces are not merged while a job waits; `hpctrain trace merge` does it later."""


def start(world: World, watch: TracedWatch) -> TraceRecorder | None:
    """Collective: record what this world does, if its launch requests it; once per world.

    The world's end writes the files and, where they are not huge, merges them.

    Args:
        world: The ranks.
        watch: Who notices a rank that stays out; it watches until the world ends.

    Raises:
        ConfigError: on all ranks, when some rank cannot write to the folder.
    """
    if world.launch.trace_dir is None:
        return None
    for observer in world.observers:
        if isinstance(observer, TraceRecorder):
            return observer
    folder = Path(world.launch.trace_dir)
    path = rank_file(folder, world.rank)
    file, trouble = None, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        trouble = f"--trace {folder} cannot be written to ({error}); name a folder that can"
    agree(world.comm, trouble, error=ConfigError)
    if file is None:
        raise ConfigError(trouble or "")
    header = {
        "rank": world.rank,
        "size": world.size,
        "host": world.host,
        "node_rank": world.node_rank,
        "process": os.getpid(),
    }
    recorder = TraceRecorder(file, header, _measure(world, watch))
    world.observers.append(recorder)
    world.at_exit(lambda: _finish(world, watch, recorder, folder))
    return recorder


def _measure(world: World, watch: TracedWatch) -> Offset:
    watch.enter("measuring clocks for the trace")
    try:
        return measure(world)
    finally:
        watch.leave()


def _finish(world: World, watch: TracedWatch, recorder: TraceRecorder, folder: Path) -> None:
    """Collective: measure the clocks once more, write, and let rank 0 merge."""
    world.observers.remove(recorder)
    recorder.close(_measure(world, watch))
    agree(world.comm, None)  # all have written
    if world.rank != 0:
        return
    files = [rank_file(folder, rank) for rank in range(world.size)]
    total = sum(file.stat().st_size for file in files if file.exists())
    if total > _MERGE_BELOW_BYTES:
        log.notice(
            f"{log.format_bytes(total)} of events are in {folder}; merge them by `hpctrain trace "
            f"merge {folder}`"
        )
        return
    merged = merge_folder(folder)
    log.notice(f"trace: {merged.path} ({merged.sentence})")
