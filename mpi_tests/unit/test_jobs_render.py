"""Rendered scripts: the examples, the shell's and shellcheck's opinion, and what they run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from hpctrain.batch_systems import templates
from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.exit_codes import REQUEUE
from hpctrain.submit import render
from hpctrain.submit.lint import lint_script
from hpctrain.submit.places import JOBS
from mpi_tests.unit.jobs_kit import Recorder, ask, site

TEMPLATES = {name: each for name, each in templates().items() if each.suffix == ".sh"}
EXAMPLES = dict(
    line.split(": ", 1)
    for line in (JOBS / "examples" / "commands.txt").read_text().splitlines()
    if not line.startswith("#")
)
SITE_OF = {"slurm": "slurm", "pbs": "pbs", "lsf": "lsf", "flux": "flux"}
COMMAND = ("python", "train.py", "--text", "a 'b' \"c\" $HOME `id` \\ *", "", "é")


def everything(template: str, **more: object) -> str:
    """A script with every option that its batch system has."""
    batch = TEMPLATES[template].batch
    image = "my image.sif" if TEMPLATES[template].needs_image else None
    fields = {
        "commands": (COMMAND,),
        "template": template,
        "num_nodes": 2,
        "ranks_per_node": 6,
        "cpus_per_rank": 7,
        "gpus_per_node": 6,
        "account": "proj",
        "signal_lead_s": 120,
        "max_requeues": 2,
        "stage": ("some data", "more"),
        "pack": "env.tar",
        "prologue": ("nvidia-smi", "-L"),
        "modules": ("gcc/12.2",),
        "source": ("/dev/null",),
        "venv": "/opt/my env",
        "environment": {"GREETING": "it's $HOME"},
        "image": image,
        "after": ("12", "13"),
        "script": "/scripts/job one.sh",
    }
    fields |= more
    if batch in ("pbs", "flux") and fields["max_requeues"]:
        fields["after"] = ()  # a restart is a new job there
    return render(ask(**fields), site(SITE_OF[batch]))


def shellcheck(script: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "-s", "bash", "-"], input=script, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_what_is_rendered(name, capsys):
    words = shlex.split(EXAMPLES[name])
    assert main(words[1:]) == 0
    rendered = capsys.readouterr().out
    assert (JOBS / "examples" / name).read_text() == rendered, (
        f"jobs/examples/{name} is not what its command renders; "
        f"run: {EXAMPLES[name].replace(' -- ', f' -o jobs/examples/{name} -- ')}"
    )
    if not name.endswith(".sh"):
        return
    assert subprocess.run(["bash", "-n"], input=rendered, text=True).returncode == 0
    found = lint_script(rendered, exists=lambda folder: True)
    assert found == [], found
    shellcheck(rendered)


def test_no_example_is_without_its_command():
    files = {path.name for path in (JOBS / "examples").iterdir()}
    assert files == {"commands.txt", *EXAMPLES}
    assert {path.name.split(".")[0] for path in (JOBS / "templates").glob("*.j2")} == {
        "base",
        *templates(),
    }


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_runs_exactly_what_was_asked_for(template, tmp_path):
    script = everything(template)
    shellcheck(script)
    assert lint_script(script, exists=lambda folder: True) == []
    recorder = Recorder(tmp_path)
    done = recorder.run(script, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    launcher = TEMPLATES[template].launcher
    started = [call for call in recorder.calls() if call[-len(COMMAND) :] == list(COMMAND)]
    assert [call[0] for call in started] == [launcher]
    calls = [" ".join(call) for call in recorder.calls()]
    for wanted in ("nvidia-smi -L", "rm -rf -- /tmp/hpctrain-", "some data", "env.tar", "module"):
        assert any(wanted in call for call in calls), wanted
    assert any(call[0] == "sbcast" for call in recorder.calls()) == template.startswith("slurm")
    assert "exit code 0" in done.stdout
    assert "command: python train.py" in done.stdout


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_exit_code_is_carried_through(template, tmp_path):
    recorder = Recorder(tmp_path)
    plain = {"stage": (), "pack": None, "prologue": ()}
    assert recorder.run(everything(template, **plain), FAKE_CODE="3").returncode == 3
    assert not [call for call in recorder.calls() if call[0] in ("scontrol", "qsub")]


@pytest.mark.parametrize("template", TEMPLATES)
def test_requeueing_is_counted_and_capped(template, tmp_path):
    recorder = Recorder(tmp_path)
    script = everything(template, stage=(), pack=None, prologue=())
    for count in ("0", "1", "2"):
        notes = recorder.work / "logs" / ".restarts-7-2"
        notes.mkdir(exist_ok=True)
        (notes / "count").write_text(count)
        restarts = {"SLURM_RESTART_COUNT": count, "HPCTRAIN_RESTARTS": count}
        done = recorder.run(script, FAKE_CODE=str(REQUEUE), **restarts)
        again = [" ".join(c) for c in recorder.calls() if c[0] in ("scontrol", "qsub")]
        again += [" ".join(c) for c in recorder.calls() if c[:3] == ["flux", "--parent", "batch"]]
        if count == "2":
            assert (done.returncode, again) == (1, []), done.stdout
            assert "2 restarts were allowed" in done.stdout
            continue
        assert done.returncode == REQUEUE, done.stdout + done.stderr
        following = str(int(count) + 1)
        expected = {
            "slurm": ["scontrol --oneliner show job 7", "scontrol requeue 7"],
            "pbs": [
                f"qsub -v HPCTRAIN_RESTARTS={following},HPCTRAIN_FIRST_JOB=7.server "
                "/scripts/job one.sh"
            ],
            "lsf": [],
            "flux": [
                f"flux --parent batch --env=HPCTRAIN_RESTARTS={following} "
                "--env=HPCTRAIN_FIRST_JOB=known /scripts/job one.sh"
            ],
        }[TEMPLATES[template].batch]
        assert again == expected
        if template == "lsf-jsrun":
            assert (notes / "count").read_text().strip() == following
    none = everything(template, stage=(), pack=None, prologue=(), max_requeues=0)
    done = recorder.run(none, FAKE_CODE=str(REQUEUE))
    assert done.returncode == 1
    assert "no restarts were allowed" in done.stdout


def test_a_task_of_an_array_is_requeued_alone_and_leaves_clean_nodes(tmp_path):
    recorder = Recorder(tmp_path)
    fails = (recorder.bin / "srun").read_text() + 'case " $* " in *train.py*) exit 75 ;; esac\n'
    (recorder.bin / "srun").write_text(fails.replace("'srun '* | ", ""))
    done = recorder.run(everything("slurm-srun", array_size=3))
    assert done.returncode == REQUEUE, done.stdout + done.stderr
    calls = [" ".join(call) for call in recorder.calls()]
    assert calls[-2:] == ["scontrol --oneliner show job 7_1", "scontrol requeue 7_1"]
    assert [call.endswith("rm -rf -- /tmp/hpctrain-7") for call in calls].index(True) == len(
        calls
    ) - 3


@pytest.mark.parametrize("template", TEMPLATES)
def test_tasks_of_an_array_run_their_own_command(template, tmp_path):
    commands = tuple(("python", "train.py", f"--point={index}", "$x") for index in range(3))
    more = {"max_requeues": 0} if template == "pbs-mpiexec" else {}
    script = everything(template, commands=commands, array_size=3, **more)
    shellcheck(script)
    recorder = Recorder(tmp_path)
    done = recorder.run(script)
    assert done.returncode == 0, done.stderr
    assert [call[-4:] for call in recorder.calls() if "train.py" in call] == [list(commands[1])]


@pytest.mark.parametrize(
    ("template", "lines"),
    [
        ("slurm-srun", ["--array=0-2%2", "--dependency=afterok:12:13", "--signal=B:USR2@120"]),
        ("pbs-mpiexec", ["-J 0-2%2", "-W depend=afterok:12:13", "-l walltime=01:00:00"]),
        ("lsf-jsrun", ['-J "hpctrain[1-3]%2"', '-w "done(12) && done(13)"', "-wa USR2 -wt 2"]),
        ("flux-run", ["--dependency=afterok:12", "--signal=USR2@120s", "--time-limit=3600s"]),
    ],
)
def test_each_dialect_writes_its_own_directives(template, lines):
    limit = None if template == "flux-run" else 2
    text = everything(template, array_size=3, array_limit=limit, max_requeues=0)
    prefixes = {"slurm-srun": "#SBATCH", "pbs-mpiexec": "#PBS", "lsf-jsrun": "#BSUB"}
    for line in lines:
        assert f"\n{prefixes.get(template, '#flux:')} {line}\n" in text, line


def test_a_warning_reaches_the_launcher_and_the_ranks_end_the_job(tmp_path):
    recorder = Recorder(tmp_path)
    launcher = "#!/bin/bash\ntrap 'kill $pid; exit 75' USR2\nsleep 20 & pid=$!\n"
    launcher += "kill -s USR2 $PPID\nwait\nexit 9\n"
    (recorder.bin / "srun").write_text(launcher)
    done = recorder.run(everything("slurm-srun", stage=(), pack=None, prologue=()))
    assert done.returncode == REQUEUE, done.stdout + done.stderr
    assert "signal USR2 after" in done.stdout
    assert ["scontrol", "requeue", "7"] in recorder.calls()


def test_pbs_wakes_itself_before_the_end(tmp_path):
    recorder = Recorder(tmp_path)
    (recorder.bin / "mpiexec").write_text(
        "#!/bin/bash\ntrap 'kill $pid; exit 4' TERM\nsleep 20 & pid=$!\nwait\n"
    )
    plain = {"stage": (), "pack": None, "prologue": ()}
    script = everything("pbs-mpiexec", walltime_s=2, signal_lead_s=1, **plain)
    done = recorder.run(script)
    assert done.returncode == 4, done.stdout + done.stderr  # MPICH's mpiexec is sent TERM


def test_a_missing_file_or_module_ends_the_job_before_the_ranks(tmp_path):
    recorder = Recorder(tmp_path)
    done = recorder.run(everything("slurm-srun", source=("/no/such/file",)))
    assert done.returncode not in (0, 75)
    assert not any("train.py" in call for call in recorder.calls())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"signal_lead_s": 3600}, "shorten the lead"),
        ({"commands": ()}, "no command"),
        ({"commands": ((),)}, "no command"),
        ({"commands": (("--evil",),)}, "begin with a program"),
        ({"commands": (("a",), ("b",))}, "array"),
        ({"array_limit": 3}, "array_limit"),
        ({"name": "1st"}, "job name"),
        ({"name": "a b"}, "job name"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"walltime_s": 0}, "walltime_s=0"),
        ({"after": ("12;rm",)}, "job id"),
        ({"log_dir": "a b"}, "log directory"),
        ({"log_dir": "~/logs"}, "log directory"),
        ({"stage": ("~/data",)}, "full path"),
        ({"stage": ("a/data", "b/data/")}, "cannot be staged as 'data'"),
        ({"stage": ("a/..",)}, "cannot be staged"),
        ({"stage": (".",)}, "cannot be staged"),
        ({"stage": ("my/env",), "pack": "e.tar"}, "packed environment"),
        ({"environment": {"PATH": "/x"}}, "belongs to the shell"),
        ({"environment": {"A-B": "x"}}, "environment variable"),
        ({"signal": "KILL"}, "choose from"),
        ({"directives": ("--nodes=3",)}, "written by hpctrain itself"),
        ({"directives": ("--nod=3",)}, "written by hpctrain itself"),
        ({"directives": ("--wrap=x",)}, "written by hpctrain itself"),
        ({"directives": ("--tasks-per-node=3",)}, "written by hpctrain itself"),
        ({"directives": ("--wait",)}, "written by hpctrain itself"),
        ({"directives": ("-N 3",)}, "is not valid"),
        ({"directives": ("--comment=a b",)}, "directive"),
        ({"directives": ("--comment=$x",)}, "directive"),
        ({"directives": ("--exclusive\nrm",)}, "U\\+000A"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(fields, told):
    with pytest.raises(ConfigError, match=told):
        render(ask(**fields), site())


def test_more_directives_are_written():
    text = render(ask(directives=("--exclusive", "--mail-type=END")), site())
    assert "#SBATCH --exclusive\n#SBATCH --mail-type=END\n" in text
    text = render(ask(directives=("-l filesystems=home", "-M a@b.org")), site("pbs"))
    assert "#PBS -l filesystems=home\n" in text
    for extra in ("-l select=3", "-l walltime=9", "-l a=1,select=2", "-q x", "-Wblock=true", "-qx"):
        with pytest.raises(ConfigError, match="directive"):
            render(ask(directives=(extra,)), site("pbs"))
    for extra in ("-Is", "-W 9", "-outdir /x"):
        with pytest.raises(ConfigError, match="directive"):
            render(ask(account="p", directives=(extra,)), site("lsf"))


def test_rendering_needs_neither_torch_nor_mpi(tmp_path):
    block = "import sys\nfor name in ('torch', 'mpi4py', 'numpy', 'horovod'):\n"
    block += "    sys.modules[name] = None\nfrom hpctrain.cli import main\n"
    words = ["job", "render", "--time", "1h", "--", "python", "train.py"]
    code = f"{block}sys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^srun .*|    srun .*--mpi=pmix", done.stdout, re.MULTILINE)
