"""Fixtures for all parts: tests that leak environment variables or threads fail."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from mpi_tests.older_torch import refusal_in

pytest_plugins = ["mpi_tests.cluster.fixtures"]

# Shells start background jobs with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Set once by torch's compiler, by netCDF4, and by the horovod engine before Horovod starts.
OWN = ("TORCHINDUCTOR_", "TRITON_", "HDF5_", "HOROVOD_")


@pytest.fixture(autouse=True)
def no_leaks():
    """Fail a test that leaves variables or threads behind."""
    environ = dict(os.environ)
    threads = {thread.ident for thread in threading.enumerate()}
    yield
    changed = {
        name
        for name in {*environ, *os.environ} - {"PYTEST_CURRENT_TEST"}
        if environ.get(name) != os.environ.get(name) and not name.startswith(OWN)
    }
    for name in changed:
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    left = [t.name for t in threading.enumerate() if t.ident not in threads and not t.daemon]
    assert not left, f"the test left threads running: {left}"


def _skip_where_torch_is_older():
    try:
        return (yield)
    except Exception as error:
        torch = sys.modules.get("torch")
        if torch is not None:
            major, minor = torch.__version__.split(".")[:2]
            reason = refusal_in(error, (int(major), int(minor)))
            if reason is not None:
                pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """A fixture may be what this torch lacks."""
    return (yield from _skip_where_torch_is_older())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """So may the test."""
    return (yield from _skip_where_torch_is_older())
