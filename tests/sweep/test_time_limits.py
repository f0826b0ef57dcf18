"""The order of a sweep's time limits, which its README has as a table."""

import re
from pathlib import Path

from roxxel_dist.sweep import ray_executor
from roxxel_dist.sweep.driver import bucket, controller
from roxxel_dist.sweep.study import journal, stored_journal
from roxxel_dist.sweep.trial import corpus, process, trial

README = Path(controller.__file__).parents[1] / "README.md"
MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (controller, journal, stored_journal, corpus, bucket, process, ray_executor, trial)
}


def test_their_order():
    assert process.POLL_S < controller.POLL_S
    assert process.GRACE_S < process.STOP_LIMIT_S, "ranks have saved before their launcher is killed"
    assert process.STOP_LIMIT_S < ray_executor.END_S, "a program is killed before its worker kills itself"
    assert ray_executor.END_S < ray_executor.GIVE_UP_S, "a worker has ended before nobody waits for it"
    assert ray_executor.END_S < journal.WAIT_S, "a controller that ends its trials has ended before the next gives up"
    assert process.STOP_LIMIT_S < trial.LOCK_LIMIT_S, "a trial waits for the end of its attempt before"


def test_the_table_has_their_values():
    rows = re.findall(r"^\| ([\d.]+) \| (.*?) \|", README.read_text(), re.MULTILINE)
    table = {name: float(seconds) for seconds, names in rows for name in re.findall(r"`(\w+\.[A-Z_]+)`", names)}
    assert len(table) == 13
    assert table == {name: getattr(MODULES[name.partition(".")[0]], name.partition(".")[2]) for name in table}
