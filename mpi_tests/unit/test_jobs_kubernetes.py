"""The MPIJob manifest: valid by the operator's schema, and saying exactly what was asked."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.submit import Request, render
from hpctrain.submit.places import JOBS
from mpi_tests.unit.jobs_kit import ask, site

BIND = ["--bind-to", "none"]
COUNT, TEXT = int, str
ENV = [{"name": TEXT, "value": TEXT}]
CONTAINER = {
    "name": TEXT,
    "image": TEXT,
    "command": [TEXT],
    "args": [TEXT],
    "env": ENV,
    "resources": {"limits": {re.compile("cpu|memory|[a-z0-9.]+/gpu"): TEXT}},
    "volumeMounts": [{"name": TEXT, "mountPath": TEXT}],
}
POD = {
    "containers": [CONTAINER],
    "volumes": [{"name": TEXT, "emptyDir": {"medium": {"", "Memory"}}}],
}
REPLICA = {
    "replicas": COUNT,
    "restartPolicy": {"Never", "OnFailure"},  # all that the operator's validation lets pass
    "template": {"spec": POD},
}
# kubeflow/mpi-operator 0.6, pkg/apis/kubeflow/v2beta1/types.go (MPIJobSpec, RunPolicy,
# SchedulingPolicy, ReplicaSpec) and pkg/apis/kubeflow/validation/validation.go; of pods, core/v1 of
# Kubernetes as far as it is used here. A field that is not listed is refused.
MPI_JOB = {
    "apiVersion": {"kubeflow.org/v2beta1"},
    "kind": {"MPIJob"},
    "metadata": {"name": TEXT},
    "spec": {
        "slotsPerWorker": COUNT,
        "runLauncherAsWorker": bool,
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "sshAuthMountPath": TEXT,
        "runPolicy": {
            "cleanPodPolicy": {"None", "Running", "All"},
            "ttlSecondsAfterFinished": COUNT,
            "activeDeadlineSeconds": COUNT,
            "backoffLimit": COUNT,
            "suspend": bool,
            "managedBy": TEXT,
            "schedulingPolicy": {
                "minAvailable": COUNT,
                "queue": TEXT,
                "minResources": {re.compile(".*"): TEXT},
                "priorityClass": TEXT,
                "scheduleTimeoutSeconds": COUNT,
            },
        },
        "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
    },
}
REQUIRED = (
    ("spec", "slotsPerWorker"),
    ("spec", "sshAuthMountPath"),
    ("spec", "runPolicy", "cleanPodPolicy"),
    *(("spec", "mpiReplicaSpecs", role, "replicas") for role in ("Launcher", "Worker")),
    *(("spec", "mpiReplicaSpecs", role, "restartPolicy") for role in ("Launcher", "Worker")),
)


def validate(value, schema, where="job"):
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            known = schema.get(key)
            if known is None:
                known = next(
                    (
                        s
                        for k, s in schema.items()
                        if isinstance(k, re.Pattern) and k.fullmatch(key)
                    ),
                    None,
                )
            assert known is not None, f"{where}.{key} is no field"
            validate(inner, known, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        assert value, where
        for index, inner in enumerate(value):
            validate(inner, schema[0], f"{where}[{index}]")
    elif isinstance(schema, set):
        assert value in schema, f"{where} = {value!r}"
    else:
        assert type(value) is schema, f"{where} = {value!r}"
        assert schema is not COUNT or value >= 0, where


def manifest(**fields):
    text = render(ask(**{"image": "train:1", **fields}), site("kubernetes"))
    job = yaml.safe_load(text)
    validate(job, MPI_JOB)
    for path in REQUIRED:
        at = job
        for key in path:
            assert key in at, path
            at = at[key]
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert replicas["Launcher"]["replicas"] == 1
    assert replicas["Worker"]["replicas"] >= 1
    for role in replicas.values():
        assert len(role["template"]["spec"]["containers"]) == 1
    return job


def container(job, role):
    return job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0]


def expand(text: str) -> str:
    """What Kubernetes makes of a word: `$$` is `$`, and `$(NAME)` the value of a variable."""
    return re.sub(r"\$(\$|\([^)]*\))?", lambda m: "VALUE" if "(" in m.group() else "$", text)


def test_the_example_is_valid():
    validate(yaml.safe_load((JOBS / "examples" / "kubernetes.yaml").read_text()), MPI_JOB)


def test_a_manifest_says_what_was_asked():
    job = manifest(
        name="run-one",
        num_nodes=2,
        gpus_per_node=4,
        cpus_per_rank=8,
        memory_mib=64 << 10,
        walltime_s=7200,
        max_requeues=3,
        partition="research",
        qos="urgent",
        environment={"GREETING": "it's $(HOME) 'x' \"y\" é: #"},
    )
    assert job["metadata"]["name"] == "run-one"
    spec = job["spec"]
    assert (spec["slotsPerWorker"], spec["mpiImplementation"]) == (4, "OpenMPI")
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "activeDeadlineSeconds": 7200,
        "backoffLimit": 3,
        "schedulingPolicy": {"queue": "research", "priorityClass": "urgent"},
    }
    assert spec["mpiReplicaSpecs"]["Launcher"]["restartPolicy"] == "OnFailure"
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    limits = container(job, "Worker")["resources"]["limits"]
    assert limits == {"cpu": "32", "memory": "65536Mi", "nvidia.com/gpu": "4"}
    launcher = container(job, "Launcher")
    assert launcher["command"][:7] == ["mpirun", "-n", "8", "--map-by", "ppr:4:node", *BIND]
    assert "-x GREETING" in " ".join(launcher["command"])
    told = {entry["name"]: expand(entry["value"]) for entry in launcher["env"]}
    assert told["GREETING"] == "it's $(HOME) 'x' \"y\" é: #"
    assert told["OMP_NUM_THREADS"] == "8"


def test_mpich_gets_its_own_words():
    job = manifest(mpi="mpich", num_nodes=3, ranks_per_node=2)
    assert job["spec"]["mpiImplementation"] == "MPICH"
    assert container(job, "Launcher")["command"][:5] == ["mpirun", "-n", "6", "-ppn", "2"]
    assert "-x" not in container(job, "Launcher")["command"]


@given(words=st.lists(st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "))))
def test_any_command_arrives_word_for_word(words):
    job = manifest(commands=(("python", *words),))
    command = container(job, "Launcher")["command"]
    assert [expand(word) for word in command][-len(words) - 1 :] == ["python", *words]


OTHER = {
    "account": "p",
    "constraint": "a100",
    "reservation": "r",
    "log_dir": "elsewhere",
    "array_size": 2,
    "after": ("7",),
    "after_kind": "any",
    "signal": "HUP",
    "signal_lead_s": 60,
    "stage": ("data",),
    "pack": "env.tar",
    "prologue": ("true",),
    "modules": ("gcc",),
    "source": ("file",),
    "venv": "env",
    "directives": ("--x",),
}


@pytest.mark.parametrize("field", OTHER)
def test_what_a_manifest_cannot_say_is_refused(field):
    with pytest.raises(ConfigError, match=rf"{field} = .* is not supported in an MPIJob"):
        manifest(**{field: OTHER[field]})


def test_every_field_of_a_request_is_written_or_refused():
    from hpctrain.batch_systems.kubernetes import _WRITTEN

    assert {entry.name for entry in dataclasses.fields(Request)} >= _WRITTEN


@pytest.mark.parametrize("name", ["Upper", "under_score", "dot.ted", "ends-", "x" * 55])
def test_names_that_kubernetes_refuses_are_refused(name):
    with pytest.raises(ConfigError, match="not valid for Kubernetes"):
        manifest(name=name, num_nodes=2)


def test_submission_is_refused_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = [
        "job",
        "submit",
        "--site",
        "kubernetes",
        "--image",
        "a:1",
        "--time",
        "1h",
        "--",
        "true",
    ]
    assert main(words) == 2
    assert "kubectl create -f job.yaml" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
