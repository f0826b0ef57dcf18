"""The order of the launcher's time limits at each scale, and its README, which has them as a table."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from tables import one_test

from roxxel_dist.cluster.distributed import INIT_TIMEOUT_S
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.launcher.policy.hang import LIMITS_S
from roxxel_dist.launcher.transport import pool
from roxxel_dist.process.exit_codes import UserError

README = Path(pool.__file__).parents[1] / "README.md"


@one_test("scale", [0.01, 0.1, 0.2, 0.5, 1, 3])
def test_their_order(scale: float) -> None:
    of = Limits().scaled(scale)
    assert of.heartbeat_s < of.quiet_s < of.still_s < of.silent_s, "messages may be late before a host is lost"
    assert of.report_s < of.quiet_s
    assert of.dump_s < of.quiet_s, "the answers come while the host still counts as heard"
    assert of.guard_kill_s < of.agent_end_s, "a guard ends before the controller gives it up"
    assert of.guard_kill_s < of.kill_s
    assert of.linger_s < of.agent_end_s, "a client that stays costs less than an agent that does"
    assert of.common_s < of.orphan_s - of.fresh_s, "a lease that holds is known to the launcher"
    assert of.report_s < of.quiet_s < of.common_s, "a host that is heard can tell that it hears"
    assert of.orphan_s + of.fresh_s < of.silent_s, "hosts have time to ask more than once"
    assert of.slack_s < of.gone_s, "also where a guard has to end a stopped agent"
    assert of.checks_s < of.quiet_s, "an agent answers in time while checks run"
    assert of.slack_s > 0, "an agent ends by itself before its guard kills it"
    assert of.usage_s < of.silent_s
    assert of.dump_s < of.members_s < of.silent_s, "the ranks of all hosts have answered, and no host counts as lost"
    assert of.answer_s < of.life_s, "a probe outlives the slowest answer of another host"


def test_limits_of_others() -> None:
    assert LIMITS_S["join"] < INIT_TIMEOUT_S, "a rank that has not come is named before jax aborts those that wait"
    assert JobSpec.host_lease > Limits().silent_s
    half, whole = Limits().scaled(0.5), Limits()
    assert half.silent_s == whole.silent_s / 2
    assert half.start_s == whole.start_s, "an interpreter starts no faster"
    names = {field.name for field in dataclasses.fields(Limits)}
    assert names >= Limits.OF_PROGRAMS


def test_the_shortest_lease_is_the_silence_of_the_job(tmp_path: Path) -> None:
    job = {"command": ("true",), "nprocs": 1, "run_id": "x", "log_dir": tmp_path}
    JobSpec(**job, host_lease=2.0, limits=Limits().scaled(0.2))
    with pytest.raises(UserError, match="must be seconds, 10 or more"):
        JobSpec(**job, host_lease=9.9)


def test_an_agent_gets_them_with_its_first_order() -> None:
    """And one of another version those that it knows."""
    limits = Limits().scaled(0.2)
    words = json.loads(json.dumps(dataclasses.asdict(limits)))
    assert Limits.from_message(words) == limits
    assert Limits.from_message({"silent_s": 3, "of_a_later_version_s": 1.0}) == Limits(silent_s=3.0)
    assert Limits.from_message({}) == Limits()


def test_the_table_has_their_values() -> None:
    values = dataclasses.asdict(Limits()) | {
        "JobSpec.host_lease": JobSpec.host_lease,
        'hang.LIMITS_S["join"]': LIMITS_S["join"],
        "distributed.INIT_TIMEOUT_S": INIT_TIMEOUT_S,
    }
    text = README.read_text().split("## Time limits")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([\d.]+) \| (.*?) \|", text, re.MULTILINE)
    table = {name: float(seconds) for seconds, names in rows for name in re.findall(r"`(.*?)`", names)}
    assert table == values
