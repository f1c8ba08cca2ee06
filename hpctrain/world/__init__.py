"""Floor 1: ranks, launchers, cores, devices, shared memory, and how ranks meet.

Importing it loads neither torch nor MPI: both are loaded where they are first used.
"""

from __future__ import annotations

from hpctrain.world.agreement import agree, announced, roll_call
from hpctrain.world.allocator import keep_freed_memory
from hpctrain.world.barrier import make_barrier, must_sleep
from hpctrain.world.cores import CoreMap, parse_cpus, read_affinity, read_core_map, share_of_cores
from hpctrain.world.guard import (
    AgreedExit,
    abort,
    before_abort,
    end_all_ranks,
    exit_code_of,
    install_hook,
    prepare_abort,
    report_exit,
    report_hard_exits,
)
from hpctrain.world.joining import init
from hpctrain.world.launcher import (
    Launch,
    current_launch,
    detect,
    environment,
)
from hpctrain.world.library import load_mpi
from hpctrain.world.notes import note_checkpoint, note_exit, note_failed_hosts
from hpctrain.world.observing import PHASES, Observer, Phase, observed, phase
from hpctrain.world.oom import count_oom_kills
from hpctrain.world.output import write_whole_lines
from hpctrain.world.polling import finish, poll
from hpctrain.world.seeding import derive_seed
from hpctrain.world.shared_memory import PrivateView, SharedBlock, allocate
from hpctrain.world.topology import Communicators, Place, split_communicators
from hpctrain.world.watching import END_OF_BLOCK, Watching, takes_timeout
from hpctrain.world.world import RankInfo, ScriptSettings, Setting, World

__all__ = [
    "END_OF_BLOCK",
    "PHASES",
    "AgreedExit",
    "Communicators",
    "CoreMap",
    "Launch",
    "Observer",
    "Phase",
    "Place",
    "PrivateView",
    "RankInfo",
    "ScriptSettings",
    "Setting",
    "SharedBlock",
    "Watching",
    "World",
    "abort",
    "agree",
    "allocate",
    "announced",
    "before_abort",
    "count_oom_kills",
    "current_launch",
    "derive_seed",
    "detect",
    "end_all_ranks",
    "environment",
    "exit_code_of",
    "finish",
    "init",
    "install_hook",
    "keep_freed_memory",
    "load_mpi",
    "make_barrier",
    "must_sleep",
    "note_checkpoint",
    "note_exit",
    "note_failed_hosts",
    "observed",
    "parse_cpus",
    "phase",
    "poll",
    "prepare_abort",
    "read_affinity",
    "read_core_map",
    "report_exit",
    "report_hard_exits",
    "roll_call",
    "share_of_cores",
    "split_communicators",
    "takes_timeout",
    "write_whole_lines",
]
