"""Rules while ranks run: which hosts are asked, and which of them can join or be used again. Pure functions.

Each host is asked alone first, and then together with the hosts that work, as before a start, by programs of its own:
the job does not notice it. The first look at a newcomer that would help is the second one. Those that can be used and
help are warm at last.
"""

import math
import re
from collections.abc import Collection, Mapping

from roxxel_dist.launcher.fleet.state import (
    AWAY,
    Answered,
    Host,
    Keep,
    Look,
    Lost,
    Mistake,
    State,
    Turn,
    Warm,
    Warmed,
)
from roxxel_dist.launcher.job.placement import Assignment
from roxxel_dist.launcher.preflight.checks import HERE, CheckResult
from roxxel_dist.launcher.preflight.run import PreflightReport

LOOK_MOST_S = 300.0
"""The longest pause after looks at a host that answers and is not fit: each doubles it."""
GROW_MOST_S = 3600.0
"""The longest pause after growths: each doubles it, so that a host that comes and goes costs little; one that has cost
a start makes it eight times as long."""
NO_WAY = re.compile(
    r"No route to host|Connection (?:refused|timed out|closed|reset)|Network is (?:unreachable|down)"
    r"|Operation timed out|Could not resolve|Host is down|i/o timeout|was refused|Unable to connect to the server"
    r"|\(NotFound\)|container not found|does not have a host assigned|completed pod|waiting for the condition"
    r"|No such container|no container with name or ID|is not running|container state improper",
    re.IGNORECASE,
)
"""How ssh, kubectl, docker and podman say that a host is away."""


def watch(turn: Turn) -> None:
    """Ranks have started: hosts that are lost are asked after a pause, where they would help, and newcomers at once."""
    fleet = turn.fleet
    lost = fleet.members_in(*AWAY)
    helps = fleet.grows_with(lost)
    turn.update(look=None, with_warm=(), kept=())
    for name in lost:
        due = max(fleet.now, fleet.hosts[name].departs_by) + fleet.pause_s
        turn.move([name], State.LOST, due=due if helps else math.inf)
    new = [name for name in turn.fleet.hosts if name not in fleet.members]
    turn.move(new, State.WANTED, due=fleet.now)


def note_return(turn: Turn, names: Collection[str], *, failed: bool) -> None:
    """These hosts were taken in; `failed`: the attempt with them came to nothing."""
    hosts = turn.fleet.hosts
    names = [name for name in names if name in hosts]
    if failed or not all(
        hosts[name].is_known for name in names
    ):  # a newcomer that came once is none that comes and goes
        turn.update(pause_s=min(turn.fleet.pause_s * (8 if failed else 2), GROW_MOST_S))
    for name in names:
        known = hosts[name].is_known and failed
        turn.move([name], hosts[name].state, failures=0, is_known=known)
    if not failed:
        turn.unsay(*names)


def next_look(turn: Turn) -> None:
    """Ask for the next look, where none goes on."""
    while (fleet := turn.fleet).look is None:
        due = [host for host in fleet.candidates if host.due <= fleet.now]
        warm, fit = fleet.are(State.WARM), fleet.are(State.FIT)
        if due:
            first = due[0]
            is_new = first.name not in fleet.members and not first.is_known and not first.no_help
            if is_new and fleet.grows_with([*warm, *fit, first.name]):
                turn.move([first.name], State.FIT, due=math.inf, passed_alone=False)
            else:
                _look(turn, (first.name,))
        elif fit:
            together = tuple(host.name for host in fleet.candidates if host.name in (*warm, *fit))
            if fleet.grows_with(together):
                _look(turn, together)
            else:
                _settle(turn, fit, len(fleet.working) + len(warm))
        else:
            break
    keep_warm(turn)


def answered(turn: Turn, look: Look, event: Answered) -> None:
    """Judge what a look has found."""
    turn.update(look=None)
    names = _still_asked(turn, look)
    if look.keep and names == look.candidates:
        _judge_together(turn, look, event.report)
    elif look.keep:
        _ask_others_again(turn, names)
    elif names:
        _judge_alone(turn, names[0], event.report)
    next_look(turn)


def warmed(turn: Turn, warm: Warm, event: Warmed) -> None:
    """Hosts are ready to join, but those that cannot have ranks."""
    turn.update(look=None)
    names = _still_asked(turn, warm)
    failed = {name: why for name, why in event.failed.items() if name in names}
    for name, why in failed.items():
        _refuse(turn, name, {"warm": why})
    if failed or names != warm.candidates:
        _ask_others_again(turn, names)
    else:
        hosts, working = warm.plan.hosts, turn.fleet.working
        used = [name for name in names if name in hosts]
        turn.move(used, State.WARM, due=math.inf)
        turn.move([name for name in used if name not in turn.fleet.members], State.WARM, is_known=True)
        turn.update(with_warm=tuple(name for name in hosts if name not in (*working, *names)))
        _settle(turn, [name for name in names if name not in used], len(working) + len(used))
    next_look(turn)


def lost(turn: Turn, event: Lost) -> None:
    """A host that was warm is not any more."""
    if _is(turn, event.host, State.WARM):
        _refuse(turn, event.host, {"agent": event.why})
    next_look(turn)


def mistaken(turn: Turn, event: Mistake) -> None:
    """Say that a look has failed by a mistake of this program, and look again later."""
    fleet, names = turn.fleet, ", ".join(event.hosts)
    if fleet.look is not None and fleet.look.candidates == event.hosts:
        turn.update(look=None)
        for name in _still_asked(turn, fleet.look):
            turn.move([name], State.LOST if name in fleet.members else State.WANTED, due=fleet.now + LOOK_MOST_S)
    turn.say(f"a look at {names} failed, and is repeated later: {event.error}", names)
    next_look(turn)


def keep_warm(turn: Turn) -> None:
    """Agents stay on hosts that are warm, and on spare ones that will work with them."""
    fleet = turn.fleet
    warm = fleet.are(State.WARM)
    kept = (*warm, *fleet.with_warm) if warm else ()
    if kept != fleet.kept:
        turn.update(kept=kept)
        turn.todo.append(Keep(hosts=kept))


def _is(turn: Turn, name: str, *states: State) -> bool:
    return any(host.name == name and host.state in states for host in turn.fleet.candidates)


def _still_asked(turn: Turn, do: Look | Warm) -> tuple[str, ...]:
    """The hosts of a look that may still join."""
    return tuple(name for name in do.candidates if _is(turn, name, State.LOOKING, State.WARM))


def _ask_others_again(turn: Turn, names: Collection[str]) -> None:
    """Of hosts that were asked together, one is out: the others are asked without it."""
    turn.move([name for name in names if _is(turn, name, State.LOOKING)], State.FIT)


def _look(turn: Turn, names: tuple[str, ...]) -> None:
    """Ask one host alone, or some together with those that work."""
    fleet = turn.fleet
    is_alone = len(names) == 1 and fleet.hosts[names[0]].state is not State.FIT
    plan = Assignment(hosts=names, job=fleet.job_of(fleet.members)) if is_alone else fleet.plan(names)
    if is_alone:
        turn.move(names, State.LOOKING, passed_alone=False)
    look = Look(
        assignment=plan,
        port=fleet.port,
        busy=fleet.working,
        check=frozenset(name for name in names if not turn.fleet.hosts[name].passed_alone),
        candidates=names,
        keep=() if is_alone else tuple(name for name in plan.hosts if name not in fleet.working),
    )
    turn.move([name for name in names if not _is(turn, name, State.WARM)], State.LOOKING, due=math.inf)
    turn.update(look=look)
    turn.todo.append(look)


def _judge_alone(turn: Turn, name: str, report: PreflightReport) -> None:
    reasons = _reasons(turn, report, name) | _is_same_machine(turn, name, report)
    if not report.passed or report.suspects or reasons:
        _refuse(turn, name, reasons)
        return
    turn.move([name], State.FIT, passed_alone=True)
    if turn.fleet.hosts[name].no_help:
        fleet = turn.fleet
        _settle(turn, [name], len(fleet.working) + len(fleet.are(State.WARM)))


def _judge_together(turn: Turn, look: Look, report: PreflightReport) -> None:
    names, working = look.candidates, turn.fleet.working
    same = {name: _is_same_machine(turn, name, report, names[:place]) for place, name in enumerate(names)}
    strange = [
        result
        for result in report.findings
        if result.level == "warning"
        and ("", f"warning: {result.text}") not in turn.fleet.said
        and _strangers(result, working)
    ]
    wrong = report.blamed(working).union(
        *(_strangers(result, working) for result in strange),
        report.suspects.keys() - {*working},
        (name for name in names if same[name]),
    )
    if report.passed and not wrong:
        warm = Warm(plan=look.assignment, visible=report.visible, candidates=names)
        turn.update(look=warm)
        turn.todo.append(warm)
        return
    for name in names:
        if name in wrong:
            reasons = _reasons(turn, report, name) | {result.check: result.text for result in strange} | same[name]
            _refuse(turn, name, reasons)
        elif not wrong & {*names}:  # a start would end the job, whatever it is
            text = "the hosts that work could not start again now: " + "; ".join(report.problems)
            _refuse(turn, name, {"those that work": text})
        else:
            _ask_others_again(turn, [name])


def _is_same_machine(turn: Turn, name: str, report: PreflightReport, others: Collection[str] = ()) -> dict[str, str]:
    """Why a newcomer does not join that is a machine of the job, or one of `others`, by another name."""
    fleet, machine = turn.fleet, report.machines.get(name)
    same = [other for other in fleet.working if fleet.machines.get(other) == machine]
    if machine is None or name in fleet.members or len(same) > 1:  # hosts may be few machines from the start
        return {}
    same = same or [other for other in others if report.machines.get(other) == machine]
    return {"machine": f"it is the machine of {same[0]}, by another name"} if same else {}


def _strangers(result: CheckResult, working: Collection[str]) -> frozenset[str]:
    """The hosts that agree with none of those that work."""
    known = {HERE, *working}
    return frozenset(name for group in result.groups if not known & {*group} for name in group)


def _reasons(turn: Turn, report: PreflightReport, name: str) -> dict[str, str]:
    """Why a host does not pass, by check."""
    errors = [result for result in report.findings if result.level == "error"]
    blamed = {result.check: result.blamed(turn.fleet.working) or {name} for result in errors}
    reasons = {result.check: result.text for result in errors if name in blamed[result.check]}
    reasons |= {"devices": report.suspects[name]} if name in report.suspects else {}
    return reasons | ({"host": report.unreachable[name]} if name in report.unreachable else {})


def _refuse(turn: Turn, name: str, reasons: Mapping[str, str]) -> None:
    """A host did not pass: it is asked again, later each time if it answers."""
    fleet = turn.fleet
    is_new, pause_s = name not in fleet.members, fleet.pause_s
    is_away = NO_WAY.search(reasons.get("host", "")) is not None
    failures = 0 if is_away else fleet.hosts[name].failures + 1
    if failures:
        pause_s = min(pause_s * 2**failures, max(pause_s, LOOK_MOST_S))
    why = "; ".join(reasons.values())
    known = {"is_known": True} if is_new else {}
    turn.move([name], State.UNFIT, why=why, failures=failures, due=fleet.now + pause_s, no_help=False, **known)
    what = "does not join yet" if is_new else "is not used again yet"
    if is_new or not is_away:
        turn.say(f"host {name} {what}, and is asked from time to time: {why}", name)


def _settle(turn: Turn, names: Collection[str], working: int) -> None:
    """These can be used, and do not help beside so many that work: newcomers are spares then, if they pass alone."""
    for name in names:
        host = turn.fleet.hosts[name]
        if not host.passed_alone:
            turn.move([name], State.WANTED, due=turn.fleet.now, no_help=True)
        elif name in turn.fleet.members:
            turn.move([name], State.LOST, due=turn.fleet.now + turn.fleet.pause_s, no_help=False)
            turn.say(f"host {name} can be used again; the program cannot use its devices yet", name)
        else:
            turn.move([name], State.SPARE, due=math.inf, no_help=False, is_known=True)
            turn.say(f"host {name} is a spare: it passed the checks, and {_why_idle(turn, host, working)}", name)


def _why_idle(turn: Turn, host: Host, working: int) -> str:
    most = turn.fleet.given.max_hosts
    if most is not None and working >= most:
        return f"--max-hosts is {most}"
    return "n_devices, fsdp_devices, tensor_devices or virtual_shards leave its devices no work"
