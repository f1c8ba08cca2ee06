"""Floor 5: the training job: its configuration, its loop, its run directory, what it shows.

Names are loaded on first use: configurations are read and runs are watched without torch and MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.train.building import (
        build_data,
        build_models,
        build_optimizer,
        find_loss,
        search_beside,
    )
    from hpctrain.train.computing import compute
    from hpctrain.train.config import (
        Checkpoint,
        Config,
        Faults,
        Logging,
        load_config,
        parse_config,
        to_toml,
    )
    from hpctrain.train.config.explaining import explain, json_schema, list_keys, markdown, template
    from hpctrain.train.directory import read_summary
    from hpctrain.train.display import follow, show_once
    from hpctrain.train.figures import memory_limit, time_steps
    from hpctrain.train.memory import SHARDS, Memory, ShardLevel, UnitSize
    from hpctrain.train.plan import count_samples, plan_ahead
    from hpctrain.train.progress import Monitor
    from hpctrain.train.trainer import Trainer

__all__ = [
    "SHARDS",
    "Checkpoint",
    "Config",
    "Faults",
    "Logging",
    "Memory",
    "Monitor",
    "ShardLevel",
    "Trainer",
    "UnitSize",
    "build_data",
    "build_models",
    "build_optimizer",
    "compute",
    "count_samples",
    "explain",
    "find_loss",
    "follow",
    "json_schema",
    "list_keys",
    "load_config",
    "markdown",
    "memory_limit",
    "parse_config",
    "plan_ahead",
    "read_summary",
    "search_beside",
    "show_once",
    "template",
    "time_steps",
    "to_toml",
]

__getattr__ = lazy(
    __name__,
    {
        ".building": (
            "build_data",
            "build_models",
            "build_optimizer",
            "find_loss",
            "search_beside",
        ),
        ".computing": ("compute",),
        ".config": (
            "Checkpoint",
            "Config",
            "Faults",
            "Logging",
            "load_config",
            "parse_config",
            "to_toml",
        ),
        ".config.explaining": (
            "explain",
            "json_schema",
            "list_keys",
            "markdown",
            "template",
        ),
        ".directory": ("read_summary",),
        ".display": (
            "follow",
            "show_once",
        ),
        ".figures": ("memory_limit", "time_steps"),
        ".memory": (
            "Memory",
            "SHARDS",
            "ShardLevel",
            "UnitSize",
        ),
        ".plan": (
            "count_samples",
            "plan_ahead",
        ),
        ".progress": ("Monitor",),
        ".trainer": ("Trainer",),
    },
)
