"""Whether every byte of a checkpoint is still the one that was written. No torch, no MPI."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.catalog import quick_check
from hpctrain.checkpoint.checksums import check_file

__all__ = ["verify"]


def verify(path: Path) -> list[str]:
    """Read a whole checkpoint and compare all checksums; what is wrong, in words."""
    manifest, trouble = quick_check(path)
    if manifest is None:
        return [str(trouble)]
    wrong = [check_file(path, file, manifest.block_bytes) for file in manifest.files]
    return [text for text in wrong if text is not None]
