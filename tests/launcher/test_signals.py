"""Signals that the launcher takes for requests, and those that it leaves to the program that it is a part of."""

import os
import signal

from roxxel_dist.launcher.job.signals import SignalPipe


def test_a_signal_of_the_program_is_no_request_to_stop() -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    try:
        with SignalPipe(print) as signals:
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            assert signals.take() == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.wait(0.1) == []
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert caught == [signal.SIGUSR2] * 3
