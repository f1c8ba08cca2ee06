"""Site profiles: those that ship, those of a user, and inheritance."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import tomllib
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.submit import Site, load_site, render
from hpctrain.submit.site import find_sites
from mpi_tests.unit.jobs_kit import SITES, Recorder, account_for, ask, site

SHIPPED = sorted(find_sites(SITES))
WANTED = {
    *("alps", "aurora", "frontier", "isambard-ai", "jean-zay", "juwels", "leonardo", "lsf", "lumi"),
    *("marenostrum5", "pbs", "perlmutter", "polaris", "snellius"),
}
GENERIC = {"flux", "flux-cray", "kubernetes", "lsf", "pbs", "slurm"}
CENTRES = sorted(WANTED - GENERIC)


def test_the_sites_are_all_there():
    assert {*WANTED, *GENERIC} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_says_how_far_it_can_be_trusted(name):
    profile = site(name)
    assert datetime.date.fromisoformat(profile.as_of) >= datetime.date(2026, 1, 1)
    assert profile.source
    assert profile.ever_run == (name == "slurm")
    text = find_sites(SITES)[name].read_text()
    assert {"ever_run", "as_of", "source"} <= {line.split(" =")[0] for line in text.splitlines()}
    if name in WANTED - {"pbs"}:  # a centre's own: the page, so that a reader can look again
        assert re.search(r"\w+\.\w+(\.\w+)?/", profile.source), profile.source


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("perlmutter", ["#SBATCH --constraint=gpu", "#SBATCH --gpus-per-node=4", "FI_MR_CACHE"]),
        ("frontier", ["--gpu-bind=closest", "--network=disable_rdzv_get", "--gpus-per-task=1"]),
        ("frontier", ["module load rocm\nmodule load rccl-net-plugin\n", "FI_CXI_RDZV_PROTO="]),
        ("frontier", ["HSA_FORCE_FINE_GRAIN_PCIE=1", "FI_MR_CACHE_MONITOR=kdreg2"]),
        ("frontier", ["FI_CXI_DEFAULT_TX_SIZE=2048", "FI_CXI_RX_MATCH_MODE=hybrid"]),
        ("frontier", [f"FI_CXI_RDZV_{n}=0" for n in ("EAGER_SIZE", "THRESHOLD", "GET_MIN")]),
        ("lumi", ["mask_cpu:0xfe000000000000,", "ROCR_VISIBLE_DEVICES=$SLURM_LOCALID"]),
        ("lumi", ["--mem=480G", "NCCL_NET_GDR_LEVEL=3", "NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3"]),
        ("lumi", ['MIOPEN_USER_DB_PATH=/tmp/hpctrain-miopen"-$hpc_job"', "plugin aws-ofi-rccl"]),
        ("juwels", ["#SBATCH --gres=gpu:4", "--mpi=pspmix", "SRUN_CPUS_PER_TASK=12"]),
        ("juwels", ["export HPCTRAIN_HOST_SUFFIX=i "]),
        ("alps", ["--gpus-per-task=1", "MPICH_GPU_SUPPORT_ENABLED=0", "NCCL_PROTO='^LL128'"]),
        ("alps", ["FI_CXI_DEFAULT_TX_SIZE=16384"]),
        ("polaris", ["select=2:system=polaris", "$((3 - PALS_LOCAL_RANKID))", "--depth 8"]),
        (
            "polaris",
            ["LD_LIBRARY_PATH=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries"],
        ),
        ("aurora", ["--cpu-bind list:4-7:8-11:", "CCL_PROCESS_LAUNCHER=pmix", "OMP_NUM_THREADS=4"]),
        ("aurora", ["CCL_ATL_TRANSPORT=mpi", "CCL_KVS_MODE=mpi", "MONITOR=userfaultfd"]),
        ("aurora", ["HPCTRAIN_HOST_SUFFIX=.hsn.cm.aurora.alcf.anl.gov "]),
        ("isambard-ai", ["module load brics/aws-ofi-nccl", "NCCL_NET='AWS Libfabric'"]),
        ("leonardo", ["--gres=gpu:4", "--partition=boost_usr_prod", "--qos=normal"]),
        ("marenostrum5", ["--partition=acc", "--qos=acc_ehpc", "--cpus-per-task=20"]),
        ("jean-zay", ["--constraint=h100", "--qos=qos_gpu_h100-t3", "--hint=nomultithread"]),
        ("snellius", ["--partition=gpu_h100", "NCCL_SOCKET_IFNAME=eno2np0"]),
        ("lsf", ["#BSUB -nnodes 2", "jsrun -n 12 -r 6 -a 1 -g 1 -c 7"]),
        ("flux", ["#flux: --nodes=2", "flux run -N 2 -n 2"]),
        ("flux-cray", ["flux run -N 2 -n 8 -c 21 -g 1 -opmi=cray-pals"]),
    ],
)
def test_what_is_particular_about_each_is_in_its_scripts(name, expected):
    text = render(ask(num_nodes=2, **small_job(name)), site(name))
    for part in expected:
        assert part in text, part


def small_job(name: str) -> dict[str, str]:
    """What a job of two nodes must say there: who pays, and a queue that takes it."""
    queue = {"aurora": "debug-scaling", "polaris": "debug-scaling"}.get(name)
    return account_for(name) | ({"partition": queue} if queue else {})


def test_network_plugins_are_forced_only_between_nodes():
    one = render(ask(account="p", partition="debug"), site("polaris"))
    assert "NCCL_NET" not in one
    two = render(ask(account="p", partition="debug", num_nodes=2), site("polaris"))
    assert "NCCL_NET='AWS Libfabric'" in two


def test_ranks_of_aurora_see_all_tiles():
    text = render(ask(num_nodes=2, **small_job("aurora")), site("aurora"))
    assert "ZE_AFFINITY_MASK" not in text


def test_a_folder_of_the_job_is_the_users_where_they_name_it():
    text = render(ask(account="p", environment={"MIOPEN_USER_DB_PATH": "/mine"}), site("lumi"))
    assert "export MIOPEN_USER_DB_PATH=/mine\n" in text
    assert 'mkdir -p -- "$MIOPEN_CUSTOM_CACHE_DIR";' in text
    assert text.count("MIOPEN_USER_DB_PATH") == 1


def test_ranks_find_the_folders_and_paths_of_their_site(tmp_path):
    recorder = Recorder(tmp_path)
    # A launcher that starts one rank, the last six words of its command line.
    (recorder.bin / "srun").write_text('#!/bin/bash\nexport SLURM_LOCALID=3\nexec "${@: -6}"\n')
    mine = dataclasses.replace(
        site("lumi"),
        sources={},
        job_folders={"MIOPEN_USER_DB_PATH": f"{tmp_path}/cache"},
        library_paths=("/plugin/lib", "/other/lib"),
        host_suffix="i",
    )
    script = render(ask(commands=(("env", "-0"),), num_nodes=2, account="p"), mine)
    for given, expected in (("/old", ":/old"), ("", "")):
        done = recorder.run(script, LD_LIBRARY_PATH=given)
        assert done.returncode == 0, done.stdout + done.stderr
        seen = dict(word.split("=", 1) for word in done.stdout.split("\0") if "=" in word)
        assert seen["MIOPEN_USER_DB_PATH"] == f"{tmp_path}/cache-7"
        assert seen["LD_LIBRARY_PATH"] == f"/plugin/lib:/other/lib{expected}"
        assert (seen["HPCTRAIN_HOST_SUFFIX"], seen["ROCR_VISIBLE_DEVICES"]) == ("i", "3")
    assert (tmp_path / "cache-7").is_dir()


def test_memory_goes_with_the_gpus_unless_it_is_asked_for():
    for fields, expected in (
        ({}, "480G"),
        ({"gpus_per_node": 2}, "120G"),
        ({"gpus_per_node": 2, "memory_mib": 1024}, "1G"),
    ):
        assert f"#SBATCH --mem={expected}\n" in render(ask(account="p", **fields), site("lumi"))


def test_the_container_engine_starts_ranks_by_srun_itself():
    for image, expected in (
        ("train.toml", "./train.toml"),
        ("../train.toml", "../train.toml"),
        ("/edf/train.toml", "/edf/train.toml"),
        ("train", "train"),
    ):
        text = render(ask(account="p", template="slurm-edf", image=image), site("alps"))
        assert re.search(rf"srun .* --environment={re.escape(expected)} ", text), text
        assert "apptainer" not in text


@pytest.mark.parametrize("name", CENTRES)
def test_every_value_of_a_centre_has_its_source_or_is_called_assumed(name):
    table = tomllib.loads(find_sites(SITES)[name].read_text())
    keys = {key for key in table if not isinstance(table[key], dict)} - {
        *("inherits", "title", "ever_run", "as_of", "source", "assumed", "hints"),
    }
    for variables in ("environment", "multi_node_environment", "job_folders"):
        keys |= set(table.get(variables, {}))
    keys |= {"queues"} & set(table)
    sourced = {key for keys in site(name).sources.values() for key in keys}
    assert keys == (sourced | set(site(name).assumed)) - {"job_folders"}
    for page in site(name).sources:
        assert re.search(r"\bas of 2026-\d\d-\d\d\b", page), page


def test_sources_are_shown(capsys):
    assert main(["job", "sites", "frontier"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"FI_MR_CACHE_MONITOR +kdreg2 +\[2\]", shown), shown
    assert re.search(r"^ mpi +cray_shasta +assumed", shown, re.MULTILINE), shown
    assert re.search(r"queue extended +1 to 64 nodes, 24:00:00 +\[1\]", shown), shown
    assert "[2] docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html, as of" in shown
    assert main(["job", "sites", "frontier", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["queues"]["extended"]["max_nodes"] == 64
    assert ["queues" in keys for keys in told["sources"].values()] == [True, False]


def test_a_site_of_ones_own_inherits_by_one_key(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'inherits = "perlmutter"\ntitle = "mine"\nqos = "debug"\n[environment]\nMINE = "1"\n'
    )
    mine = load_site("mine", [tmp_path, *SITES])
    assert (mine.qos, mine.constraint, mine.gpus_per_node) == ("debug", "gpu", 4)
    assert mine.environment == {"MINE": "1", "FI_MR_CACHE_MONITOR": "userfaultfd"}
    assert (mine.ever_run, mine.source, mine.assumed) == (
        False,
        "",
        (),
    )  # what ran elsewhere did not run here
    assert load_site(str(tmp_path / "mine.toml"), SITES) == mine


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('inherits = "mine"', "there are alps"),
        ('inherits = "./mine.toml"', "circle"),
        ('inherits = "./other.toml"', "cannot be read"),
        ('inherits = "nowhere"', "does not exist"),
        ("inherits = 3", "does not exist"),
        ('title = "x"', "lacks template"),
        ('inherits = "slurm"\nnosuch = 1', "has unknown keys: nosuch"),
        ('inherits = "slurm"\ngpus_per_node = "4"', "must be a whole number"),
        ('inherits = "slurm"\ngpus_per_node = true', "must be a whole number"),
        ('inherits = "slurm"\nmodules = "gcc"', "must be a list of texts"),
        ('inherits = "slurm"\n[environment]\nA = 1', "must be a table of texts"),
        ('inherits = "slurm"\ngpus_per_node = -1', "too small"),
        ('inherits = "slurm"\ndefault_gpus_per_node = -1', "too small"),
        ('inherits = "slurm"\ndefault_gpus_per_node = 9', "more than gpus_per_node = 8"),
        ('inherits = "slurm"\naccount = "a b"', "is not valid"),
        ('inherits = "slurm"\nneeds_account = 1', "must be true or false"),
        ('inherits = "slurm"\nmpi = "lam"', "choose from"),
        ('inherits = "slurm"\nas_of = "yesterday"', "not a date"),
        ('inherits = "slurm"\ncpu_masks = ["0xf;rm"]', "mask"),
        ('inherits = "slurm"\nmodules = ["a; rm"]', "module"),
        ('inherits = "slurm"\npartition = "a\\nb"', "U\\+000A"),
        ('inherits = "slurm"\nnode_local = "tmp"', "absolute"),
        ('inherits = "slurm"\nmax_walltime = "48"', "max_walltime"),
        ('inherits = "slurm"\n[environment]\nA = "x\\u0000"', "U\\+0000"),
        ('inherits = "slurm"\n[environment]\nIFS = "x"', "belongs to"),
        ('inherits = "slurm"\nassumed = ["nosuch"]', "neither keys nor variables"),
        ('inherits = "slurm"\n[sources]\n"a.b/c" = ["nosuch"]', "names nosuch"),
        ('inherits = "slurm"\n[sources]\n"a.b/c" = "mpi"', "list of texts"),
        ('inherits = "slurm"\nqueue_by = "luck"', "choose from"),
        ('inherits = "slurm"\nqueues = 3', "a table of queues"),
        ('inherits = "slurm"\n[queues]\nbatch = 3', "must be a table of keys"),
        ('inherits = "slurm"\n[queues.batch]\nnodes = 3', "has unknown keys: nodes"),
        ('inherits = "slurm"\n[queues.batch]\nmax_nodes = 0', "must be a whole number, at least 1"),
        (
            'inherits = "slurm"\n[queues.batch]\nmin_nodes = true',
            "must be a whole number, at least 1",
        ),
        ('inherits = "slurm"\n[queues.batch]\nmin_nodes = 3\nmax_nodes = 2', "less than"),
        ('inherits = "slurm"\n[queues.batch]\nmax_walltime = "48"', "queue batch: max_walltime"),
        ('inherits = "slurm"\n[queues.batch]\nmax_walltime = { x = "1h" }', "write 64"),
        ('inherits = "slurm"\n[queues.batch]\nby_request = 1', "true or false"),
        ('inherits = "slurm"\nmodules_after = ["a; rm"]', "module"),
        ('inherits = "slurm"\nhost_suffix = "i;rm"', "end of a host name"),
        ('inherits = "slurm"\nlibrary_paths = ["lib"]', "absolute"),
        ('inherits = "slurm"\nmemory = "64"', "memory"),
        ('inherits = "slurm"\n[job_folders]\nA = "tmp"', "absolute"),
        ('inherits = "slurm"\n[job_folders]\nIFS = "/tmp"', "belongs to"),
        ('inherits = "slurm"\nhints = ["a\\nrm"]', "U\\+000A"),
        ("not toml", "cannot be read"),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(tmp_path, text, told):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_site("mine", [tmp_path, *SITES])


def test_a_profile_may_change_the_site_whose_name_it_takes(tmp_path):
    (tmp_path / "perlmutter.toml").write_text('inherits = "perlmutter"\naccount = "m1234"\n')
    mine = load_site("perlmutter", [tmp_path, *SITES])
    assert (mine.account, mine.qos) == ("m1234", "regular")
    assert "#SBATCH --account=m1234" in render(ask(), mine)
    assert "#SBATCH --account=other" in render(ask(account="other"), mine)
    (tmp_path / "shared.toml").write_text('inherits = "./perlmutter.toml"\nas_of = 2026-11-15\n')
    shared = load_site(str(tmp_path / "shared.toml"), SITES)
    assert (shared.account, shared.as_of) == ("m1234", "2026-11-15")


def test_a_broken_profile_does_not_hide_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "hpctrain" / "sites"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text("nosuch = 1")
    assert main(["job", "sites"]) == 2
    said = capsys.readouterr()
    assert "perlmutter" in said.out
    assert "site broken lacks template, title" in said.err
    assert main(["job", "sites", "broken"]) == 2


def test_unknown_sites_list_the_known():
    with pytest.raises(ConfigError, match=r"no site 'nowhere'; there are alps, .*polaris"):
        load_site("nowhere", SITES)


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("perlmutter", {"gpus_per_node": 5}, "has 4"),
        ("perlmutter", {"account": None}, "give --account"),
        ("perlmutter", {"template": "pbs-mpiexec"}, "is for pbs"),
        ("perlmutter", {"mpi": "openmpi"}, "is not supported by"),
        ("perlmutter", {"image": "x.sif"}, "slurm-apptainer or slurm-edf"),
        ("polaris", {"image": "x.sif"}, "leave --image out"),
        ("perlmutter", {"template": "slurm-apptainer"}, "give --image"),
        ("lumi", {"ranks_per_node": 9}, "cores for 8"),
        ("lumi", {"ranks_per_node": 8, "gpus_per_node": 4}, "request fewer ranks"),
        ("frontier", {"ranks_per_node": 4}, "make them equal"),
        ("polaris", {"memory_mib": 1024}, "whole"),
        ("polaris", {"qos": "high"}, "cannot be written for pbs"),
        ("polaris", {"max_requeues": 1}, "render it into a file"),
        ("polaris", {"max_requeues": 1, "script": "/s", "array_size": 2}, "array"),
        ("perlmutter", {"signal": "TERM"}, "srun kills its ranks on TERM"),
        ("perlmutter", {"signal": "HUP", "signal_lead_s": 60}, "srun kills its ranks on HUP"),
        ("lsf", {"walltime_s": 90, "signal_lead_s": 61}, "LSF counts in minutes"),
        (
            "pbs",
            {"max_requeues": 1, "after": ("7",), "script": "/s"},
            "use either those or --requeue",
        ),
        ("lsf", {"memory_mib": 1024}, "cannot be written for lsf"),
        ("flux", {"array_size": 4, "array_limit": 2}, "cannot be written for flux"),
    ],
)
def test_what_a_site_does_not_have_is_refused(name, fields, told):
    with pytest.raises(ConfigError, match=told):
        render(ask(**{"account": "p", **small_job(name), **fields}), site(name))


def test_a_walltime_past_the_sites_is_refused():
    short = dataclasses.replace(site(), max_walltime="30 min")
    render(ask(walltime_s=1800), short)
    with pytest.raises(ConfigError, match="more than the 30 min"):
        render(ask(walltime_s=1801), short)


def test_fewer_gpus_mean_fewer_ranks():
    text = render(ask(account="p", gpus_per_node=2), site("perlmutter"))
    assert "--ntasks-per-node=2" in text
    assert "--gpus-per-node=2" in text
    assert "gpus" not in render(ask(), site("slurm")).replace("GPUs", "")


def test_every_key_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
    keys = {field.name for field in dataclasses.fields(Site)} - {"name"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_lists_of_sites_fit_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["job", "sites"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert all(name in out for name in find_sites(SITES))
    for name in find_sites(SITES):
        assert main(["job", "sites", name]) == 0
        one = capsys.readouterr().out
        assert max(map(len, one.splitlines())) <= 100
        assert load_site(name, SITES).as_of in one
