"""The order of the launcher's time limits, which its README has as a table."""

import re
from pathlib import Path

from roxxel_dist.cluster.distributed import INIT_TIMEOUT_S
from roxxel_dist.cluster.exit_codes import USAGE_S
from roxxel_dist.launcher.control import notify
from roxxel_dist.launcher.control.attempt import DUMP_S
from roxxel_dist.launcher.host import agent, host_checks, lease, process_tree, spares
from roxxel_dist.launcher.host.probe import LIFE_S
from roxxel_dist.launcher.host.process_tree import HEARTBEAT_TIMEOUT_S
from roxxel_dist.launcher.job.spec import LEAST_LEASE_S, JobSpec
from roxxel_dist.launcher.policy.hang import LIMITS_S, STILL_S
from roxxel_dist.launcher.preflight.candidates import LOOK_S
from roxxel_dist.launcher.preflight.warm_hosts import WARM_S
from roxxel_dist.launcher.transport import pool
from roxxel_dist.launcher.transport.questions import ANSWER_S

README = Path(pool.__file__).parents[1] / "README.md"


def test_their_order() -> None:
    assert pool.HEARTBEAT_S < pool.QUIET_S < STILL_S < pool.SILENT_S, "messages may be late before a host is lost"
    assert agent.REPORT_S < pool.QUIET_S
    assert DUMP_S < pool.QUIET_S, "the answers come while the host still counts as heard"
    assert process_tree.KILL_S < pool.AGENT_END_S, "a guard ends before the controller gives it up"
    assert process_tree.KILL_S < pool.KILL_S
    assert pool.LINGER_S < pool.AGENT_END_S, "a client that stays costs less than an agent that does"
    assert pool.SILENT_S == HEARTBEAT_TIMEOUT_S, (
        "ranks of a host that is cut off end when the controller takes them for ended"
    )
    assert pool.COMMON_S < lease.ORPHAN_S - lease.FRESH_S, "a lease that holds is known to the launcher"
    assert agent.REPORT_S < pool.QUIET_S < pool.COMMON_S, "a host that is heard can tell that it hears"
    assert lease.ORPHAN_S + lease.FRESH_S < HEARTBEAT_TIMEOUT_S, "hosts have time to ask more than once"
    assert agent.SLACK_S < pool.GONE_S, "also where a guard has to end a stopped agent"
    assert LEAST_LEASE_S == HEARTBEAT_TIMEOUT_S
    assert host_checks.WAIT_S < pool.QUIET_S, "an agent answers in time while checks run"
    assert agent.SLACK_S > 0, "an agent ends by itself before its guard kills it"
    assert USAGE_S < pool.SILENT_S
    assert ANSWER_S < LIFE_S, "a probe outlives the slowest answer of another host"
    assert LIMITS_S["join"] < INIT_TIMEOUT_S, "a rank that has not come is named before jax aborts those that wait"


def test_the_table_has_their_values() -> None:
    values = {
        "host_checks.WAIT_S": host_checks.WAIT_S,
        "host_checks.TOOL_S": host_checks.TOOL_S,
        "host_checks.DEVICES_S": host_checks.DEVICES_S,
        "host_checks.COMMAND_S": host_checks.COMMAND_S,
        "notify.END_S": notify.END_S,
        "notify.LIMIT_S": notify.LIMIT_S,
        "pool.HEARTBEAT_S": pool.HEARTBEAT_S,
        "agent.REPORT_S": agent.REPORT_S,
        "attempt.DUMP_S": DUMP_S,
        "pool.QUIET_S": pool.QUIET_S,
        "pool.GONE_S": pool.GONE_S,
        "lease.FRESH_S": lease.FRESH_S,
        "pool.COMMON_S": pool.COMMON_S,
        "pool.LINGER_S": pool.LINGER_S,
        "lease.ORPHAN_S": lease.ORPHAN_S,
        "warm_hosts.WARM_S": WARM_S,
        "JobSpec.host_lease": JobSpec.host_lease,
        "hang.STILL_S": STILL_S,
        "candidates.LOOK_S": LOOK_S,
        "spares.TAKE_S": spares.TAKE_S,
        "exit_codes.USAGE_S": USAGE_S,
        "process_tree.KILL_S": process_tree.KILL_S,
        "pool.KILL_S": pool.KILL_S,
        "pool.AGENT_END_S": pool.AGENT_END_S,
        "pool.SILENT_S": pool.SILENT_S,
        "Backend.heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "heartbeat_timeout_s + agent.SLACK_S": HEARTBEAT_TIMEOUT_S + agent.SLACK_S,
        "pool.START_S": pool.START_S,
        "questions.ANSWER_S": ANSWER_S,
        "probe.LIFE_S": LIFE_S,
        'hang.LIMITS_S["join"]': LIMITS_S["join"],
        "distributed.INIT_TIMEOUT_S": INIT_TIMEOUT_S,
    }
    rows = re.findall(r"^\| ([\d.]+) \| (.*?) \|", README.read_text(), re.MULTILINE)
    table = {name: float(seconds) for seconds, names in rows for name in re.findall(r"`(.*?)`", names)}
    assert table == values
