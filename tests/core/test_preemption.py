"""SIGTERM: the first is a request, the second is not."""

import os
import signal
import threading

import pytest

from core.preemption import agreed, on_sigterm


def test_the_first_signal_asks_and_the_second_ends_at_once(monkeypatch, capfd):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    stop = threading.Event()
    with on_sigterm(stop):
        assert not agreed(stop)
        signal.raise_signal(signal.SIGTERM)
        assert agreed(stop)
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert capfd.readouterr().err.count("a second one ends at once") == 1


def test_what_sigterm_did_before_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), on_sigterm(threading.Event()):
        assert signal.getsignal(signal.SIGTERM) is not before
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def work():
        with on_sigterm(threading.Event()):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
