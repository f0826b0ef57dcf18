"""Rules before a start: which hosts are asked, and which of them work. Pure functions."""

import math
from collections.abc import Collection

from roxxel_dist.launcher.fleet.looks import note_return, watch
from roxxel_dist.launcher.fleet.state import (
    AWAY,
    SEARCH,
    Answered,
    Begin,
    GiveUp,
    Look,
    Search,
    Start,
    State,
    Turn,
    Wait,
)
from roxxel_dist.launcher.job.placement import Assignment, working_hosts
from roxxel_dist.launcher.preflight.checks import named
from roxxel_dist.launcher.preflight.run import PreflightReport

RETRY_S = 2.0
TELL_S = 5.0
"""A longer wait is announced."""


def begin(turn: Turn, event: Begin) -> None:
    """Seek hosts for the next attempt.

    A spare host at once replaces a host that is unreachable or unfit. Before the first attempt the job goes on at once
    without such a host, if it may (`job.min_hosts`); later that host has `job.host_timeout` seconds. A host that the
    job goes on without is asked again when it can be used again, or when too few others are left. The first attempt
    waits as long for `job.min_hosts` hosts, or for all where those that are missing still start.
    """
    fleet = turn.fleet
    back = fleet.members_in(State.WARM)
    search = Search(
        asked=back,
        back=back,
        reserve=frozenset(fleet.members_in(*AWAY)),
        gone_by=event.gone_by,
        deadline=max(fleet.now + fleet.given.host_timeout, *event.gone_by.values(), 0.0),
    )
    present = [name for name in fleet.members if fleet.hosts[name].state not in (*AWAY, State.ASIDE)]
    turn.update(search=search)
    turn.unsay(SEARCH)
    turn.move(present, State.WANTED)
    ask(turn)


def ask(turn: Turn) -> None:
    """Ask the hosts that would start; the note of the assignment goes to people if it has changed."""
    assignment = turn.fleet.assignment_of(_present(turn))
    if assignment.note and assignment.note != turn.fleet.note:
        turn.unsay("assignment")
        turn.say(assignment.note, "assignment")
    fleet = turn.fleet
    look = Look(assignment=assignment, port=fleet.port, check=fleet.unchecked)
    turn.update(note=assignment.note, unchecked=frozenset[str](), look=look)
    turn.todo.append(look)


def answered(turn: Turn, search: Search, look: Look, event: Answered) -> None:
    """Start, go on with other hosts, wait a moment, or give up."""
    report = event.report
    turn.update(look=None)
    if _without_failed(turn, search, report):
        ask(turn)
        return
    for result in report.findings:
        if result.level == "warning":
            turn.say(f"warning: {result.text}")
    if report.passed:
        _start(turn, search, look.assignment, report)
    else:
        _change(turn, search, report, event.trusted)


def waited(turn: Turn, search: Search) -> None:
    """Ask again after a moment. While the job waits for hosts, one that is new will do."""
    fleet = turn.fleet
    turn.update(stays=fleet.stays.forgiven())
    if not fleet.is_fixed and (new := turn.fleet.change.newcomers):
        turn.move(new, State.WANTED)
        turn.change_members(joins=new)
    turn.move([name for name in search.replaced if name in turn.fleet.members], State.WANTED)
    turn.update(search=_with(search, replaced=frozenset[str]()))
    ask(turn)


def _with(search: Search, **values: object) -> Search:
    return Search(**{**vars(search), **values})


def _present(turn: Turn) -> tuple[str, ...]:
    """The hosts that may work."""
    return turn.fleet.members_in(State.WANTED)


def _without_failed(turn: Turn, search: Search, report: PreflightReport) -> bool:
    """Set hosts aside whose devices did not pass, where enough others are left; whether there were such hosts."""
    new = {name: why for name, why in report.suspects.items() if name not in search.failed}
    turn.update(search=_with(search, failed=search.failed | new.keys()))
    gone = False
    for name, why in new.items():
        if turn.fleet.can_do_without(name):
            turn.move([name], State.ASIDE, why=why)
            turn.say(f"host {name} is set aside: {why}", SEARCH)
            gone = True
    return gone


def _start(turn: Turn, search: Search, assignment: Assignment, report: PreflightReport) -> None:
    fleet = turn.fleet
    wait_s = max(search.gone_by.values(), default=0.0) - fleet.now
    if wait_s > TELL_S:
        names = ", ".join(search.gone_by)
        turn.unsay(SEARCH)
        turn.say(f"waiting {wait_s:.0f} s: by then the ranks on {names} have ended, cut off or not", SEARCH)
    cores = fleet.cores or report.cores
    present = _present(turn)
    away = [name for name in fleet.members if name not in present and fleet.hosts[name].state is not State.ASIDE]
    turn.move(away, State.LOST)
    turn.move(present, State.SPARE, failures=0, due=math.inf)
    turn.move(search.back, State.SPARE, has_returned=True)
    turn.move(assignment.hosts, State.WORKING)
    turn.update(search=None, started=assignment, machines=dict(report.machines), cores=cores, taken_in=search.back)
    if search.asked:
        note_return(turn, search.asked, failed={*search.back} != {*search.asked})
    watch(turn)
    address = f"[{report.address}]" if ":" in report.address else report.address
    start = Start(
        assignment=assignment,
        coordinator=f"{address}:{report.port}",
        visible=report.visible,
        cores=cores,
        wait_s=max(wait_s, 0.0),
    )
    turn.todo.append(start)


def _change(turn: Turn, search: Search, report: PreflightReport, trusted: Collection[str]) -> None:
    """Go on with other hosts, wait a moment, or give up."""
    fleet, present = turn.fleet, _present(turn)
    job, errors = fleet.job_of(fleet.members), report.problems
    wrong = report.blamed(trusted)
    if unfit := {*search.back} & (wrong or {*search.back}):  # the job ran without them
        names = ", ".join(fleet.in_order(unfit))
        for error in errors:
            turn.say(f"{names} cannot be used after all: {error}", SEARCH)
        turn.move(unfit, State.LOST)
        turn.update(search=_with(search, back=tuple(name for name in search.back if name not in unfit)))
        ask(turn)
        return
    rest = tuple(name for name in present if name not in wrong)
    is_replaced = rest != present and len(rest) >= len(working_hosts(job, fleet.members))
    if fleet.is_elastic and rest and rest != present:  # a spare may be one that the batch gives no work
        is_replaced = fleet.assignment_of(rest).devices >= fleet.assignment_of(present).devices
    may_shrink = rest != present and job.min_hosts is not None and len(rest) >= job.min_hosts
    if search.reserve and not (is_replaced or may_shrink):  # one of them may be there by now
        turn.move([name for name in search.reserve if name in fleet.members], State.WANTED)
        turn.update(search=_with(search, reserve=frozenset[str]()))
        ask(turn)
        return
    aside = fleet.members_in(State.ASIDE)
    comes_and_goes = may_shrink and all(name in fleet.hosts and fleet.hosts[name].has_returned for name in wrong)
    waits = not (is_replaced or aside or comes_and_goes or (may_shrink and not fleet.is_retry))
    may_come = report.only_starts if job.min_hosts is None else bool(report.unreachable)
    if waits and fleet.now < search.deadline and (fleet.is_retry or may_come):
        _wait(turn, search, report, len(rest))
        return
    if not (is_replaced or may_shrink or aside):
        turn.todo.append(GiveUp(text="\n".join(errors), unreachable=bool(report.unreachable)))
        return
    turn.move([name for name in present if name not in rest], State.LOST)
    if not is_replaced:
        turn.move(aside, State.WANTED)  # one that was lost, or failed, is better than none
    for error in errors:
        turn.say(error, SEARCH)
    turn.update(search=_with(search, replaced=search.replaced | {*report.starting}))
    ask(turn)


def _wait(turn: Turn, search: Search, report: PreflightReport, there: int) -> None:
    fleet = turn.fleet
    limit = f"waiting up to {fleet.given.host_timeout:g} s for"
    least = fleet.job_of(fleet.members).min_hosts
    if fleet.is_retry or least is not None:
        for error in report.problems:
            turn.say(error, SEARCH)
        if not fleet.is_retry:
            text = f"{there} of at least {least} hosts (--min-hosts) are there: {limit} others (--host-timeout)"
            turn.say(text, SEARCH)
    elif new := fleet.in_order({*report.starting} - search.starting):
        turn.update(search=_with(search, starting=search.starting | {*new}))
        names = f"host {new[0]}" if len(new) == 1 else f"hosts {named(new)}"
        turn.say(f"{limit} {names} to start (--host-timeout): {report.unreachable[new[0]]}", SEARCH)
    turn.todo.append(Wait(seconds=RETRY_S))
