"""Floor 9: what happens at N ranks: a step replayed from a profile and a machine file.

| module | what |
| --- | --- |
| profile, profiling | what one rank computes and has to send; measured by one process |
| machine | how ranks are connected, from TOML; `machines/` has ten |
| exchange, costs | how gradients are sent; what an allreduce and the slowest rank cost (pure) |
| model | `predict`: the step replayed, with error bars (pure) |
| advice | what to change, and how many nodes to request (pure) |
| rehearsal | a job on virtual ranks: what would break before it is queued (pure) |
| measuring, fit | measure this machine, and fit a machine file |
| footprint | what a model holds and computes, unit by unit (pure) |
| fake_device, unit_watch | a footprint measured without memory, on torch's fake device |
| grid_shapes, grid_costs | groups of a grid on nodes; bytes and seconds of one grid (pure) |
| grid_choice | every grid of N ranks, and which to take (pure) |
| configured | a configuration of `hpctrain train` as the predictor sees it |

Everything it says is simulated. Names are loaded on first use: predicting needs neither torch nor
MPI; profiling and measuring do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.predict.advice import Advice, advise
    from hpctrain.predict.configured import (
        ConfigOptions,
        footprint_configured,
        measure_configured,
        read_options,
        state_copies_of,
    )
    from hpctrain.predict.costs import RankLayout
    from hpctrain.predict.exchange import Exchange, default_exchange
    from hpctrain.predict.fake_device import measure_footprint
    from hpctrain.predict.fit import Measurement, fit_machine
    from hpctrain.predict.footprint import FORMATS, Footprint, TiedWeight, Unit
    from hpctrain.predict.grid_choice import (
        HEADROOM,
        Compute,
        GridChoice,
        GridPlan,
        choose_grid,
        plan_grids,
    )
    from hpctrain.predict.grid_shapes import SCHEDULES
    from hpctrain.predict.machine import (
        LOAD_LIMIT,
        TOPOLOGIES,
        Costs,
        Link,
        Machine,
        find_machine,
        machine_names,
        render_machine,
        write_machine,
    )
    from hpctrain.predict.measuring import SIZES, fit_here, measure
    from hpctrain.predict.model import Prediction, Range, predict
    from hpctrain.predict.profile import Layer, Profile, parse_profile, read_profile, write_profile
    from hpctrain.predict.profiling import Subject, find_subject, load_subject, measure_profile
    from hpctrain.predict.rehearsal import (
        JobLimits,
        Problem,
        Rehearsed,
        State,
        TrainingRun,
        rehearse,
    )

__all__ = [
    "FORMATS",
    "HEADROOM",
    "LOAD_LIMIT",
    "SCHEDULES",
    "SIZES",
    "TOPOLOGIES",
    "Advice",
    "Compute",
    "ConfigOptions",
    "Costs",
    "Exchange",
    "Footprint",
    "GridChoice",
    "GridPlan",
    "JobLimits",
    "Layer",
    "Link",
    "Machine",
    "Measurement",
    "Prediction",
    "Problem",
    "Profile",
    "Range",
    "RankLayout",
    "Rehearsed",
    "State",
    "Subject",
    "TiedWeight",
    "TrainingRun",
    "Unit",
    "advise",
    "choose_grid",
    "default_exchange",
    "find_machine",
    "find_subject",
    "fit_here",
    "fit_machine",
    "footprint_configured",
    "load_subject",
    "machine_names",
    "measure",
    "measure_configured",
    "measure_footprint",
    "measure_profile",
    "parse_profile",
    "plan_grids",
    "predict",
    "read_options",
    "read_profile",
    "rehearse",
    "render_machine",
    "state_copies_of",
    "write_machine",
    "write_profile",
]

__getattr__ = lazy(
    __name__,
    {
        ".advice": (
            "Advice",
            "advise",
        ),
        ".configured": (
            "ConfigOptions",
            "footprint_configured",
            "measure_configured",
            "read_options",
            "state_copies_of",
        ),
        ".costs": ("RankLayout",),
        ".exchange": (
            "Exchange",
            "default_exchange",
        ),
        ".fake_device": ("measure_footprint",),
        ".fit": (
            "Measurement",
            "fit_machine",
        ),
        ".footprint": (
            "FORMATS",
            "Footprint",
            "TiedWeight",
            "Unit",
        ),
        ".grid_choice": (
            "Compute",
            "GridChoice",
            "GridPlan",
            "HEADROOM",
            "choose_grid",
            "plan_grids",
        ),
        ".grid_shapes": ("SCHEDULES",),
        ".machine": (
            "Costs",
            "LOAD_LIMIT",
            "Link",
            "Machine",
            "TOPOLOGIES",
            "find_machine",
            "machine_names",
            "render_machine",
            "write_machine",
        ),
        ".measuring": (
            "SIZES",
            "fit_here",
            "measure",
        ),
        ".model": (
            "Prediction",
            "Range",
            "predict",
        ),
        ".profile": (
            "Layer",
            "Profile",
            "parse_profile",
            "read_profile",
            "write_profile",
        ),
        ".profiling": (
            "Subject",
            "find_subject",
            "load_subject",
            "measure_profile",
        ),
        ".rehearsal": (
            "Problem",
            "Rehearsed",
            "JobLimits",
            "State",
            "TrainingRun",
            "rehearse",
        ),
    },
)
