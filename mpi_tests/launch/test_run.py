"""`hpctrain run` with real ranks: ends, exit codes, output, variables, other people's scripts."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from mpi_tests.cluster.claim import start_time
from mpi_tests.cluster.mpi import mpi_of_this_python
from mpi_tests.launch.commands import HPCTRAIN, clean_environment, run

HEAD = "import os, sys, time\nrank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"


@pytest.fixture
def script(tmp_path):
    def write(body: str, name: str = "train.py"):
        path = tmp_path / name
        path.write_text(HEAD + body)
        return path

    return write


@pytest.fixture
def bare_mpirun():
    """The words that start so many ranks without `hpctrain run`."""
    from hpctrain.install.mpi import loaded_mpi, matching_mpirun
    from hpctrain.launch import launch_command

    mpirun, version = matching_mpirun(loaded_mpi(), clean_environment()["PATH"])
    return lambda n: launch_command(mpirun, version, num_ranks=n, root=os.geteuid() == 0)


def test_a_script_runs_on_every_rank(script):
    done = run(
        *HPCTRAIN,
        "run",
        "-n",
        "3",
        script("print('rank', rank, 'of', size, sys.argv[1:])"),
        "-x",
        "1",
    )
    assert done.code == 0, done.text
    assert sorted(done.out.splitlines()) == [f"rank {r} of 3 ['-x', '1']" for r in range(3)]
    assert done.err == ""


def test_ranks_know_their_share_of_the_cores_before_they_load_anything(script):
    body = "print(sys.modules.get('torch'), os.environ.get('OMP_NUM_THREADS'))"
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    path = script(body)
    given = {"-u OMP_NUM_THREADS": threads, "OMP_NUM_THREADS=": threads, "OMP_NUM_THREADS=3": 3}
    for words, told in ((text.split(), told) for text, told in given.items()):
        done = run("env", *words, *HPCTRAIN, "run", "-n", "2", path)
        assert done.out.splitlines() == [f"None {told}"] * 2, done.text


def test_ranks_keep_what_they_free_unless_told_otherwise(script):
    path = script("print(os.environ.get('MIMALLOC_PURGE_DELAY'))")
    clean = ["env", "-u", "MIMALLOC_PURGE_DELAY"]
    for words, told in (([], "60000"), (["HPCTRAIN_KEEP_MEMORY=0"], "None")):
        done = run(*clean, *words, *HPCTRAIN, "run", "-n", "2", path)
        assert done.out.splitlines() == [told] * 2, done.text
    done = run(*clean, "HPCTRAIN_KEEP_MEMORY=no", *HPCTRAIN, "run", "-n", "2", path)
    assert done.code != 0
    assert "HPCTRAIN_KEEP_MEMORY='no' is neither 0 nor 1" in done.err


def test_a_module_runs_too(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = run(*HPCTRAIN, "run", "-n", "2", "-m", "mine", "a", cwd=tmp_path)
    assert done.out.splitlines() == ["__main__ ['a']"] * 2, done.text


def test_a_script_may_be_given_with_its_python(script):
    path = script("print('rank', rank, 'of', size, __name__, sys.argv[1:])")
    for words in (["python", path], ["--", "python3", path]):
        done = run(*HPCTRAIN, "run", "-n", "2", *words, "-x")
        assert done.code == 0, done.text
        expected = [f"rank {r} of 2 __main__ ['-x']" for r in range(2)]
        assert sorted(done.out.splitlines()) == expected
        assert done.err == ""


def test_any_command_runs_on_every_rank(script, tmp_path):
    names = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR"
    told = ["sh", "-c", f"echo {names} ${{HPCTRAIN_CONTROL_FD-none}}"]
    done = run(*HPCTRAIN, "run", "-n", "2", "--log-dir", tmp_path / "logs", "--", *told)
    assert done.code == 0, done.text
    expected = [f"{r} 2 {r} 2 127.0.0.1 none" for r in range(2)]
    assert sorted(done.out.splitlines()) == expected
    logs = [(tmp_path / "logs" / f"rank-0000{r}.log").read_text() for r in range(2)]
    assert logs == [f"{line}\n" for line in expected]
    # A Python with options of its own joins MPI itself, below the rank's process.
    body = "import hpctrain as hpc\nwith hpc.init() as world:\n    print(world.mean(world.rank))"
    done = run(*HPCTRAIN, "run", "-n", "2", "python", "-u", script(body))
    assert (done.code, done.out) == (0, "0.5\n0.5\n"), done.text


@pytest.mark.alone
@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [("exit 7", 7, "exit code 7"), ("kill -9 $$", 137, "was killed by SIGKILL")],
)
def test_a_command_that_fails_on_one_rank_ends_all(ends, code, told):
    command = f"if [ $RANK = 1 ]; then {ends}; fi; sleep 60"
    done = run(*HPCTRAIN, "run", "-n", "2", "--", "sh", "-c", command)
    assert done.code == code, done.text
    assert done.elapsed_s < 5 + 3, done.text
    assert re.search(rf"rank 1 of 2 on \S+: sh .*{told}", done.err), done.text


def test_signals_reach_a_command_and_killed_ranks_take_it_along(tmp_path):
    started = [tmp_path / f"started-{rank}" for rank in range(2)]
    command = f"trap 'echo warned; exit 75' USR2; echo $$ > {tmp_path}/started-$RANK; "
    command += "while :; do sleep 0.1; done"
    words = [*HPCTRAIN, "run", "-n", "2", "--", "sh", "-c", command]
    with subprocess.Popen(
        words, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        wait_for(lambda: all(path.exists() and path.read_text() for path in started), 30)
        job.send_signal(signal.SIGUSR2)
        out, err = job.communicate(timeout=30)
    assert job.returncode == 75, err
    assert out.count("warned") == 2
    for path in started:
        path.unlink()
    with subprocess.Popen(
        words, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        wait_for(lambda: all(path.exists() and path.read_text() for path in started), 30)
        pids = [int(path.read_text()) for path in started]
        ranks = [int(re.search(r"^PPid:\s+(\d+)", status(pid), re.M).group(1)) for pid in pids]
        os.kill(ranks[1], signal.SIGKILL)
        _, err = job.communicate(timeout=30)
    assert job.returncode == 137, err
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 10)


def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return file.read()


def wait_for(holds, limit_s):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["-m", "nosuch.module"], 2, "-m nosuch.module: there is no module 'nosuch' here"),
        (["-m", "mine.nosuch"], 1, "-m mine.nosuch: there is no module 'mine.nosuch' here"),
        (["-m", "mine"], 1, "-m mine is a package without a __main__ module"),
        (["--hosts", "nosuchhost.invalid:1", "mine/__init__.py"], None, "unknown host: nosuchhost"),
        (["--logdir", "logs", "mine/__init__.py"], 2, "usage: hpctrain run [options] SCRIPT"),
    ],
)
def test_what_cannot_start_is_told_in_our_words(tmp_path, words, code, told):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    done = run(*HPCTRAIN, "run", *words, cwd=tmp_path)
    assert done.code == code if code is not None else done.code != 0, done.text
    assert told in done.err, done.text
    assert "Traceback" not in done.text


@pytest.mark.alone
@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise ValueError('boo')", 1, ["ValueError: boo", "train.py", "raise ValueError"]),
        ("sys.exit(3)", 3, ["sys.exit(3)"]),
        ("sys.exit('no data')", 1, ["no data"]),
        ("import nosuchmodule", 1, ["No module named 'nosuchmodule'"]),
        ("os._exit(5)", 5, ["called os._exit(5)"]),
        ("os.kill(os.getpid(), 9)", 137, ["died unexpectedly"]),
    ],
)
def test_what_ends_one_rank_ends_all_within_five_seconds(script, body, code, words):
    path = script(f"if rank == 1:\n    {body}\ntime.sleep(60)")
    done = run(*HPCTRAIN, "run", "-n", "3", path)
    assert done.elapsed_s < 5 + 3, done.text  # three seconds for three interpreters to start
    assert done.code == code, done.text
    assert all(word in done.text for word in words), done.text
    assert re.search(r"rank 1\b.* on \S+", done.err), done.text
    assert "BAD TERMINATION" not in done.text
    assert "runpy" not in done.text


def test_a_rank_that_leaves_by_os_exit_0_is_named_and_not_one_that_mpi_has_killed(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, hpctrain as hpc\n"
        "with hpc.init() as world:\n"
        "    world.comm.barrier()\n"
        "    if world.rank == 1:\n"
        "        os._exit(0)\n"
        "    world.comm.barrier()\n"
    )
    done = run(*HPCTRAIN, "run", "-n", "2", path)
    assert done.code == 137, done.text
    assert re.search(r"rank 1 on \S+ called os._exit\(0\) while other ranks", done.err), done.text
    assert "died unexpectedly" not in done.text


@pytest.mark.parametrize(
    ("words", "hinted"),
    [(["-n", "2"], "-n"), (["--ranks=2"], "--ranks"), (["--epochs", "2"], None)],
)
def test_our_options_after_the_script_are_the_scripts_own_with_a_hint(script, words, hinted):
    path = script("print(sys.argv[1:])")
    done = run(*HPCTRAIN, "run", path, *words)
    assert (done.code, done.out) == (0, f"{words}\n"), done.text
    assert done.err.count("is passed to it; the script runs on 1 rank") == (hinted is not None)
    if hinted:
        assert f"put it first: hpctrain run {hinted} ... {path}" in done.err
        assert "is passed to it" not in run(*HPCTRAIN, "run", "-n", "1", path, *words).err


def test_the_same_error_on_all_ranks_is_printed_once(script):
    done = run(*HPCTRAIN, "run", "-n", "4", script("import nosuchmodule"))
    assert done.code == 1
    assert done.err.count("Traceback") == 1, done.err


def test_an_exception_in_the_world_ends_all_ranks_under_bare_mpirun(bare_mpirun, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import time, hpctrain as hpc\n"
        "with hpc.init() as world:\n"
        "    if world.rank == 1:\n"
        "        raise RuntimeError('boo')\n"
        "    time.sleep(60)\n"
    )
    command = bare_mpirun(2)
    done = run(*command, sys.executable, path)
    assert done.code == 1
    assert done.text.count("RuntimeError: boo") == 1, done.text
    assert "rank 1 of 2" in done.text
    # and `hpctrain run` under that mpirun starts no second one
    done = run(*command, *HPCTRAIN, "run", path)
    assert done.code == 1
    assert "rank 1 of 2" in done.text


def test_a_rank_that_exits_well_does_not_end_the_others(script):
    done = run(
        *HPCTRAIN, "run", "-n", "2", script("if rank: sys.exit(0)\ntime.sleep(1)\nprint('done')")
    )
    assert done.code == 0, done.text
    assert done.out == "done\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_that_was_passed_on_is_named_as_what_ended_the_ranks(script, number, tmp_path):
    """Nobody has been killed, and no host is to blame."""
    path = script("print('here', flush=True)\ntime.sleep(60)")
    with subprocess.Popen(
        [*HPCTRAIN, "run", "-n", "2", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | {"HPCTRAIN_NOTES": str(tmp_path)},
    ) as process:
        for _ in range(2):
            assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number, err
    assert re.search(rf"was killed by the {number.name} passed on", err), err
    assert "without a word" not in err
    assert not list(tmp_path.glob("*failed*")), "no host has failed"


@pytest.mark.alone
def test_ctrl_c_ends_cleanly_and_leaves_nothing(script):
    path = script(
        "print('pid', os.getpid(), flush=True)\n"
        "try:\n    time.sleep(60)\nfinally:\n    print('finally', flush=True)"
    )
    with subprocess.Popen(
        [*HPCTRAIN, "run", "-n", "2", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as process:
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""  # without a Saver, or another handler, SIGTERM ends a process at once
    assert time.monotonic() - started < 5
    assert "interrupted by Ctrl-C (SIGINT)" in err
    assert "Traceback" not in err
    deadline = time.monotonic() + 5
    while any(start_time(pid) is not None for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [start_time(pid) for pid in pids] == [None, None]


def test_log_files_hold_each_ranks_own_output(script, tmp_path):
    body = "print('out', rank, flush=True); print('err', rank, file=sys.stderr, flush=True)\n"
    body += "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    logs = tmp_path / "logs"
    done = run(*HPCTRAIN, "run", "-n", "2", "--log-dir", logs, script(body))
    assert done.code == 137
    for rank in range(2):
        text = (logs / f"rank-{rank:05d}.log").read_text()
        assert {f"out {rank}", f"err {rank}"} <= set(text.splitlines())
        assert f"out {1 - rank}" not in text


def on_terminal(*argv) -> tuple[int, str]:
    """Run a command on a pseudo-terminal and return what the user would see."""
    main, child = pty.openpty()
    with subprocess.Popen(
        [str(word) for word in argv],
        stdin=child,
        stdout=child,
        stderr=child,
        env=clean_environment(),
    ) as process:
        os.close(child)
        seen = b""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                data = os.read(main, 4096)
            except OSError:
                break
            if not data:
                break
            seen += data
        os.close(main)
        code = process.wait(timeout=10)
    return code, seen.decode().replace("\r\n", "\n")


def test_on_a_terminal_lines_carry_their_rank(script):
    path = script("print('hello from', rank)")
    code, seen = on_terminal(*HPCTRAIN, "run", "-n", "2", path)
    assert code == 0
    assert sorted(seen.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    code, seen = on_terminal(*HPCTRAIN, "run", "-n", "2", "--quiet", path)
    assert seen.splitlines() == ["[0] hello from 0"]


TALK = """
import os
for line in range(500):
    print("rank", os.environ["PMI_RANK"], "says", line, "and", "goes", "on")
"""


@pytest.mark.parametrize(
    ("unbuffered", "program", "head"),
    [("1", [*HPCTRAIN, "run"], ""), ("", [sys.executable], "import hpctrain as hpc\nhpc.init()\n")],
    ids=["unbuffered under hpctrain run", "blocks after init"],
)
def test_lines_stay_whole_under_bare_mpirun(bare_mpirun, tmp_path, unbuffered, program, head):
    """mpirun mixes what ranks write at once: the words of a print, and blocks cut in mid-line."""
    path = tmp_path / "talk.py"
    rank = {"mpich": "PMI_RANK", "openmpi": "OMPI_COMM_WORLD_RANK"}[mpi_of_this_python().family]
    path.write_text(head + TALK.replace("PMI_RANK", rank))
    done = run(*bare_mpirun(3), *program, path, env={"PYTHONUNBUFFERED": unbuffered})
    said = [f"rank {rank} says {line} and goes on" for rank in range(3) for line in range(500)]
    assert sorted(done.out.splitlines()) == sorted(said), done.text[-2000:]


def test_a_plain_env_script_of_torch_distributed_runs_unchanged(tmp_path):
    path = tmp_path / "ddp.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.full((3,), float(dist.get_rank() + 1))\n"
        "dist.all_reduce(x)\n"
        "print(x.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    done = run(*HPCTRAIN, "run", "-n", "3", path)
    assert done.out.splitlines() == ["[6.0, 6.0, 6.0]"] * 3, done.text


def test_a_plain_horovod_script_runs_unchanged(tmp_path):
    pytest.importorskip("horovod", reason="Horovod is not built here")
    path = tmp_path / "hvd.py"
    path.write_text(
        "import torch\nimport horovod.torch as hvd\nhvd.init()\n"
        "x = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum)\n"
        "print(hvd.size(), x.tolist())\n"
    )
    done = run(*HPCTRAIN, "run", "-n", "2", path)
    assert done.out.splitlines() == ["2 [3.0, 3.0, 3.0]"] * 2, done.text


def test_under_torchrun_there_is_an_error_with_the_cure_and_never_size_1(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import hpctrain as hpc\nprint('size', hpc.init().size)\n")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = run(sys.executable, *torchrun, path)
    assert done.code != 0
    assert "LaunchError" in done.text
    assert "hpctrain run -n 2 train.py" in done.text
    assert "size 1" not in done.text


def test_a_foreign_mpirun_gets_the_cure(tmp_path):
    from hpctrain.install.mpi import launchers_on, loaded_mpi

    found = launchers_on(clean_environment()["PATH"].split(os.pathsep))
    foreign = [path for path, version in found if not version.starts(loaded_mpi().mpi)]
    if not foreign:
        pytest.skip("there is no mpirun of another MPI on PATH")
    path = tmp_path / "train.py"
    path.write_text("import hpctrain as hpc\nprint('size', hpc.init().size)\n")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = run(foreign[0], "-n", "2", sys.executable, path, env=as_root)
    assert done.code != 0
    assert "belongs to a different MPI" in done.text, done.text
    assert "hpctrain run -n 2" in done.text
    assert "size 1" not in done.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "no script was given"),
        (["run", "-n", "0", "x.py"], "at least 1 rank"),
        (["run", "-n", "2", "nosuch.py"], "nosuch.py' is neither a file here"),
        (["run", "-n", "9", "--hosts", "a:2", "x.py"], "more than the 2 ranks of a:2"),
        (["run", "--hosts", "a:x", "x.py"], "'a:x' is not valid"),
        (["run", "--hostfile", "nosuch", "x.py"], "hostfile nosuch cannot be read"),
        (["run", "-np", "2", "--log-dir", "/proc/x", "setup.cfg"], "cannot be written to"),
    ],
)
def test_mistakes_on_the_command_line_are_named(words, message):
    done = run(*HPCTRAIN, *words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_ranks_start_on_several_hosts(nodes, tmp_path):
    path = tmp_path / "where.py"
    path.write_text(
        "import os, hpctrain as hpc\n"
        "with hpc.init(seed=3) as world:\n"
        "    print(world.rank, world.host, world.node_rank, world.local_rank, world.num_nodes,\n"
        "          world.cross.Get_size(), os.environ['MASTER_ADDR'], os.environ['WORD'])\n"
    )
    hosts = f"{nodes.hosts[0]}:2,{nodes.hosts[1]}:1"
    done = nodes.run(
        nodes.hosts[0],
        [*HPCTRAIN, "run", "--hosts", hosts, "-x", "WORD=a,b c", str(path)],
        timeout_s=60,
        env={
            **nodes.environment(mpi_of_this_python().family),
            "PYTHONPATH": clean_environment()["PYTHONPATH"],
        },
    )
    first, second = nodes.hosts[:2]
    assert sorted(done.stdout.splitlines()) == [
        f"0 {first} 0 0 2 2 {first} a,b c",
        f"1 {first} 0 1 2 1 {first} a,b c",
        f"2 {second} 1 0 2 2 {first} a,b c",
    ], done.stdout + done.stderr


@pytest.mark.parametrize("suffix", ["-fast", "-unknown"])
def test_ranks_meet_on_the_fast_network_of_the_site(nodes, tmp_path, suffix):
    path = tmp_path / "meet.py"
    path.write_text(
        "import os, torch, hpctrain as hpc\n"
        "from hpctrain.engines.torch_dist import TorchEngine\n"
        "with hpc.init(seed=3) as world:\n"
        "    TorchEngine(world.comm, torch.device('cpu'), timeout_s=30).close()\n"
        "    print('met', os.environ['MASTER_ADDR'])\n"
    )
    hosts = nodes.hosts[:2]
    names = "".join(f"{nodes.address(host)} {host}-fast\\n" for host in hosts)
    for host in hosts:
        nodes.run(host, ["sh", "-c", f"printf '{names}' >>/etc/hosts"], timeout_s=10)
    done = nodes.run(
        hosts[0],
        [
            *HPCTRAIN,
            "run",
            "--hosts",
            ",".join(hosts),
            "-x",
            f"HPCTRAIN_HOST_SUFFIX={suffix}",
            str(path),
        ],
        timeout_s=60,
        env={
            **nodes.environment(mpi_of_this_python().family),
            "PYTHONPATH": clean_environment()["PYTHONPATH"],
        },
        check=False,
    )
    if suffix == "-fast":
        assert done.stdout.splitlines() == [f"met {hosts[0]}-fast"] * 2, done.stdout + done.stderr
    else:
        assert done.returncode != 0
        assert f"host {hosts[1]}-unknown of rank 1 does not resolve" in done.stdout + done.stderr


@pytest.mark.alone
def test_help_is_quick_and_loads_neither_torch_nor_mpi():
    watch = "import sys; from hpctrain.cli import main\n"
    watch += "try: main(['--help'])\nexcept SystemExit: pass\n"
    watch += "print(sorted({'torch', 'mpi4py', 'rich', 'numpy'} & set(sys.modules)))"
    done = run(sys.executable, "-c", watch)
    assert done.out.splitlines()[-1] == "[]"
    fastest = min(run(*HPCTRAIN, "--help").elapsed_s for _ in range(5))
    assert fastest < 0.3
