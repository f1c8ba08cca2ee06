"""Batch systems: one contract for all, one from outside the package, and one home for each name."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpctrain.batch_systems import (
    BatchSystem,
    all_systems,
    find_system,
    find_template,
    templates,
)
from hpctrain.batch_systems.registry import GROUP
from hpctrain.errors import ConfigError
from mpi_tests.unit.jobs_kit import ask as request
from mpi_tests.unit.jobs_kit import site

ROOT = Path(__file__).parents[2]
SYSTEMS = [system.name for system in all_systems()]
SUBMITTING = ["slurm", "pbs", "lsf", "flux"]
IDS = {"slurm": ("12", "12"), "pbs": ("12[].srv", "12[].srv"), "lsf": ("12", "12")}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_consistent(name):
    system = find_system(name)
    assert re.fullmatch(r"[a-z][a-z-]*", system.name)
    assert system.title
    for template in system.templates:
        assert (template.batch, find_template(template.name)) == (name, template)
        assert template.suffix in (".sh", ".yaml")
    own = {row for row in (system.launcher,) if row is not None}
    for row in own:
        assert row.rank
        assert row.size
        assert set(row.rank) <= set(row.present) | set(row.rank)
    assert set(system.lacks) <= {"constraint", "qos", "reservation", "memory", "array_limit"}
    assert system.ask_state("1", lambda *_: None) == []
    uses, why = system.ask_use("1", lambda *_: None)
    assert uses == []
    assert why
    assert system.read_time_left("no time at all", now_s=0.0) is None


def test_names_titles_and_templates_are_unique():
    assert len(set(SYSTEMS)) == len(SYSTEMS)
    assert len({system.title for system in all_systems()}) == len(SYSTEMS)
    assert len(templates()) == sum(len(system.templates) for system in all_systems())


@pytest.mark.parametrize("name", SUBMITTING)
def test_those_that_take_scripts_do_all_of_it(name, tmp_path):
    system = find_system(name)
    assert system.directive_prefix.startswith("#")
    assert system.job_variables[0].startswith(system.variable_prefixes)
    assert system.tools[0] in system.submit_words(tmp_path / "x.sh")
    assert system.cancel_words("12")[-1] == "12"
    assert system.time_left_words("12", None)
    for option in system.managed:
        assert system.manages(option, None)
    if name in IDS:  # arrays
        job, array = IDS[name]
        assert [system.split_task(system.task_id(job, task)) for task in (0, 3)] == [
            (array, system.first_index),
            (array, 3 + system.first_index),
        ]
        assert system.log_name("n", job, 0) != system.log_name("n", job, 1)
    assert system.split_task("12") == ("12", None)


def test_those_that_take_none_say_so(tmp_path):
    for name in set(SYSTEMS) - set(SUBMITTING):
        for act in (find_system(name).submit_words, find_system(name).read_id):
            with pytest.raises(ConfigError, match="hpctrain does not submit"):
                act(tmp_path / "x")
    with pytest.raises(ConfigError, match="no batch system 'oar'; there are slurm, pbs, lsf, flux"):
        find_system("oar")
    with pytest.raises(ConfigError, match="not manifests"):
        find_system("slurm").manifest(None)


def test_a_plan_refuses_what_its_system_lacks():
    from hpctrain.submit import make_plan

    with pytest.raises(ConfigError, match="qos high cannot be written for flux"):
        make_plan(request(qos="high"), site("flux"))


# --- from outside the package --------------------------------------------------------------------

PLUGIN = """
from pathlib import Path

from hpctrain.batch_systems import BatchSystem, JobState, LauncherRow, Template, given, unreadable


class Tiny(BatchSystem):
    name = "tiny"
    title = "Tiny"
    tools = ("tsub",)
    job_variables = ("TINY_JOB",)
    variable_prefixes = ("TINY_",)
    launcher = LauncherRow(
        name="tiny", title="trun", present=("TINY_RANK",), rank=("TINY_RANK",), size=("TINY_SIZE",),
        local_rank=("TINY_LOCAL",),
    )
    templates = (Template(name="tiny-run", batch="tiny", launcher="tiny", mpis=()),)
    template_folder = Path(__file__).parent
    directive_prefix = "#TINY"
    managed = ("nodes", "name")
    lacks = ("qos",)

    def directives(self, plan):
        return given(("--name=", plan.request.name), ("--nodes=", plan.request.num_nodes))

    def rank_words(self, plan):
        return ["trun", str(plan.num_ranks)]

    def submit_words(self, script, *, index=None):
        return ["tsub", str(script)]

    def read_id(self, said):
        if not said.startswith("t"):
            raise unreadable("tsub", said)
        return said.strip()

    def cancel_words(self, job):
        return ["tdel", job]

    def ask_state(self, job, ask):
        answer = ask(["tstat", job], None)
        if answer is None or answer.code:
            return []
        return [JobState(job=job, state="COMPLETED", exit_code=int(answer.out))]

    def time_left_words(self, job, index):
        return ["tstat", "--left", job]

    def read_time_left(self, said, *, now_s):
        return float(said) if said.strip().isdecimal() else None


SYSTEM = Tiny()
NOTHING = object()
"""
TEMPLATE = """{% extends "base.sh.j2" %}
{% block identity %}
hpc_job=$TINY_JOB
hpc_nodes=here
{% endblock %}
{% block restarts %}0{% endblock %}
{% block index %}0{% endblock %}
{% block requeue %}{% endblock %}
"""
TSUB = """#!/bin/bash
export TINY_JOB=t7
mkdir -p logs
bash "$1" >"logs/one-t7.out" 2>&1
echo $? >"$STATE"
echo t7
"""
TRUN = """#!/bin/bash
size=$1; shift
for ((rank = 0; rank < size; rank++)); do
    TINY_RANK=$rank TINY_SIZE=$size TINY_LOCAL=$rank "$@" || exit
done
"""
TSTAT = """#!/bin/bash
if [ "$1" = --left ]; then echo 90; else cat "$STATE"; fi
"""
TDEL = "#!/bin/bash\nexit 1\n"
RANK = """\
from hpctrain.faults.allocation import time_left_s
from hpctrain.world import current_launch
launch = current_launch()
place = f"{launch.title} {launch.rank} of {launch.size}"
print(place, launch.batch_system, launch.job_id, round(time_left_s()))
"""


@pytest.fixture
def outside(tmp_path):
    """A package with an entry point, its client programs, and what runs hpctrain with them."""
    package, bin_ = tmp_path / "package", tmp_path / "bin"
    (package / "tiny_queue").mkdir(parents=True)
    bin_.mkdir()
    (package / "tiny_queue" / "__init__.py").write_text(PLUGIN)
    (package / "tiny_queue" / "tiny-run.sh.j2").write_text(TEMPLATE)
    info = package / "tiny_queue-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-queue\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntiny = tiny_queue:SYSTEM\n")
    for name, text in (("tsub", TSUB), ("trun", TRUN), ("tstat", TSTAT), ("tdel", TDEL)):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (tmp_path / "mine.toml").write_text('title = "Mine"\ntemplate = "tiny-run"\n')
    (tmp_path / "rank.py").write_text(RANK)
    kept = ("LD_LIBRARY_PATH", "TMPDIR")
    environ = {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": f"{bin_}:/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT}:{package}",
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "STATE": str(tmp_path / "exit_code"),
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
        )

    run.info = info
    return run


def test_a_batch_system_from_outside_takes_a_job_and_is_recognised_in_it(outside, tmp_path):
    words = ["--site", "./mine.toml", "--time", "1h", "--name", "one", "--ranks-per-node", "2"]
    done = outside("-m", "hpctrain", "job", "submit", *words, "--", sys.executable, "rank.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "t7\n"
    assert "#TINY --name=one\n#TINY --nodes=1\n" in done.stderr
    text = (tmp_path / "logs" / "one-t7.out").read_text()
    assert "trun 0 of 2 Tiny t7 90" in text, text
    assert "trun 1 of 2 Tiny t7 90" in text
    assert "exit code 0 after" in text
    done = outside("-m", "hpctrain", "job", "status", "--json")
    (state,) = json.loads(done.stdout)
    assert (state["job"], state["state"], state["exit_code"]) == ("t7", "COMPLETED", 0)
    assert "trun 1 of 2" in outside("-m", "hpctrain", "job", "logs").stdout
    assert "nothing was cancelled" in outside("-m", "hpctrain", "job", "cancel", "t7").stdout
    refused = outside("-m", "hpctrain", "job", "render", *words, "--qos", "q", "--", "x")
    assert "qos q cannot be written for tiny" in refused.stderr
    refused = outside("-m", "hpctrain", "job", "render", *words, "--env", "TINY_X=1", "--", "x")
    assert "TINY_X belongs to" in refused.stderr
    words.append("--directive=--nodes=9")
    refused = outside("-m", "hpctrain", "job", "render", *words, "--", "x")
    assert "is written by hpctrain itself" in refused.stderr


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tiny_queue:NOTHING", "is a object; the entry point must name an instance"),
        ("tiny_queue:ABSENT", "cannot be imported (AttributeError"),
        ("no_such_package:SYSTEM", "cannot be imported (ModuleNotFoundError"),
    ],
)
def test_a_broken_plug_in_is_named(outside, value, message):
    (outside.info / "entry_points.txt").write_text(f"[{GROUP}]\ntiny = {value}\n")
    code = "from hpctrain.batch_systems import all_systems; all_systems()"
    done = outside("-c", code)
    assert "ConfigError: the batch system tiny" in done.stderr
    assert message in done.stderr
    # A job of a system of this package does not depend on plug-ins.
    code = (
        "from hpctrain.batch_systems import detect_system; print(detect_system({'PBS_JOBID': '1'}))"
    )
    assert outside("-c", code).returncode == 0


def test_a_name_is_taken_once(outside):
    text = textwrap.dedent(
        """
        from hpctrain.batch_systems import BatchSystem
        class Other(BatchSystem):
            name, title = "pbs", "Another PBS"
        SYSTEM = Other()
        """
    )
    (outside.info.parent / "other.py").write_text(text)
    (outside.info / "entry_points.txt").write_text(f"[{GROUP}]\nother = other:SYSTEM\n")
    done = outside("-c", "from hpctrain.batch_systems import all_systems; all_systems()")
    assert "uses the name 'pbs', which is taken" in done.stderr


def test_no_torch_and_no_mpi_is_loaded(outside):
    code = "import sys, hpctrain.batch_systems; print({'torch', 'mpi4py'} & set(sys.modules))"
    assert outside("-c", code).stdout == "set()\n"


# --- one home for each name ----------------------------------------------------------------------

HOMES = (
    "hpctrain/batch_systems/",
    "hpctrain/submit/lint/",  # what its rules say is about the syntax of one system's directives
    "hpctrain/cli/job/lint.py",  # hands the version of Slurm to those rules
)
NAMES = re.compile(
    r"(?i)(?<![a-z])(slurm|pbs|lsf|flux)(?![a-z])|^(SLURM|PBS|LSB|FLUX)_|#(SBATCH|PBS|BSUB)"
)
CLIENTS = {
    *("sbatch", "scancel", "scontrol", "squeue", "sacct", "qsub", "qstat", "qdel"),
    *("bsub", "bjobs", "bkill"),
}


def _words_in(path: Path) -> list[tuple[int, str]]:
    """Identifiers, and texts that are no prose: names, variables, programs."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        name = next(
            (
                value
                for field in ("id", "attr", "arg", "name", "asname")
                if isinstance(value := getattr(node, field, None), str)
            ),
            "",
        )
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        text = node.value if is_text and not re.search(r"\s", node.value) else ""
        for word in (name, text):
            if NAMES.search(word) or word in CLIENTS:
                found.append((getattr(node, "lineno", 0), word))
    return found


def test_only_its_own_module_knows_a_batch_system():
    strangers = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / "hpctrain").rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(HOMES)
        for line, word in _words_in(path)
    ]
    default_site = [word for word in strangers if re.fullmatch(r".*options\.py:\d+: slurm", word)]
    assert strangers == default_site
    assert len(default_site) == 1  # --site, which names a profile


@pytest.mark.parametrize("name", SUBMITTING)
def test_one_system_is_one_file(name):
    folder = ROOT / "hpctrain" / "batch_systems"
    others = [
        path for path in folder.glob("*.py") if path.stem not in (name, "registry", "__init__")
    ]
    word = re.compile(rf"(?i)(?<![a-z]){name}(?![a-z])")
    assert [
        f"{path.name}:{line}: {text}"
        for path in others
        for line, text in _words_in(path)
        if word.search(text)
    ] == []


def test_the_recipe_names_what_there_is():
    text = (ROOT / "docs" / "jobs.md").read_text()
    recipe = text.split("## A batch system of your own")[1].split("\n## ")[0]
    assert f"{GROUP} =" in recipe
    rows = [line.split("|")[1] for line in recipe.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 15
    known = {*dir(BatchSystem), *BatchSystem.__annotations__}
    assert [name for name in names if name not in known] == []
    for path in re.findall(r"`((?:hpctrain|mpi_tests)/[\w/]+\.py)`", recipe):
        assert (ROOT / path).is_file(), path
