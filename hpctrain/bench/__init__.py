"""Floor 8: measuring: sweeps of a script, layouts of a node, collectives, laws of scaling.

| module | what |
| --- | --- |
| sweep | a sweep: its points and settings (pure), and its folder on disk |
| local, jobs | its launches on this machine, or as batch jobs, one array per number of nodes |
| outcome | a result from what was measured: efficiency, split, failed points (pure) |
| laws | baselines, ratios, Amdahl, Gustafson, Karp-Flatt, with intervals (pure) |
| summary | a result in words and tables, and the command that repeats it (pure) |
| layouts | the best ranks x threads, where `hpctrain run -n auto` finds them |
| comparing | two results: slower beyond noise, or other counts (pure) |
| results | what a result contains, the machine it was measured on, its tables |
| session, control, worker | paired benchmarks: blocks of variants, launches of which one is awake |
| paired, load | medians of paired ratios and which blocks count (pure); CPU time that others take |
| collectives, collective_subjects | `hpctrain bench collectives` |
| command | options that all paired benchmarks share; hpctrain's own: `benchmarks/` |

Names are loaded on first use: only `serve`, a rank's side, needs torch and MPI. docs/scaling.md and
docs/benchmarks.md have the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.bench.command import choose, numbers, parse_size, run_main, run_program
    from hpctrain.bench.comparing import (
        COUNTS_SCHEMA,
        Compared,
        compare_counts,
        compare_times,
        counts_of,
    )
    from hpctrain.bench.jobs import collect_jobs, submit_sweep
    from hpctrain.bench.laws import (
        LIMIT,
        KarpFlatt,
        curve_names,
        is_alike,
        judge_reach,
        karp_flatt,
        serial_fraction,
        trend,
    )
    from hpctrain.bench.layouts import (
        BestLayout,
        LayoutBook,
        best_layout,
        digest_script,
        find_layout,
        this_machine,
    )
    from hpctrain.bench.load import background_load, read_clocks
    from hpctrain.bench.local import explain_mismatch, request_of, run_sweep
    from hpctrain.bench.outcome import make_result
    from hpctrain.bench.paired import interval_ranks, paired_ratio
    from hpctrain.bench.results import (
        ROOT,
        caption,
        describe_machine,
        file_name,
        markdown,
        parse_file_name,
        tables,
        upgrade,
        validate,
    )
    from hpctrain.bench.session import BenchPlan, Case, Variant, run_plan
    from hpctrain.bench.summary import (
        conclude_result,
        describe_law,
        describe_laws,
        describe_reach,
        describe_settings,
        percent,
        point_rows,
        repeat_command,
        split_rows,
    )
    from hpctrain.bench.sweep import (
        MODES,
        Folder,
        Measured,
        Sweep,
        SweepSettings,
        fill_arguments,
        layout_points,
        plan_points,
    )
    from hpctrain.bench.worker import Measurable, serve

__all__ = [
    "COUNTS_SCHEMA",
    "LIMIT",
    "MODES",
    "ROOT",
    "BenchPlan",
    "BestLayout",
    "Case",
    "Compared",
    "Folder",
    "KarpFlatt",
    "LayoutBook",
    "Measurable",
    "Measured",
    "Sweep",
    "SweepSettings",
    "Variant",
    "background_load",
    "best_layout",
    "caption",
    "choose",
    "collect_jobs",
    "compare_counts",
    "compare_times",
    "conclude_result",
    "counts_of",
    "curve_names",
    "describe_law",
    "describe_laws",
    "describe_machine",
    "describe_reach",
    "describe_settings",
    "digest_script",
    "explain_mismatch",
    "file_name",
    "fill_arguments",
    "find_layout",
    "interval_ranks",
    "is_alike",
    "judge_reach",
    "karp_flatt",
    "layout_points",
    "make_result",
    "markdown",
    "numbers",
    "paired_ratio",
    "parse_file_name",
    "parse_size",
    "percent",
    "plan_points",
    "point_rows",
    "read_clocks",
    "repeat_command",
    "request_of",
    "run_main",
    "run_plan",
    "run_program",
    "run_sweep",
    "serial_fraction",
    "serve",
    "split_rows",
    "submit_sweep",
    "tables",
    "this_machine",
    "trend",
    "upgrade",
    "validate",
]

__getattr__ = lazy(
    __name__,
    {
        ".command": (
            "choose",
            "numbers",
            "parse_size",
            "run_main",
            "run_program",
        ),
        ".comparing": (
            "COUNTS_SCHEMA",
            "Compared",
            "compare_counts",
            "compare_times",
            "counts_of",
        ),
        ".jobs": (
            "collect_jobs",
            "submit_sweep",
        ),
        ".laws": (
            "KarpFlatt",
            "LIMIT",
            "curve_names",
            "is_alike",
            "judge_reach",
            "karp_flatt",
            "serial_fraction",
            "trend",
        ),
        ".layouts": (
            "BestLayout",
            "LayoutBook",
            "best_layout",
            "digest_script",
            "find_layout",
            "this_machine",
        ),
        ".load": (
            "background_load",
            "read_clocks",
        ),
        ".local": (
            "request_of",
            "explain_mismatch",
            "run_sweep",
        ),
        ".outcome": ("make_result",),
        ".paired": (
            "interval_ranks",
            "paired_ratio",
        ),
        ".results": (
            "ROOT",
            "caption",
            "describe_machine",
            "file_name",
            "markdown",
            "parse_file_name",
            "tables",
            "upgrade",
            "validate",
        ),
        ".session": (
            "Case",
            "BenchPlan",
            "Variant",
            "run_plan",
        ),
        ".summary": (
            "conclude_result",
            "describe_law",
            "describe_laws",
            "describe_reach",
            "describe_settings",
            "percent",
            "point_rows",
            "repeat_command",
            "split_rows",
        ),
        ".sweep": (
            "Folder",
            "MODES",
            "Measured",
            "SweepSettings",
            "Sweep",
            "fill_arguments",
            "layout_points",
            "plan_points",
        ),
        ".worker": (
            "Measurable",
            "serve",
        ),
    },
)
