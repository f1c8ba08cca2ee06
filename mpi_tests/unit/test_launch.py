"""Host lists, mpirun command lines, MPI versions and the screen."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain import launch
from hpctrain.cli.starting import warn_of_shared_gpus
from hpctrain.errors import ConfigError
from hpctrain.launch import gpus, tee
from hpctrain.launch.command import (
    Hosts,
    launch_command,
    launch_environment,
    parse_hosts,
    parse_variable,
)
from hpctrain.launch.gpus import count_gpus, count_present, limit_visible
from hpctrain.launch.program import is_another_python, read_program
from hpctrain.launch.screen import Screen
from hpctrain.mpi_version import MpiVersion, identify
from hpctrain.programs import Answer

names = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True)


@given(st.dictionaries(names, st.integers(1, 999), min_size=1, max_size=8))
def test_hosts_round_trip(slots):
    hosts = parse_hosts(",".join(f"{host}:{count}" for host, count in slots.items()))
    assert dict(hosts.slots) == slots
    assert parse_hosts(str(hosts)) == hosts
    lines = parse_hosts("\n".join(f"{host} slots={count}" for host, count in slots.items()))
    assert lines == hosts
    assert hosts.num_ranks == sum(slots.values())


def test_a_node_file_of_pbs_counts_lines():
    assert parse_hosts("a\nb # gpu\na\n\n").slots == (("a", 2), ("b", 1))


@pytest.mark.parametrize(
    "text", ["", "# none", "a:0", "a:b", "a;rm", "-x:2", "a:2:3", "a b", "a:-1"]
)
def test_hosts_that_are_none_are_refused(text):
    with pytest.raises(ConfigError):
        parse_hosts(text)


OPENMPI4 = MpiVersion(family="openmpi", version="4.1.4")
OPENMPI5 = MpiVersion(family="openmpi", version="5.0.11")
MPICH = MpiVersion(family="mpich", version="5.0.2")


def test_each_mpi_gets_its_own_flags():
    hosts = Hosts(slots=(("a", 2), ("b", 2)))

    def command(version, **more):
        return launch_command(Path("/x/mpirun"), version, num_ranks=4, **more)

    four = command(OPENMPI4, root=True)
    assert four[:3] == ["/x/mpirun", "-n", "4"]
    assert {"--allow-run-as-root", "--oversubscribe"} <= set(four)
    five = command(OPENMPI5, root=False)
    assert ":OVERSUBSCRIBE" in five
    assert "--allow-run-as-root" not in five
    assert command(MPICH, root=True) == ["/x/mpirun", "-n", "4"]
    remote = command(OPENMPI4, root=False, hosts=hosts, pass_on=["PATH", "A"])
    assert remote[remote.index("--host") + 1] == "a:2,b:2"
    assert [remote[i + 1] for i, word in enumerate(remote) if word == "-x"] == ["PATH", "A"]
    assert command(MPICH, root=False, hosts=hosts, pass_on=["PATH", "A"])[3:] == [
        "-hosts",
        "a:2,b:2",
        "-genvlist",
        "PATH,A",
    ]


def test_waiting_ranks_yield_where_cores_are_scarce():
    yields = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert launch_environment(OPENMPI4, num_ranks=2, num_cores=2) == yields
    assert launch_environment(OPENMPI4, num_ranks=2, num_cores=16) == {}
    assert launch_environment(MPICH, num_ranks=2, num_cores=2) == {}


def test_hydras_proxies_are_not_offered_pmix_by_slurm():
    inside = launch_environment(MPICH, num_ranks=2, num_cores=2, batch_system="Slurm")
    assert inside == {"SLURM_MPI_TYPE": "none"}


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", "openmpi", "4.1.4"),
        ("Open MPI v5.0.11, package: Open MPI x, ident: 5.0.11", "openmpi", "5.0.11"),
        ("HYDRA build details:\n    Version:           5.0.2\n", "mpich", "5.0.2"),
        ("MPICH Version:      5.0.2\nMPICH Release date:", "mpich", "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build", "intel", "2021.9"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "intel", "2021.13"),
        ("MVAPICH2 Version      :\t2.3.7\n", "mvapich", "2.3.7"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.16 (ANL base 3.4a2)", "cray", "8.1.28.16"),
        ("something else", "unknown", ""),
    ],
)
def test_every_mpi_is_known_by_its_words(text, family, version):
    assert identify(text) == MpiVersion(family=family, version=version)


def test_whose_launcher_starts_whose_programs():
    assert OPENMPI4.starts(MpiVersion(family="openmpi", version="4.0.1"))
    assert not OPENMPI4.starts(OPENMPI5)
    assert not OPENMPI4.starts(MPICH)
    assert MpiVersion(family="intel", version="2021.9").starts(MPICH)


def screen(**options):
    out, err = io.BytesIO(), io.BytesIO()
    defaults = {"label": True, "live": False, "num_ranks": 12}
    return Screen(out=out, err=err, **{**defaults, **options}), out, err


def test_lines_stay_whole_and_labelled():
    drawn, out, err = screen()
    drawn.feed(3, "out", b"half ")
    drawn.feed(10, "out", b"other\n")
    drawn.feed(3, "out", b"line\nrest")
    drawn.feed(3, "err", b"wrong\n")
    drawn.finish()
    assert out.getvalue() == b"[10] other\n[ 3] half line\n[ 3] rest\n"
    assert err.getvalue() == b"[ 3] wrong\n"


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=12)), max_size=30))
def test_nothing_is_lost_or_mixed_however_it_is_cut(chunks):
    drawn, out, _ = screen(label=True, num_ranks=4)
    for rank, data in chunks:
        drawn.feed(rank, "out", data)
    drawn.finish()
    for rank in range(4):
        told = b"".join(data for source, data in chunks if source == rank)
        if told and not told.endswith(b"\n"):
            told += b"\n"
        label = f"[{rank}] ".encode()
        shown = [line for line in out.getvalue().split(b"\n") if line.startswith(label)]
        assert b"".join(line[len(label) :] + b"\n" for line in shown) == told


def test_quiet_shows_one_rank():
    drawn, out, _ = screen(only_rank=0)
    drawn.feed(1, "out", b"no\n")
    drawn.feed(0, "out", b"yes\n")
    assert out.getvalue() == b"[ 0] yes\n"


def test_a_progress_bar_is_redrawn_below_what_others_say():
    drawn, out, _ = screen(live=True, num_ranks=2)
    drawn.feed(0, "out", b"\r10 %")
    drawn.show_partial_lines()
    drawn.feed(1, "out", b"hello\n")
    assert out.getvalue() == b"[0] 10 %\r\x1b[2K[1] hello\n[0] 10 %"


def test_the_launchers_words_are_held_once_all_ranks_are_connected():
    drawn, out, _ = screen(label=False)
    drawn.feed(None, "out", b"early\n")
    drawn.hold_launcher = True
    drawn.feed(None, "err", b"BAD TERMINATION\n")
    drawn.finish()
    assert out.getvalue() == b"early\n"
    assert drawn.launcher_words == b"BAD TERMINATION\n"


@pytest.mark.parametrize("warning", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_the_copy_of_a_ranks_output_outlives_a_warning_to_the_whole_job(tmp_path, warning):
    path = tmp_path / "rank.log"
    out, err = os.pipe(), os.pipe()
    words = [sys.executable, "-I", "-S", tee.__file__, str(path), str(out[0]), str(err[0])]
    with subprocess.Popen(words, pass_fds=(out[0], err[0]), stdout=subprocess.PIPE) as copying:
        os.write(out[1], b"ready\n")
        assert copying.stdout.readline() == b"ready\n"
        copying.send_signal(getattr(signal, warning))
        os.write(out[1], b"saved\n")
        for descriptor in (*out, *err):
            os.close(descriptor)
        assert copying.stdout.read() == b"saved\n"
    assert (copying.returncode, path.read_bytes()) == (0, b"ready\nsaved\n")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("A=1", ("A", "1")), ("A=", ("A", "")), ("B", ("B", "here")), ("A=b=c", ("A", "b=c"))],
)
def test_a_variable_has_its_value_or_the_one_that_is_here(text, wanted):
    assert parse_variable(text, {"B": "here"}) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("C", "-x C: it is not set here"),
        ("=1", "is not a variable"),
        ("a b=1", "is not a variable"),
    ],
)
def test_a_variable_that_cannot_be_passed_on_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_variable(text, {"B": "here"})


@pytest.mark.parametrize(
    ("present", "variables", "visible"),
    [
        (0, {}, 0),
        (4, {}, 4),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (4, {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (4, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        (4, {"CUDA_VISIBLE_DEVICES": "2, 3"}, 2),
        (4, {"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
        (4, {"CUDA_VISIBLE_DEVICES": "GPU-6c1a,MIG-77,MIG-GPU-1/2/3"}, 3),
        (1, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1),
        (8, {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0"}, 1),
    ],
)
def test_what_variables_leave_visible(present, variables, visible):
    assert limit_visible(present, variables) == visible


def test_gpus_are_counted_where_drivers_show_them(tmp_path):
    assert count_present(tmp_path) == 0
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, gpu_id in enumerate(["0", "51234", "51235"]):  # the first is a CPU
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert count_present(tmp_path) == 2
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert count_present(tmp_path) == 4
    for address in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
    assert count_present(tmp_path) == 5


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "told"),
    [
        (2, 1, "2 ranks for 1 GPU on"),
        (8, 4, "8 ranks for 4 GPUs on"),
        (4, 4, None),
        (1, 4, None),
        (4, 0, None),
        (4, None, None),
    ],
)
def test_more_ranks_than_gpus_are_said_with_commands_that_work(
    num_ranks, num_gpus, told, monkeypatch, capsys
):
    monkeypatch.setattr(launch, "count_gpus", lambda *_: num_gpus)
    warn_of_shared_gpus(num_ranks, {}, ["hpctrain", "run"], ["my train.py", "--lr", "1"])
    err = capsys.readouterr().err
    assert bool(err) == (told is not None)
    if told:
        assert told in err
        assert f"hpctrain run -n {num_gpus} 'my train.py' --lr 1\n" in err
        assert f"hpctrain run -n {num_ranks} -x CUDA_VISIBLE_DEVICES= 'my train.py' --lr 1\n" in err
        assert "allow_shared_device=True" in err


def test_torch_has_the_last_word_on_gpus(monkeypatch):
    asked = []

    def answer(command, *, environ, limit_s):
        asked.append(environ)
        return Answer(code=0, out="a banner\ngpus 0\n")

    monkeypatch.setattr(gpus, "count_present", lambda: 1)
    monkeypatch.setattr(gpus, "ask", answer)
    assert count_gpus(1, {}) == 1
    assert count_gpus(2, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert asked == []  # one rank per GPU, or none: nothing is started to find out
    assert count_gpus(2, {}) == 0  # a torch without CUDA computes on the CPU
    assert len(asked) == 1
    monkeypatch.setattr(gpus, "ask", lambda *_, **__: Answer(code=1, err="no torch"))
    assert count_gpus(2, {}) is None


def test_the_words_after_run_are_a_script_a_module_or_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("#!/usr/bin/env python\n")
    (tmp_path / "train.py").chmod(0o755)
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "notes").write_text("x = 1\n")
    (tmp_path / "a.out").write_text("#!/bin/sh\n")
    (tmp_path / "a.out").chmod(0o755)
    python = sys.executable

    def read(*words, is_module=False):
        program = read_program(words, is_module=is_module)
        kind = "module" if program.is_module else "command" if program.is_command else "script"
        return kind, program.target, *program.arguments

    assert read("train.py", "-x") == ("script", "train.py", "-x")
    assert read("--", "train.py") == ("script", "train.py")
    assert read("tool") == ("script", "tool")
    assert read("notes") == ("script", "notes")
    assert read(python, "train.py", "--lr") == ("script", "train.py", "--lr")
    assert read(python, "-m", "json.tool", "x") == ("module", "json.tool", "x")
    assert read("-m", "json.tool") == ("module", "json.tool")
    assert read("json.tool", "x", is_module=True) == ("module", "json.tool", "x")
    assert read(python, "-u", "train.py") == ("command", python, "-u", "train.py")
    assert read(python, "-c", "pass") == ("command", python, "-c", "pass")
    assert read(python) == ("command", python)
    assert read("./a.out", "1") == ("command", "./a.out", "1")
    assert read("--", "sh", "-c", "true") == ("command", "sh", "-c", "true")
    assert read("trian.py")[0] == "script"  # which is then refused by name
    with pytest.raises(ConfigError, match=r"neither a file here .* nor a command"):
        read_program(["trian.py"], is_module=False).check()
    with pytest.raises(ConfigError, match="no script was given"):
        read_program(["--"], is_module=False)


def test_another_python_is_known_by_its_folder(tmp_path):
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    assert is_another_python(str(other))  # another environment, though the same binary
    assert not is_another_python(sys.executable)
    assert not is_another_python("pythonic")
