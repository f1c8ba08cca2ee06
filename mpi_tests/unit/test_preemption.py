"""Signals set a flag and nothing else; what was there before is kept, called and put back."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time

import pytest

from hpctrain.errors import ConfigError
from hpctrain.faults.preemption import SIGNALS, Preemption, find_native, signal_number


def test_the_first_signal_is_remembered_and_later_ones_are_harmless():
    with Preemption() as asked:
        assert (asked.requested, asked.signals) == (None, SIGNALS)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        assert asked.requested == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    asked.close()


def test_handlers_of_python_code_are_chained_and_restored():
    heard = []

    def before(number, frame):
        heard.append((number, frame is not None))

    old = signal.signal(signal.SIGUSR2, before)
    try:
        with Preemption(("USR2",)) as asked:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert asked.requested == "SIGUSR2"
        assert heard == [(signal.SIGUSR2, True)]
        assert signal.getsignal(signal.SIGUSR2) is before
    finally:
        signal.signal(signal.SIGUSR2, old)


@pytest.mark.parametrize("previous", [signal.SIG_IGN, signal.SIG_DFL])
def test_ignored_and_default_signals_are_not_chained(previous):
    old = signal.signal(signal.SIGUSR1, previous)
    try:
        with Preemption(("SIGUSR1",)) as asked:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert asked.requested == "SIGUSR1"
        assert signal.getsignal(signal.SIGUSR1) is previous
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_interrupt_is_a_request_and_no_exception_where_it_is_asked_for():
    with Preemption(("int",)) as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked.requested == "SIGINT"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_came_later_is_left_in_place():
    old = signal.getsignal(signal.SIGUSR2)
    asked = Preemption(("SIGUSR2",))
    later = signal.signal(signal.SIGUSR2, lambda *_: None)
    assert later is asked._handler
    asked.close()
    try:
        assert signal.getsignal(signal.SIGUSR2) not in (old, asked._handler)
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_native_handlers_are_replaced_with_a_warning_and_put_back(capsys, tmp_path):
    with (tmp_path / "stacks").open("w+") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump)
        try:
            with Preemption(("SIGUSR1", "SIGUSR2")) as asked:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert asked.requested == "SIGUSR1"
            assert "SIGUSR1 was handled by native code (" in capsys.readouterr().err
            assert dump.tell() == 0
            os.kill(os.getpid(), signal.SIGUSR1)
            dump.seek(0)
            assert "test_preemption.py" in dump.read()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert find_native(signal.SIGUSR1) is None


def test_a_forked_child_ignores_warnings_and_can_be_terminated():
    with Preemption() as asked:
        child = os.fork()
        if child == 0:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            if asked.requested is None:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert asked.requested is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("SIGKILL",), "'SIGKILL' cannot be used as a warning; choose from SIGUSR2"),
        (("USR3",), "'USR3' is unknown here"),
        ((), "at least one signal"),
        (("USR2", "SIGUSR2"), "each once"),
        ("SIGUSR2", r"give a tuple, \('SIGUSR2',\)"),
    ],
)
def test_wrong_signals_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        Preemption(given)


def test_other_threads_are_refused_by_name():
    said = []

    def attempt():
        try:
            Preemption()
        except ConfigError as error:
            said.append(str(error))

    thread = threading.Thread(target=attempt, name="mine")
    thread.start()
    thread.join()
    assert "this is the thread 'mine'; make this object in the main thread" in said[0]


def test_names_with_and_without_the_prefix():
    assert signal_number("usr2") is signal_number("SIGUSR2") is signal.SIGUSR2
