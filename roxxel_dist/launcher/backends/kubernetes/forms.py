"""The two forms of a JobSet: its pods wait, and the first one has the launcher; or each has a launcher of its own.

In the first (`launch exec` over `kubectl exec`) each host is a Job of one pod, so that it has a name that stays
(`kubectl exec job/NAME`), and a pod that ends is made anew, on another node where its node is lost. The launcher
restarts the ranks; the JobSet restarts a lost launcher.

In the second (`launch member`) each host is a pod of one Indexed Job, and the cluster starts all of them again after a
failure. Both objects state the meaning of the exit codes: the Job's podFailurePolicy classifies why a pod ended, the
JobSet's failurePolicy chooses the reaction.
"""

import signal
from collections.abc import Sequence
from typing import Any

from roxxel_dist.launcher.policy.outcome import INFRASTRUCTURE, OF_THE_COMMAND, PREEMPTED
from roxxel_dist.process.exit_codes import EXIT_GIVEN_UP, EXIT_HANG, EXIT_PREFLIGHT

Plain = dict[str, Any]

CONTROLLER, HOSTS = "controller", "hosts"
"""The replicated jobs: that of the first host, which has the launcher, and those of the others."""
CONTAINER = "host"
VIA = f"kubectl exec -i job/{{host}} -c {CONTAINER} --"
AGENTS = 'grep -ls "launcher.agent.[a]gent" /proc/[0-9]*/cmdline'
# What grep prints decides, not its code: that of a process which ends meanwhile is 2, with and without agents.
ASK_AGENTS = (
    f"for p in $({AGENTS}); do p=${{p#/proc/}}; kill -TERM ${{p%/*}}; done; "
    f'while [ -n "$({AGENTS})" ]; do sleep 1; done'
)
WAIT = [
    "sh",
    "-c",
    f"trap '[ $$ = 1 ] && {{ {ASK_AGENTS}; }} >/dev/null 2>&1; exit {128 + signal.SIGTERM}' TERM; "
    "sleep infinity & wait",
]
"""What a pod does that waits. Kubernetes signals it alone: it tells the agents of its pod, whose ranks save, and ends
with them, or by a SIGKILL. An exit code of 0 would be the end of its Job."""
FOR_EVER = 2**31 - 1
"""Pods of a host that may fail, one after the other: the launcher says when it has been enough."""
KILLED = sorted(128 + number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV))
"""Exit codes of a launcher that has not ended by itself."""
RBAC = "rbac.authorization.k8s.io"
MEMBERS = "hosts"
RETRY_CODES = sorted({*INFRASTRUCTURE, EXIT_HANG, EXIT_PREFLIGHT, EXIT_GIVEN_UP})
"""Exit codes after which the job is started again, and that is counted."""
PREEMPTION_CODES = sorted(PREEMPTED)
NO_FAULT: list[Plain] = [
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": PREEMPTION_CODES}},
]
"""The first rules of a Job: ends after which the JobSet starts it again, and does not count that."""


def names_of(name: str, hosts: int) -> list[str]:
    """The hosts of a JobSet, which are its Jobs, in the order of the ranks."""
    return [f"{name}-{CONTROLLER}-0", *(f"{name}-{HOSTS}-{number}" for number in range(hosts - 1))]


def rights(name: str, namespace: str | None, hosts: int) -> list[Plain]:
    """The account of the launcher, with the right to run programs in pods of its namespace.

    Names of pods end in random letters, and rules of RBAC know no labels: these hold for each pod of the namespace.
    Jobs have names that are known, and are restricted to them. kubectl looks for the pod of a Job in a list, and opens
    a program by POST (create) or, from 1.30 on, by a web socket (get).
    """
    account = f"{name}-{CONTROLLER}"
    metadata: Plain = {"name": account, **({} if namespace is None else {"namespace": namespace})}
    rules = [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"], "resourceNames": names_of(name, hosts)},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
    ]
    subject: Plain = {"kind": "ServiceAccount", **metadata}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(metadata)},
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": dict(metadata), "rules": rules},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": dict(metadata),
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": account},
            "subjects": [subject],
        },
    ]


def jobs(name: str, hosts: int, first: Plain, other: Plain, *, all_first: bool) -> list[Plain]:
    """The jobs of a JobSet: of `first`, the pod with the launcher, and of `other`, a pod that waits.

    `all_first`: the launcher's pod is made when the others are there.
    """
    ended = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": list(KILLED)}}
    launcher = _job({**first, "serviceAccountName": f"{name}-{CONTROLLER}"}, limit=0)
    launcher["spec"]["podFailurePolicy"] = {"rules": [*NO_FAULT, ended]}
    made: list[Plain] = [{"name": CONTROLLER, "replicas": 1, "template": launcher}]
    if hosts > 1:
        waits = _job({**other, "automountServiceAccountToken": False}, limit=FOR_EVER)
        made.insert(0, {"name": HOSTS, "replicas": hosts - 1, "template": waits})
        if all_first:
            made[1]["dependsOn"] = [{"name": HOSTS, "status": "Ready"}]
    return made


def _job(pod: Plain, limit: int) -> Plain:
    spec = {"completionMode": "Indexed", "completions": 1, "parallelism": 1, "backoffLimit": limit}
    return {"spec": {**spec, "template": {"spec": pod}}}


def policies(max_restarts: int) -> Plain:
    """The ends of the JobSet: that of its launcher, which is started again where it was lost."""
    success: Plain = {"operator": "All", "targetReplicatedJobs": [CONTROLLER]}
    return {"successPolicy": success, **_failure_policy(max_restarts, "launcher_ended", CONTROLLER)}


def _failure_policy(max_restarts: int, error: str, *targets: str) -> Plain:
    """The reactions to a failed Job; the rules are tried in order, and if none matches, the JobSet restarts."""

    def rule(name: str, action: str) -> Plain:
        of = {"targetReplicatedJobs": [*targets]} if targets else {}
        return {"name": name, "action": action, **of, "onJobFailureReasons": ["PodFailurePolicy"]}

    # Which of the Job's rules it was is in the message of the Job alone: by the first two it counts for nothing.
    uncounted = {"onJobFailureMessagePatterns": ["matching FailJob rule at index [01]$"]}
    preempted = {**rule("preempted", "RestartJobSetAndIgnoreMaxRestarts"), **uncounted}
    rules = [preempted, rule(error, "FailJobSet")] if max_restarts else [rule(error, "FailJobSet")]
    return {"failurePolicy": {"maxRestarts": max_restarts, "rules": rules}}


def command(name: str, hosts: int, options: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command of the launcher's pod."""
    start = ["roxxel-dist", "launch", "exec", "--hosts", ",".join(names_of(name, hosts)), "--via", VIA]
    return [*start, "--run-id", name, *options, "--", *words]


def member_command(name: str, hosts: int, options: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command of a pod."""
    first = f"{name}-{MEMBERS}-0-0.{name}"  # by this name the pods find host 0
    start = ["roxxel-dist", "launch", "member", "--hosts", str(hosts), "--first", first, "--run-id", name]
    return [*start, *options, "--", *words]


def member_jobs(hosts: int, pod: Plain, restart_on: str) -> list[Plain]:
    """The one job of the JobSet."""
    program_error = {"action": "FailJob", "onExitCodes": _program_error(restart_on)}
    job = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [*NO_FAULT, program_error]},
        "template": {"spec": pod},
    }
    return [{"name": MEMBERS, "replicas": 1, "template": {"spec": job}}]


def _program_error(restart_on: str) -> Plain:
    """The exit codes that end the JobSet for good."""
    if restart_on == "any":
        return {"operator": "In", "values": sorted(OF_THE_COMMAND)}
    return {"operator": "NotIn", "values": list(RETRY_CODES)}


def member_policies(max_restarts: int) -> Plain:
    """The ends of such a JobSet: all of its pods."""
    return {"successPolicy": {"operator": "All"}, **_failure_policy(max_restarts, "program_error")}
