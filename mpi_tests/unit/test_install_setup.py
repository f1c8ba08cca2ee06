"""The decisions of the set-up: stamp, venv, MPI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import InstallError
from hpctrain.install.mpi import two_rank_command
from hpctrain.install.setup import site_mpi, stamp, venv
from hpctrain.install.setup.sequence import parse
from hpctrain.mpi_version import MpiVersion

STAMP = stamp.Stamp(
    digest="d",
    packages=("torch-2.13.0",),
    mpi="MPICH (why)",
    horovod="built",
    tools="g++",
    asked={"mpi": "mpich", "horovod": "auto"},
)
NOW: dict[str, Any] = {
    "digest": "d",
    "packages": ("torch-2.13.0",),
    "horovod": "auto",
    "tools": "g++",
}
CFG = "[options]\ninstall_requires =\n    torch\n[options.extras_require]\ntest =\n    pytest\n"


def test_nothing_is_done_when_nothing_changed() -> None:
    assert stamp.is_current(STAMP, **NOW)


@pytest.mark.parametrize(
    "change", [{"digest": "e"}, {"packages": ("torch-2.12.0",)}, {"packages": ()}]
)
def test_a_change_of_inputs_or_packages_makes_it_stale(change: dict[str, Any]) -> None:
    assert not stamp.is_current(STAMP, **{**NOW, **change})


def test_without_a_stamp_it_is_stale() -> None:
    assert not stamp.is_current(None, **NOW)


@pytest.mark.parametrize(
    ("was", "asked", "tools", "current"),
    [
        ("failed", "auto", "g++", True),
        ("failed", "auto", "another g++", False),
        ("failed", "yes", "g++", False),
        ("failed", "no", "g++", True),
        ("skipped", "auto", "g++", False),
        ("skipped", "no", "g++", True),
        ("built", "yes", "another g++", True),
    ],
)
def test_a_failed_horovod_is_tried_again_only_with_hope(
    was: str, asked: str, tools: str, current: bool
) -> None:
    now = {**NOW, "horovod": asked, "tools": tools}
    assert stamp.is_current(replace(STAMP, horovod=was), **now) is current


def test_the_stamp_survives_writing_and_damage_counts_as_none(tmp_path: Path) -> None:
    assert stamp.read(tmp_path) is None
    stamp.write(tmp_path, STAMP)
    assert stamp.read(tmp_path) == STAMP
    assert [path.name for path in tmp_path.iterdir()] == [stamp.STAMP_NAME]
    for damage in ("", "{", "[]", '{"digest": "d"}'):
        (tmp_path / stamp.STAMP_NAME).write_text(damage)
        assert stamp.read(tmp_path) is None


def test_requirements_are_what_decides_and_comments_are_not() -> None:
    base = stamp.digest_of(stamp.requirements_of(CFG))
    assert stamp.digest_of(stamp.requirements_of(f"# note\n{CFG}[mypy]\nstrict = True\n")) == base
    assert stamp.digest_of(stamp.requirements_of(CFG.replace("pytest", "pytest>=9"))) != base


def _packages(folder: Path) -> Path:
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    return packages


def test_tracked_packages_are_read_from_their_folders(tmp_path: Path) -> None:
    packages = _packages(tmp_path)
    for name in ("torch-2.13.0+cpu", "mpi4py-4.1.2", "rich-15.0.0"):
        (packages / f"{name}.dist-info").mkdir()
    assert stamp.tracked_packages(tmp_path) == ("mpi4py-4.1.2", "torch-2.13.0+cpu")


def test_half_installed_packages_are_dropped(tmp_path: Path) -> None:
    packages = _packages(tmp_path)
    for name in ("torch-2.13.0.dist-info", "numpy-2.4.6.dist-info", "~orch", "torch"):
        (packages / name).mkdir()
    (packages / "numpy-2.4.6.dist-info" / "INSTALLER").write_text("pip\n")
    assert venv.repair_packages(tmp_path) == ["torch-2.13.0.dist-info", "~orch"]
    assert sorted(path.name for path in packages.iterdir()) == ["numpy-2.4.6.dist-info", "torch"]


def test_only_a_venv_may_be_cleared(tmp_path: Path) -> None:
    assert venv.may_clear(tmp_path / "missing")
    assert venv.may_clear(tmp_path)
    (tmp_path / "thesis.tex").touch()
    assert not venv.may_clear(tmp_path)
    assert not venv.may_clear(tmp_path / "thesis.tex")
    (tmp_path / "pyvenv.cfg").touch()
    assert venv.may_clear(tmp_path)


def test_ways_to_make_a_venv_are_those_the_python_has() -> None:
    def ways(**has: Any) -> list[list[list[str]]]:
        nothing: dict[str, Any] = {
            "has_ensurepip": False,
            "has_pip": False,
            "uv": None,
            "has_tool": False,
        }
        return venv.ways_to_make(Path("/v"), python="py", **{**nothing, **has})

    assert ways() == []
    assert ways(has_ensurepip=True, uv="/bin/uv")[0] == [["py", "-m", "venv", "/v"]]
    assert ways(uv="/bin/uv")[0][0][:3] == ["/bin/uv", "venv", "--seed"]
    (bare, pip) = ways(has_pip=True)[0]
    assert "--without-pip" in bare
    assert pip[-3:] == ["/v/bin/python", "install", "pip"]


SITE = site_mpi.SiteMpi(mpicc=Path("/usr/bin/mpicc"), mpirun=Path("/usr/bin/mpirun"))


@pytest.mark.parametrize(
    ("option", "site", "wanted"),
    [
        ("auto", SITE, True),
        ("site", SITE, True),
        ("mpich", SITE, False),
        ("auto", None, False),
        ("mpich", None, False),
    ],
)
def test_the_sites_mpi_is_wanted_where_it_is(
    option: str, site: site_mpi.SiteMpi | None, wanted: bool
) -> None:
    assert site_mpi.wants_site(option, site) is wanted


def test_insisting_on_a_site_mpi_that_is_not_there_is_refused() -> None:
    with pytest.raises(InstallError, match="MPI=mpich"):
        site_mpi.wants_site("site", None)


def test_an_mpi_inside_the_venv_is_not_the_sites(tmp_path: Path) -> None:
    for folder in ("venv/bin", "site/bin"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("mpicc", "mpirun"):
            (tmp_path / folder / name).write_text("#!/bin/sh\n")
            (tmp_path / folder / name).chmod(0o755)
    inside, outside = f"{tmp_path}/venv/bin", f"{tmp_path}/site/bin"
    assert site_mpi.find_site_mpi(inside, tmp_path / "venv") is None
    found = site_mpi.find_site_mpi(f"{inside}:{outside}", tmp_path / "venv")
    assert found is not None
    assert found.mpicc == Path(outside) / "mpicc"
    (tmp_path / "site/bin/mpicc").unlink()
    assert site_mpi.find_site_mpi(outside, tmp_path / "venv") is None


def test_a_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    tool = tmp_path / "mpicc"
    missing = site_mpi.fingerprint([tool])
    tool.write_text("one")
    assert site_mpi.fingerprint([tool]) != missing


@pytest.mark.parametrize(
    ("family", "version", "root", "flags"),
    [
        ("openmpi", "4.1.4", True, ["--allow-run-as-root", "--oversubscribe"]),
        ("openmpi", "5.0.11", False, ["--map-by", ":OVERSUBSCRIBE"]),
        ("mpich", "5.0.2", True, []),
        ("intel", "2021.9", False, []),
    ],
)
def test_each_mpi_gets_the_flags_it_insists_on(
    family: str, version: str, root: bool, flags: list[str]
) -> None:
    mpi = MpiVersion(family=family, version=version)
    command = two_rank_command(Path("/m/mpirun"), mpi, ["python"], root=root)
    assert command == ["/m/mpirun", *flags, "-n", "2", "python"]


def test_the_command_line_has_defaults_and_refuses_unknown_choices() -> None:
    args = parse([])
    assert (str(args.venv), args.mpi, args.horovod) == (".venv", "auto", "auto")
    with pytest.raises(SystemExit):
        parse(["--mpi", "lam"])


def test_auto_keeps_what_was_asked_for_before():
    assert stamp.as_before("mpi", "auto", STAMP) == "mpich"
    assert stamp.as_before("mpi", "site", STAMP) == "site"
    assert stamp.as_before("mpi", "auto", None) == "auto"
    assert stamp.as_before("horovod", "auto", STAMP) == "auto"


def test_the_ranges_in_the_code_are_those_of_setup_cfg():
    import configparser

    from hpctrain.install.horovod import build
    from hpctrain.install.setup import site_mpi

    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    extras = config["options.extras_require"]
    lines = [*config["options"]["install_requires"].splitlines()]
    lines += [line for extra in extras for line in extras[extra].splitlines()]
    declared = {line.replace(" ", "") for line in lines}
    assert {site_mpi.MPICH_SPEC, site_mpi.MPI4PY_SPEC, *build._SPECS.values()} <= declared
