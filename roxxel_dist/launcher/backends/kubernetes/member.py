"""A JobSet whose pods have a launcher each: `launch member`. The cluster starts all of them again after a failure.

Each host is a pod of one Indexed Job. Both objects state the meaning of the exit codes: the Job's podFailurePolicy
classifies why a pod ended, the JobSet's failurePolicy chooses the reaction.
"""

from collections.abc import Sequence
from typing import Any

from roxxel_dist.launcher.policy.restart import EXIT_GIVEN_UP, INFRASTRUCTURE, OF_THE_COMMAND, PREEMPTED
from roxxel_dist.process.exit_codes import EXIT_HANG, EXIT_PREFLIGHT

Plain = dict[str, Any]

JOB = "hosts"
RETRY_CODES = sorted({*INFRASTRUCTURE, EXIT_HANG, EXIT_PREFLIGHT, EXIT_GIVEN_UP})
"""Exit codes after which the job is started again, and that is counted."""
PREEMPTION_CODES = sorted(PREEMPTED)


def command(name: str, hosts: int, options: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command of a pod."""
    first = f"{name}-{JOB}-0-0.{name}"  # by this name the pods find host 0
    start = ["roxxel-dist", "launch", "member", "--hosts", str(hosts), "--first", first, "--run-id", name]
    return [*start, *options, "--", *words]


def jobs(hosts: int, pod: Plain, restart_on: str) -> list[Plain]:
    """The one job of the JobSet."""
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    preempted = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": list(PREEMPTION_CODES)}}
    program_error = {"action": "FailJob", "onExitCodes": _program_error(restart_on)}
    job = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [disrupted, preempted, program_error]},
        "template": {"spec": pod},
    }
    return [{"name": JOB, "replicas": 1, "template": {"spec": job}}]


def _program_error(restart_on: str) -> Plain:
    """The exit codes that end the JobSet for good."""
    if restart_on == "any":
        return {"operator": "In", "values": sorted(OF_THE_COMMAND)}
    return {"operator": "NotIn", "values": list(RETRY_CODES)}


def policies(max_restarts: int) -> Plain:
    """The reactions to a failed Job; the rules are tried in order, and if none matches, the JobSet restarts."""
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        # Which of its rules it was is in the message of the Job alone.
        "onJobFailureMessagePatterns": ["matching FailJob rule at index [01]$"],
    }
    error = {"name": "program_error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    rules = [preempted, error] if max_restarts else [error]
    return {
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": max_restarts, "rules": rules},
    }
