"""Floor 3: data for all ranks: who has which sample, in which order, and how batches get there.

Names are loaded on first use: the arithmetic of batches needs neither torch nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.data.adopting import is_stream
    from hpctrain.data.arguments import LoaderArguments, resolve_arguments
    from hpctrain.data.gathering import gather
    from hpctrain.data.loader import Loader
    from hpctrain.data.partition import (
        Batching,
        Seat,
        block,
        cyclic,
        file_spans,
        part_of,
        plan_parts,
        split,
        stratified,
        weighted,
        whole_files,
    )
    from hpctrain.data.scattering import CHUNK_BYTES, Shard, reshuffle, scatter
    from hpctrain.data.sharing import Shared, share
    from hpctrain.data.source import ArraySource, Batch, Source, leaves, split_source
    from hpctrain.data.staging import stage
    from hpctrain.data.storage.formats import open_npy
    from hpctrain.data.storage.opening import files, inspect, name_files, open_named
    from hpctrain.data.storage.shards import check_shard, read_manifest
    from hpctrain.data.storage.writing import write_shards
    from hpctrain.data.table import split_bytes

__all__ = [
    "CHUNK_BYTES",
    "ArraySource",
    "Batch",
    "Batching",
    "Loader",
    "LoaderArguments",
    "Seat",
    "Shard",
    "Shared",
    "Source",
    "block",
    "check_shard",
    "cyclic",
    "file_spans",
    "files",
    "gather",
    "inspect",
    "is_stream",
    "leaves",
    "name_files",
    "open_named",
    "open_npy",
    "part_of",
    "plan_parts",
    "read_manifest",
    "reshuffle",
    "resolve_arguments",
    "scatter",
    "share",
    "split",
    "split_bytes",
    "split_source",
    "stage",
    "stratified",
    "weighted",
    "whole_files",
    "write_shards",
]

__getattr__ = lazy(
    __name__,
    {
        ".adopting": ("is_stream",),
        ".arguments": (
            "LoaderArguments",
            "resolve_arguments",
        ),
        ".gathering": ("gather",),
        ".loader": ("Loader",),
        ".partition": (
            "Batching",
            "Seat",
            "block",
            "cyclic",
            "file_spans",
            "part_of",
            "plan_parts",
            "split",
            "stratified",
            "weighted",
            "whole_files",
        ),
        ".scattering": (
            "CHUNK_BYTES",
            "Shard",
            "reshuffle",
            "scatter",
        ),
        ".sharing": (
            "Shared",
            "share",
        ),
        ".source": (
            "ArraySource",
            "Batch",
            "Source",
            "leaves",
            "split_source",
        ),
        ".staging": ("stage",),
        ".storage.formats": ("open_npy",),
        ".storage.opening": (
            "files",
            "inspect",
            "name_files",
            "open_named",
        ),
        ".storage.shards": (
            "check_shard",
            "read_manifest",
        ),
        ".storage.writing": ("write_shards",),
        ".table": ("split_bytes",),
    },
)
