"""Floor 5: what is wrong with this machine, or with a node of a job, and the fix.

Gathering facts (`facts`, and the programs `probe` and `torch_facts` that run in processes of their
own) is apart from judging them (`machine`, `mpi`, `frameworks`), which is pure.
`examination.CHECKS` lists all checks; `nodes` compares the nodes of a running job. Names are loaded
on first use: the programs above should start fast, and a login node may have neither torch nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.doors import lazy

if TYPE_CHECKING:
    from hpctrain.doctor.examination import CHECKS, examine
    from hpctrain.doctor.facts import Facts
    from hpctrain.doctor.leftovers import LEFTOVER_NAMES, find_leftovers, remove_leftovers
    from hpctrain.doctor.nodes.visit import visit_all_nodes
    from hpctrain.doctor.verdict import as_json, exit_code, render, summarise

__all__ = [
    "CHECKS",
    "LEFTOVER_NAMES",
    "Facts",
    "as_json",
    "examine",
    "exit_code",
    "find_leftovers",
    "remove_leftovers",
    "render",
    "summarise",
    "visit_all_nodes",
]

__getattr__ = lazy(
    __name__,
    {
        ".examination": ("CHECKS", "examine"),
        ".facts": ("Facts",),
        ".leftovers": ("LEFTOVER_NAMES", "find_leftovers", "remove_leftovers"),
        ".nodes.visit": ("visit_all_nodes",),
        ".verdict": ("as_json", "exit_code", "render", "summarise"),
    },
)
