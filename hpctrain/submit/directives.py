"""The directives of each batch system: one function each, from a plan to lines."""

from __future__ import annotations

import re
from collections.abc import Callable

from hpctrain.errors import ConfigError
from hpctrain.submit.plan import Plan
from hpctrain.submit.units import format_clock, format_duration, format_memory, format_minutes
from hpctrain.submit.words import check_directive_value

__all__ = ["PREFIXES", "write_directives"]

PREFIXES = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "flux": "#flux:"}

# What hpctrain writes itself, or what would make the script another one. Batch systems accept
# beginnings of long names, so the beginnings are refused too.
_MANAGED = {
    "slurm": (
        *("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node"),
        *("gpus-per-task", "gres", "gpus", "mem", "time", "partition", "account", "qos"),
        *("constraint", "reservation", "output", "error", "open-mode", "array", "dependency"),
        *("kill-on-invalid-dep", "requeue", "no-requeue", "signal", "wrap", "export", "chdir"),
        *("tasks-per-node", "clusters", "parsable", "test-only", "wait", "workdir"),
    ),
    "pbs": (
        *("-N", "-q", "-A", "-J", "-r", "-W", "-o", "-e", "-j", "-k", "-S", "-V", "-v", "-C"),
        *("-I", "-X", "-f", "-z"),
    ),
    "lsf": (
        *("-J", "-q", "-P", "-U", "-W", "-nnodes", "-o", "-e", "-oo", "-eo", "-wa", "-wt", "-w"),
        *("-r", "-Q", "-L", "-cwd", "-env", "-I", "-Ip", "-Is", "-ISp", "-ISs", "-IS", "-IX"),
        *("-K", "-n", "-Zs", "-outdir", "-pack", "-tty", "-Jd"),
    ),
    "flux": (
        *("job-name", "nodes", "nslots", "cores-per-slot", "gpus-per-slot", "time-limit", "queue"),
        *("bank", "requires", "output", "error", "signal", "dependency", "exclusive", "wrap"),
        *("env", "cwd", "dry-run"),
    ),
}
_PBS_RESOURCES = ("select", "walltime", "nodes", "ncpus", "ngpus", "mpiprocs", "mem")
_LONG = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.+))?")
_SHORT = re.compile(r"(-[A-Za-z][A-Za-z_]*)(?: (.+))?")
_LETTER = re.compile(r"(-[A-Za-z])(?: (.+))?")  # to PBS -qdebug is -q debug
_FORMS = {"slurm": _LONG, "flux": _LONG, "lsf": _SHORT, "pbs": _LETTER}


def write_directives(plan: Plan) -> list[str]:
    """All directive lines of a script, in order; extra ones, checked, last."""
    batch = plan.template.batch
    words = _DIALECTS[batch](plan)
    extras = [*plan.site.directives, *plan.request.directives]
    words += [_check_extra(batch, extra) for extra in extras]
    return [f"{PREFIXES[batch]} {word}" for word in words]


def _check_extra(batch: str, extra: str) -> str:
    match = _FORMS[batch].fullmatch(extra)
    form = "--name=value" if _FORMS[batch] is _LONG else "-X value"
    if match is None:
        raise ConfigError(f"directive {extra!r} is not understood; for {batch} write {form}")
    name, value = match.groups()
    managed = any(known.startswith(name) for known in _MANAGED[batch])
    if batch == "pbs" and name == "-l":
        resource = (value or "").partition("=")[0]
        managed = not resource or resource in _PBS_RESOURCES or "," in (value or "")
    if managed:
        raise ConfigError(
            f"directive {extra!r} is written by hpctrain itself, or changes what the script is; "
            "use the option for it (hpctrain job render --help)"
        )
    if value is not None:
        check_directive_value(value, f"directive {name}")
    return extra


def _given(*pairs: tuple[str, object]) -> list[str]:
    return [f"{option}{value}" for option, value in pairs if value not in (None, "")]


def _slurm(plan: Plan) -> list[str]:
    request, site = plan.request, plan.site
    number = "%A_%a" if plan.is_array else "%j"
    words = _given(
        ("--job-name=", request.name),
        ("--nodes=", request.num_nodes),
        ("--ntasks-per-node=", plan.ranks_per_node),
        ("--cpus-per-task=", plan.cpus_per_rank),
    )
    if plan.gpus_per_node and site.gpu_request != "none":
        one = "1" if site.gpu_request == "gpus-per-task" else str(plan.gpus_per_node)
        option = "gres=gpu:" if site.gpu_request == "gres" else f"{site.gpu_request}="
        words.append(f"--{option}{one}")
    memory = format_memory(plan.memory_mib) if plan.memory_mib else None
    words += _given(
        ("--mem=", memory),
        ("--time=", format_clock(request.walltime_s)),
        ("--partition=", plan.partition),
        ("--account=", plan.account),
        ("--qos=", plan.qos),
        ("--constraint=", plan.constraint),
        ("--reservation=", request.reservation),
        ("--output=", f"{request.log_dir}/%x-{number}.out"),
    )
    words.append("--open-mode=append")
    if request.array_size is not None:
        limit = f"%{request.array_limit}" if request.array_limit else ""
        words.append(f"--array=0-{request.array_size - 1}{limit}")
    if request.after:
        words.append(f"--dependency=after{request.after_kind}:{':'.join(request.after)}")
        words.append("--kill-on-invalid-dep=yes")
    again = "--requeue=expedite" if request.expedite else "--requeue"
    words.append(again if request.max_requeues else "--no-requeue")
    if request.signal_lead_s is not None:
        words.append(f"--signal=B:{request.signal}@{request.signal_lead_s}")
    return words


def _pbs(plan: Plan) -> list[str]:
    request, site = plan.request, plan.site
    chunk = [f"select={request.num_nodes}"]
    if not site.whole_nodes:
        chunk.append(f"ncpus={plan.ranks_per_node * (plan.cpus_per_rank or 1)}")
        chunk.append(f"mpiprocs={plan.ranks_per_node}")
        if plan.gpus_per_node:
            chunk.append(f"ngpus={plan.gpus_per_node}")
        if plan.memory_mib:
            chunk.append(f"mem={format_memory(plan.memory_mib, unit='mb', gib='gb')}")
    words = _given(
        ("-N ", request.name),
        ("-l ", ":".join([*chunk, *site.select])),
        ("-l walltime=", format_clock(request.walltime_s)),
        ("-q ", plan.partition),
        ("-A ", plan.account),
    )
    # -k doe: the log is written where it belongs while the job runs
    words += ["-j oe", "-k doe", f"-o {request.log_dir}/", "-r n"]
    if request.array_size is not None and request.array_size > 1:  # PBS has no arrays of one
        limit = f"%{request.array_limit}" if request.array_limit else ""
        words.append(f"-J 0-{request.array_size - 1}{limit}")
    if request.after:
        words.append(f"-W depend=after{request.after_kind}:{':'.join(request.after)}")
    return words


def _lsf(plan: Plan) -> list[str]:
    request = plan.request
    number, name = "%J", request.name
    if request.array_size is not None:
        limit = f"%{request.array_limit}" if request.array_limit else ""
        number, name = "%J_%I", f'"{name}[1-{request.array_size}]{limit}"'
    words = _given(
        ("-J ", name),
        ("-nnodes ", request.num_nodes),
        ("-W ", format_minutes(request.walltime_s)),
        ("-q ", plan.partition),
        ("-P ", plan.account),
        ("-U ", request.reservation),
        ("-o ", f"{request.log_dir}/{request.name}-{number}.out"),
    )
    if request.after:
        condition = {"ok": "done", "any": "ended"}[request.after_kind]
        words.append(f'-w "{" && ".join(f"{condition}({job})" for job in request.after)}"')
    if request.max_requeues:
        words.append(f'-Q "{" ".join(map(str, plan.restart_codes))}"')
    if request.signal_lead_s is not None:
        words.append(f"-wa {request.signal} -wt {-(-request.signal_lead_s // 60)}")
    return words


def _flux(plan: Plan) -> list[str]:
    request = plan.request
    words = _given(
        ("--job-name=", request.name),
        ("--nodes=", request.num_nodes),
        ("--time-limit=", format_duration(request.walltime_s)),
        ("--queue=", plan.partition),
        ("--bank=", plan.account),
        ("--requires=", plan.constraint),
        ("--output=", f"{request.log_dir}/{request.name}-{{{{id}}}}.out"),
    )
    words.append("--exclusive")
    words += [f"--dependency=after{request.after_kind}:{job}" for job in request.after]
    if request.signal_lead_s is not None:
        words.append(f"--signal={request.signal}@{format_duration(request.signal_lead_s)}")
    return words


_DIALECTS: dict[str, Callable[[Plan], list[str]]] = {
    "slurm": _slurm,
    "pbs": _pbs,
    "lsf": _lsf,
    "flux": _flux,
}
