"""Site profiles: those that ship, those of a user, and inheritance."""

from __future__ import annotations

import dataclasses
import datetime
import re
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.submit import Site, load_site, render
from hpctrain.submit.site import find_sites
from mpi_tests.unit.jobs_kit import SITES, account_for, ask, site

SHIPPED = sorted(find_sites(SITES))
WANTED = {"alps", "aurora", "frontier", "juwels", "lsf", "lumi", "pbs", "perlmutter", "polaris"}


def test_the_sites_are_all_there():
    assert {*WANTED, "slurm", "flux"} == set(SHIPPED)


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
        ("lumi", ["mask_cpu:0xfe000000000000,", "ROCR_VISIBLE_DEVICES=$SLURM_LOCALID"]),
        ("juwels", ["#SBATCH --gres=gpu:4", "--mpi=pspmix", "SRUN_CPUS_PER_TASK=12"]),
        ("alps", ["--gpus-per-task=1", "MPICH_GPU_SUPPORT_ENABLED=0", "NCCL_PROTO='^LL128'"]),
        ("polaris", ["select=2:system=polaris", "$((3 - PALS_LOCAL_RANKID))", "--depth 8"]),
        ("aurora", ["--cpu-bind list:1-8:9-16:", "ZE_AFFINITY_MASK=$PALS_LOCAL_RANKID"]),
        ("lsf", ["#BSUB -nnodes 2", "jsrun -n 12 -r 6 -a 1 -g 1 -c 7"]),
        ("flux", ["#flux: --nodes=2", "flux run -N 2 -n 2"]),
    ],
)
def test_what_is_particular_about_each_is_in_its_scripts(name, expected):
    text = render(ask(num_nodes=2, **account_for(name)), site(name))
    for part in expected:
        assert part in text, part


def test_network_plugins_are_forced_only_between_nodes():
    one = render(ask(account="p"), site("polaris"))
    assert "NCCL_NET" not in one
    assert "NCCL_NET='AWS Libfabric'" in render(ask(account="p", num_nodes=2), site("polaris"))


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
        ('inherits = "mine"', "none of alps"),
        ('inherits = "./mine.toml"', "circle"),
        ('inherits = "./other.toml"', "cannot be read"),
        ('inherits = "nowhere"', "none of"),
        ("inherits = 3", "none of"),
        ('title = "x"', "must be given"),
        ('inherits = "slurm"\nnosuch = 1', "unknown keys nosuch"),
        ('inherits = "slurm"\ngpus_per_node = "4"', "wrong type"),
        ('inherits = "slurm"\ngpus_per_node = true', "must be a whole number"),
        ('inherits = "slurm"\nmodules = "gcc"', "must be a list of texts"),
        ('inherits = "slurm"\n[environment]\nA = 1', "must be a table of texts"),
        ('inherits = "slurm"\ngpus_per_node = -1', "too small"),
        ('inherits = "slurm"\ndefault_gpus_per_node = -1', "too small"),
        ('inherits = "slurm"\ndefault_gpus_per_node = 9', "more than gpus_per_node = 8"),
        ('inherits = "slurm"\naccount = "a b"', "is not possible"),
        ('inherits = "slurm"\nneeds_account = 1', "wrong type"),
        ('inherits = "slurm"\nmpi = "lam"', "choose from"),
        ('inherits = "slurm"\nas_of = "yesterday"', "no date"),
        ('inherits = "slurm"\ncpu_masks = ["0xf;rm"]', "mask"),
        ('inherits = "slurm"\nmodules = ["a; rm"]', "module"),
        ('inherits = "slurm"\npartition = "a\\nb"', "U\\+000A"),
        ('inherits = "slurm"\nnode_local = "tmp"', "absolute"),
        ('inherits = "slurm"\nmax_walltime = "48"', "max_walltime"),
        ('inherits = "slurm"\n[environment]\nA = "x\\u0000"', "U\\+0000"),
        ('inherits = "slurm"\n[environment]\nIFS = "x"', "belongs to"),
        ('inherits = "slurm"\nassumed = ["nosuch"]', "neither keys nor variables"),
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
    assert "site broken: unknown keys nosuch" in said.err
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
        ("perlmutter", {"mpi": "openmpi"}, "does not go with"),
        ("perlmutter", {"image": "x.sif"}, "slurm-apptainer"),
        ("perlmutter", {"template": "slurm-apptainer"}, "give --image"),
        ("lumi", {"ranks_per_node": 9}, "cores for 8"),
        ("aurora", {"ranks_per_node": 12, "gpus_per_node": 6}, "ask for fewer ranks"),
        ("frontier", {"ranks_per_node": 4}, "make them equal"),
        ("polaris", {"memory_mib": 1024}, "whole"),
        ("polaris", {"qos": "high"}, "cannot be written for pbs"),
        ("polaris", {"max_requeues": 1}, "render it into a file"),
        ("polaris", {"max_requeues": 1, "script": "/s", "array_size": 2}, "array"),
        ("perlmutter", {"signal": "TERM"}, "srun kills its ranks on TERM"),
        ("perlmutter", {"signal": "HUP", "signal_lead_s": 60}, "srun kills its ranks on HUP"),
        ("lsf", {"walltime_s": 90, "signal_lead_s": 61}, "LSF counts in minutes"),
        ("pbs", {"max_requeues": 1, "after": ("7",), "script": "/s"}, "not both"),
        ("lsf", {"memory_mib": 1024}, "cannot be written for lsf"),
        ("flux", {"array_size": 4, "array_limit": 2}, "cannot be written for flux"),
    ],
)
def test_what_a_site_does_not_have_is_refused(name, fields, told):
    with pytest.raises(ConfigError, match=told):
        render(ask(**{"account": "p", **fields}), site(name))


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
