"""Rules before a start: which hosts are asked, and which of them work. Pure functions."""

import math
from collections.abc import Collection

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.looks import forgive, note_return, watch
from roxxel_dist.launcher.fleet.state import AWAY, SEARCH, Fleet, Search, State
from roxxel_dist.launcher.job.placement import working_hosts
from roxxel_dist.launcher.preflight.checks import named, once
from roxxel_dist.launcher.preflight.run import PreflightReport

RETRY_S = 2.0
TELL_S = 5.0
"""A longer wait is announced."""


def begin(fleet: Fleet, event: events.Begin) -> None:
    """Seek hosts for the next attempt.

    A spare host at once replaces a host that is unreachable or unfit. Before the first attempt the job goes on at once
    without such a host, if it may (`job.min_hosts`); later that host has `job.host_timeout` seconds. A host that the
    job goes on without is asked again when it can be used again, or when too few others are left. The first attempt
    waits as long for `job.min_hosts` hosts, or for all where those that are missing still start.
    """
    forgive(fleet)
    back = fleet.members_in(State.WARM)
    fleet.search = Search(
        asked=back,
        back=back,
        reserve=frozenset(fleet.members_in(*AWAY)),
        gone_by=event.gone_by,
        deadline=max(fleet.now + fleet.given.host_timeout, *event.gone_by.values(), 0.0),
    )
    present = [name for name in fleet.members if fleet.hosts[name].state not in (*AWAY, State.ASIDE)]
    fleet.unsay(SEARCH)
    fleet.move(present, State.WANTED)
    ask(fleet)


def ask(fleet: Fleet) -> None:
    """Ask the hosts that would start; the note of the assignment goes to people if it has changed."""
    if not _present(fleet):  # then everybody may be there again
        fleet.move(fleet.members, State.WANTED)
    assignment = fleet.assignment_of(_present(fleet))
    if assignment.note and assignment.note != fleet.note:
        fleet.unsay("assignment")
        fleet.say(assignment.note, "assignment")
        fleet.note = assignment.note
    known = fleet.fit if fleet.fit is not None and fleet.fit.covers(assignment.hosts) else None
    fleet.look = events.Look(assignment=assignment, port=fleet.port, check=fleet.unchecked, known=known)
    fleet.unchecked = frozenset()
    fleet.todo.append(fleet.look)


def answered(fleet: Fleet, search: Search, look: events.Look, event: events.Answered) -> None:
    """Start, go on with other hosts, wait a moment, or give up."""
    report = event.report
    fleet.look = None
    if _without_failed(fleet, search, report):
        ask(fleet)
        return
    for _, _, text in once(result for result in report.findings if result.level == "warning"):
        fleet.say(f"warning: {text}")
    if report.passed:
        _start(fleet, search, look, report)
    else:
        if any(result.level == "error" for result in report.findings):
            fleet.fit = None
        _change(fleet, search, report, event.trusted)


def waited(fleet: Fleet, search: Search) -> None:
    """Ask again after a moment. While the job waits for hosts, one that is new will do."""
    fleet.stays = fleet.stays.forgiven()
    if not fleet.is_fixed and (new := fleet.change.newcomers):
        fleet.move(new, State.WANTED)
        fleet.change_members(joins=new)
    fleet.move([name for name in search.replaced if name in fleet.members], State.WANTED)
    search.replaced, search.reserve = frozenset(), frozenset(fleet.members_in(*AWAY))
    ask(fleet)


def _present(fleet: Fleet) -> tuple[str, ...]:
    """The hosts that may work."""
    return fleet.members_in(State.WANTED)


def _without_failed(fleet: Fleet, search: Search, report: PreflightReport) -> bool:
    """Set hosts aside whose devices did not pass, where enough others are left; whether there were such hosts."""
    new = {name: why for name, why in report.suspects.items() if name not in search.failed}
    search.failed = search.failed | new.keys()
    gone = False
    for name, why in new.items():
        if fleet.can_do_without(name):
            fleet.move([name], State.ASIDE, why=why)
            fleet.say(f"host {name} is set aside: {why}", SEARCH)
            gone = True
    return gone


def _start(fleet: Fleet, search: Search, look: events.Look, report: PreflightReport) -> None:
    assignment = look.assignment
    wait_s = max(search.gone_by.values(), default=0.0) - fleet.now
    if wait_s > TELL_S:
        names = ", ".join(search.gone_by)
        fleet.unsay(SEARCH)
        fleet.say(f"waiting {wait_s:.0f} s: by then the ranks on {names} have ended, cut off or not", SEARCH)
    present = dict.fromkeys(_present(fleet))
    away = [name for name in fleet.members if name not in present and fleet.hosts[name].state is not State.ASIDE]
    fleet.move(away, State.LOST)
    fleet.move(present, State.SPARE, failures=0, due=math.inf)
    fleet.move(search.back, State.SPARE, has_returned=True)
    fleet.move(assignment.hosts, State.WORKING)
    if fleet.note and not assignment.note:
        fleet.say("all hosts work again", SEARCH)
        fleet.note = ""
    fleet.search, fleet.started, fleet.taken_in = None, assignment, search.back
    fleet.report, fleet.cores, fleet.fit = report, fleet.cores or report.cores, look.known or report
    if search.asked:
        note_return(fleet, search.asked, failed={*search.back} != {*search.asked})
    watch(fleet)
    address = f"[{report.address}]" if ":" in report.address else report.address
    start = events.Start(
        assignment=assignment,
        coordinator=f"{address}:{report.port}",
        visible=report.visible,
        cores=fleet.cores,
        wait_s=max(wait_s, 0.0),
    )
    fleet.todo.append(start)


def _change(fleet: Fleet, search: Search, report: PreflightReport, trusted: Collection[str]) -> None:
    """Go on with other hosts, wait a moment, or give up."""
    present = _present(fleet)
    job, errors = fleet.job_of(fleet.members), report.problems
    wrong = report.blamed(trusted)
    if unfit := {*search.back} & (wrong or {*search.back}):  # the job ran without them
        names = ", ".join(fleet.in_order(unfit))
        for error in errors:
            fleet.say(f"{names} cannot be used after all: {error}", SEARCH)
        fleet.move(unfit, State.LOST)
        search.back = tuple(name for name in search.back if name not in unfit)
        ask(fleet)
        return
    rest = tuple(name for name in present if name not in wrong)
    is_replaced = rest != present and len(rest) >= len(working_hosts(job, fleet.members))
    if fleet.is_elastic and rest and rest != present:  # a spare may be one that the batch gives no work
        is_replaced = fleet.assignment_of(rest).devices >= fleet.assignment_of(present).devices
    may_shrink = rest != present and job.min_hosts is not None and len(rest) >= job.min_hosts
    if search.reserve and not (is_replaced or may_shrink):  # one of them may be there by now
        fleet.move([name for name in search.reserve if name in fleet.members], State.WANTED)
        search.reserve = frozenset()
        ask(fleet)
        return
    aside = fleet.members_in(State.ASIDE)
    comes_and_goes = may_shrink and all(name in fleet.hosts and fleet.hosts[name].has_returned for name in wrong)
    waits = not (is_replaced or aside or comes_and_goes or (may_shrink and not fleet.is_retry))
    may_come = report.only_starts if job.min_hosts is None else bool(report.unreachable)
    if waits and fleet.now < search.deadline and (fleet.is_retry or may_come):
        _wait(fleet, search, report, len(rest))
        return
    if not (is_replaced or may_shrink or aside):
        fleet.todo.append(events.GiveUp(text="\n".join(errors), unreachable=bool(report.unreachable)))
        return
    fleet.move([name for name in present if name in wrong], State.LOST)
    if not is_replaced:
        fleet.move(aside, State.WANTED)  # one that was lost, or failed, is better than none
    for error in errors:
        fleet.say(error, SEARCH)
    search.replaced = search.replaced | {*report.starting}
    ask(fleet)


def _wait(fleet: Fleet, search: Search, report: PreflightReport, there: int) -> None:
    limit = f"waiting up to {fleet.given.host_timeout:g} s for"
    least = fleet.job_of(fleet.members).min_hosts
    if fleet.is_retry or least is not None:
        for error in report.problems:
            fleet.say(error, SEARCH)
        if not fleet.is_retry:
            text = f"{there} of at least {least} hosts (--min-hosts) are there: {limit} others (--host-timeout)"
            fleet.say(text, SEARCH)
    elif new := fleet.in_order({*report.starting} - search.starting):
        search.starting = search.starting | {*new}
        names = f"host {new[0]}" if len(new) == 1 else f"hosts {named(new)}"
        fleet.say(f"{limit} {names} to start (--host-timeout): {report.unreachable[new[0]]}", SEARCH)
    fleet.todo.append(events.Wait(seconds=RETRY_S))
