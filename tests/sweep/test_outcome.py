"""Whose fault it was that a trial's program ended, told from its exit code and its last words."""

from tables import one_test

from roxxel_dist.sweep.trial.outcome import classify_exit

NAN = "roxxel-dist: step 2 went wrong: its loss is nan; see the log"
CLIENT = """Exception in thread wandb-ServiceFinalizer:
Traceback (most recent call last):
  File "service.py", line 96, in publish
RuntimeError: Event loop is closed"""

LOST = "E1128 14:20:11.123456   1234 coordination_service_agent.cc:358] Failed to poll for errors"
HELD = "s3://b/x: train (pid 7 on host h2) writes there, and renewed its lease (run.lease) 3 s ago: end that process"


@one_test(
    ("said", "kind", "reason"),
    [
        (NAN, "nan", "step 2 went wrong: its loss is nan; see the log"),
        (f"{NAN}\n{CLIENT}", "nan", "step 2 went wrong: its loss is nan; see the log"),
        (f"12:00:00 0 | {NAN}\nroxxel-dist: rank 0 ended", "nan", "step 2 went wrong: its loss is nan; see the log"),
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: 5 GB", "oom", "JaxRuntimeError: RESOURCE_EXHAUSTED: 5 GB"),
        (f"Traceback (most recent call last):\n{LOST}\n  f()\nKeyError: 1\n{LOST}", "error", "KeyError: 1"),
        ("TypeError: add got incompatible shapes", "shape", "TypeError: add got incompatible shapes"),
        ("roxxel-dist: no data", "error", "no data"),
        (f"roxxel-dist: {HELD}", "lost", HELD),
        ("", "error", "it ended with exit code 1 and wrote nothing"),
    ],
)
def test_the_kind_and_the_reason(said, kind, reason):
    assert classify_exit(1, said, ours=True) == (kind, reason)


@one_test(
    ("code", "ours", "lost"),
    [
        (137, True, True),
        (143, False, True),
        (1, True, False),
        (42, True, True),
        (42, False, False),
        (2, True, False),
        (74, True, True),
        *[(code, True, True) for code in (69, 70, 71, 76, 77, 124, 135, 139)],
        *[(code, False, False) for code in (70, 77, 139)],
    ],
)
def test_whose_fault_it_was(code, ours, lost):
    assert (classify_exit(code, "", ours=ours)[0] == "lost") is lost


def test_memory_of_an_accelerator_that_runs_out_is_the_trials():
    said = "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory allocating 5 GB"
    assert classify_exit(77, said, ours=True)[0] == "oom"
