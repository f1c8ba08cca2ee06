"""From a request and a site to the text of a job script. Pure, but for reading the template."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hpctrain import __version__
from hpctrain.batch_systems import BatchSystem
from hpctrain.doctor import LEFTOVER_NAMES
from hpctrain.errors import ConfigError
from hpctrain.exit_codes import DIED, REQUEUE
from hpctrain.submit.places import JOBS
from hpctrain.submit.plan import JobPlan, make_plan
from hpctrain.submit.request import Request
from hpctrain.submit.site import Site
from hpctrain.submit.words import check_directive_value, quote, quote_all

__all__ = ["render", "render_plan", "write_directives"]


def render(request: Request, site: Site, *, templates: Path = JOBS / "templates") -> str:
    """Write the script.

    Raises:
        ConfigError: the request and the site are incompatible.
    """
    return render_plan(make_plan(request, site), templates=templates)


def render_plan(plan: JobPlan, *, templates: Path = JOBS / "templates") -> str:
    """Write the script of a plan.

    Args:
        plan: What is to be in it.
        templates: The folder of the templates.
    """
    import jinja2

    system, template = plan.system, plan.template
    own = [] if system.template_folder is None else [system.template_folder]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*own, templates]),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # bash, not HTML: every value goes through quote
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = quote
    environment.filters["qa"] = quote_all
    environment.filters["j"] = quote_json
    named: dict[str, object] = {"template_name": template.name, "version": __version__}
    named |= {"plan": plan, "request": plan.request, "site": plan.site}
    is_script = template.suffix == ".sh"
    found = environment.get_template(f"{template.name}{template.suffix}.j2")
    text = found.render(named | (_context(plan) if is_script else system.manifest(plan)))
    return re.sub(r"\n{3,}", "\n\n", text) if is_script else text


def _context(plan: JobPlan) -> dict[str, object]:
    """What the template of a script is filled with, besides the plan."""
    request, site, system = plan.request, plan.site, plan.system
    return {
        "died_code": DIED,
        "directives": write_directives(plan),
        "each_node": system.node_words(plan),
        "environment": plan.environment,
        "hints": _hints(plan),
        "image_options": _image_options(plan),
        "job_folders": _job_folders(plan),
        "launch": system.launch_words(plan),
        "modules": [*site.modules, *request.modules, *site.modules_after],
        "on_nodes": bool(request.stage or request.pack or request.prologue),
        "rank_setup": _rank_setup(plan),
        "requeue_code": REQUEUE,
        "restart_codes": plan.restart_codes,
        "shared_memory": [
            f"/dev/shm/{name}" for name, who in LEFTOVER_NAMES.items() if who != "hpctrain"
        ],
        "signals": system.passed_signals(plan),
        "sweep_options": list(system.overlap_options),
        "source": request.source,
        "system": system,
    }


def write_directives(plan: JobPlan) -> list[str]:
    """All directive lines of a script, in order; additional ones, checked, last."""
    system = plan.system
    extras = [*plan.site.directives, *plan.request.directives]
    words = [*system.directives(plan), *(_check_extra(system, extra) for extra in extras)]
    return [f"{system.directive_prefix} {word}" for word in words]


def _check_extra(system: BatchSystem, extra: str) -> str:
    match = system.option.fullmatch(extra)
    if match is None:
        raise ConfigError(
            f"directive {extra!r} is not valid; for {system.name} write {system.option_form}"
        )
    name, value = match.groups()
    if system.manages(name, value):
        raise ConfigError(
            f"directive {extra!r} is written by hpctrain itself, or changes the script; use its "
            "option (hpctrain job render --help)"
        )
    if value is not None:
        check_directive_value(value, f"directive {name}")
    return extra


def _hints(plan: JobPlan) -> list[str]:
    """The site's hints; and a note where the profile does not know the queue's limits."""
    site, queue = plan.site, plan.queue
    if not site.queues or not queue or queue in site.queues:
        return list(site.hints)
    known = ", ".join(site.queues)
    return [
        *site.hints,
        f"nodes and walltime are not checked: the profile has limits of {known}, none of {queue}",
    ]


def _job_folders(plan: JobPlan) -> dict[str, str]:
    """Those of the site that the job does not name itself."""
    given = plan.request.environment
    return {name: path for name, path in plan.site.job_folders.items() if name not in given}


def _rank_setup(plan: JobPlan) -> str:
    """What a rank does before it becomes the command: make its folders, choose its GPU."""
    folders = " ".join(f'"${name}"' for name in _job_folders(plan))
    setup = [f"mkdir -p -- {folders}"] if folders else []
    local_rank = plan.system.local_rank_variable(plan)
    if plan.gpus_per_node and plan.site.gpu_visibility in ("local-rank", "reversed"):
        index = f"${local_rank}"
        if plan.site.gpu_visibility == "reversed":
            index = f"$(({plan.gpus_per_node - 1} - {local_rank}))"
        setup.append(f"export {plan.site.gpu_variable}={index}")
    return "; ".join(setup)


def _image_options(plan: JobPlan) -> list[str]:
    vendor = {"CUDA_VISIBLE_DEVICES": "--nv", "ROCR_VISIBLE_DEVICES": "--rocm"}
    option = vendor.get(plan.site.gpu_variable) if plan.gpus_per_node else None
    return [*([option] if option else []), *plan.site.image_options]


def quote_json(value: object) -> str:
    """A scalar or list of YAML that means exactly this: JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
