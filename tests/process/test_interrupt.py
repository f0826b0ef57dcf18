"""Which second signal kills what saves: sequences as their senders send them."""

import signal

from tables import one_test

from roxxel_dist.process.interrupt import kills

INT, TERM, HUP, QUIT = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
USR1, USR2, XCPU = signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
TERMINAL, BATCH = False, True


@one_test(
    ("sender", "signals", "batch_job", "killed_at"),
    [
        ("systemd, a session scope", [(TERM, 0), (HUP, 0.001)], TERMINAL, None),
        ("systemd, on a busy machine", [(HUP, 0), (TERM, 1.5)], TERMINAL, None),
        ("GNU timeout: its program, then its group", [(TERM, 0), (TERM, 0.4)], TERMINAL, None),
        ("a wrapper that hands the terminal's Ctrl-C on", [(INT, 0), (INT, 0.05)], TERMINAL, None),
        ("a wrapper that makes it a SIGTERM", [(INT, 0), (TERM, 0.02)], TERMINAL, None),
        ("SLURM: a warning, then the limit", [(USR1, 0), (TERM, 0.02)], TERMINAL, None),
        ("the same, outside of what is known of it", [(USR1, 0), (TERM, 60)], TERMINAL, None),
        ("SLURM: steps and batch script, GraceTime between", [(TERM, 0), (TERM, 20)], BATCH, None),
        ("LSF: bkill", [(INT, 0), (TERM, 10)], BATCH, None),
        ("LSF: run limit", [(USR2, 0), (INT, 10), (TERM, 20)], BATCH, None),
        ("a warning that comes again", [(USR1, 0), (USR1, 30)], TERMINAL, None),
        ("CPU limit, each second", [(XCPU, 0), (XCPU, 1), (XCPU, 2)], TERMINAL, None),
        ("Ctrl-C, then the window is closed", [(INT, 0), (HUP, 8)], TERMINAL, None),
        ("Ctrl-C twice", [(INT, 0), (INT, 1)], TERMINAL, 1),
        ("Ctrl-C, hammered", [(INT, 0), (INT, 0.05), (INT, 0.1), (INT, 0.2)], TERMINAL, 3),
        ("Ctrl-C twice in a job of a batch system", [(INT, 0), (INT, 1)], BATCH, 1),
        ("kill, and again later", [(TERM, 0), (TERM, 6)], TERMINAL, 1),
        ("kill, then Ctrl-C later", [(TERM, 0), (INT, 6)], TERMINAL, 1),
        ("Ctrl-C, then kill later", [(INT, 0), (TERM, 6)], TERMINAL, 1),
        ("systemd, then a person", [(TERM, 0), (HUP, 0.01), (TERM, 6)], TERMINAL, 2),
        ("stop --kill", [(QUIT, 0)], TERMINAL, 0),
        ("Ctrl-C, then Ctrl-\\", [(INT, 0), (QUIT, 0.1)], TERMINAL, 1),
        ("stop --kill in a job of a batch system", [(TERM, 0), (QUIT, 0.1)], BATCH, 1),
    ],
)
def test_which_signal_kills(
    sender: str, signals: list[tuple[int, float]], batch_job: bool, killed_at: int | None
) -> None:
    verdicts = [
        kills(number, signals[:place], when, batch_job=batch_job) for place, (number, when) in enumerate(signals)
    ]
    assert (verdicts.index(True) if True in verdicts else None) == killed_at, sender
