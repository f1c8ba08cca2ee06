"""Installing a built wheel into an interpreter, with a record of what it is bound to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpctrain import log
from hpctrain.errors import InstallError
from hpctrain.install.horovod import HOROVOD_VERSION
from hpctrain.install.horovod.cache import RECORD_NAME, bindings
from hpctrain.install.horovod.facts import RUNTIME_NEEDS, BuildFacts

__all__ = ["install_wheel"]

# Listed in RECORD, so that uninstalling Horovod takes the file along.
_WRITE_RECORD = """
import sys
from importlib import metadata
name, text = sys.argv[1:]
horovod = metadata.distribution("horovod")
entry = next(f for f in horovod.files if f.name == "RECORD")
record = horovod.locate_file(entry)
(record.parent / name).write_text(text, encoding="utf-8")
line = f"{entry.parent / name},,\\n"
if line not in record.read_text(encoding="utf-8"):
    with record.open("a", encoding="utf-8") as out:
        out.write(line)
"""


def install_wheel(wheel: Path, facts: BuildFacts, environ: Mapping[str, str]) -> None:
    """Install the wheel and what it needs at run time; torch and MPI stay as they are.

    Raises:
        InstallError: pip failed.
    """
    python = str(facts.python.executable)
    missing = [name for name in RUNTIME_NEEDS if not facts.python.packages.get(name)]
    pip = [python, "-m", "pip", "install", "-q"]
    if missing:
        _run([*pip, *missing], environ)
    # The same version may be installed already, bound to another torch.
    _run([*pip, "--no-deps", "--force-reinstall", str(wheel)], environ)
    text = json.dumps(bindings(facts), indent=2, sort_keys=True) + "\n"
    _run([python, "-c", _WRITE_RECORD, RECORD_NAME, text], environ)
    log.notice(f"installed Horovod {HOROVOD_VERSION} into {facts.python.prefix}")


def _run(command: list[str], environ: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env=dict(environ)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"installing Horovod failed: {error}; try again") from error
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).strip().splitlines()
        last = lines[-1] if lines else f"exit code {done.returncode}"
        raise InstallError(
            f"installing Horovod failed: `{' '.join(command[:5])} ...` said: {last}. If you "
            "cannot write to this environment, make a venv (`python -m venv "
            "--system-site-packages`) and build from there"
        )
