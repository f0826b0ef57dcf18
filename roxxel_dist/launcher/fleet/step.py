"""What follows from an event: the fleet after it, and what is to be done. Pure functions.

The rules while ranks run are in `looks.py`; those of the search for hosts before a start are here.
"""

import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from roxxel_dist.launcher.fleet import events, looks
from roxxel_dist.launcher.fleet.state import AWAY, SEARCH, Fleet, Host, Search, State, Stays, Wanted, change_to
from roxxel_dist.launcher.job.placement import working_hosts
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.outcome import REPEAT_S, Cause, has_come_to_nothing, next_action
from roxxel_dist.launcher.preflight.checks import fold, merge_alike
from roxxel_dist.launcher.preflight.run import PreflightReport

SWAP_S = 10.0
"""A host that is to leave stays so long for the first look at those that are to join: one restart does for both."""
DEPART_S = 120.0
"""A host that a system has asked to end is not used again sooner: clouds and schedulers end it within two minutes."""
OF_ONE_HOST = {128 + number for number in (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV)}
"""Codes of failures that say nothing of the network between the others, which worked together until then."""
RETRY_S = 2.0
TELL_S = 5.0
"""A longer wait is announced."""


def fleet_of(
    job: JobSpec,
    hosts: Sequence[str],
    *,
    now: float,
    given: Sequence[str] | None = None,
    listed: Sequence[str] = (),
    is_fixed: bool = False,
    failed: Mapping[str, str] | None = None,
) -> tuple[Fleet, list[events.Do]]:
    """The fleet of a job on these hosts before its first attempt, and what people are to know of it.

    Args:
        job: as it was asked for.
        hosts: in the order of the ranks, the spare ones last.
        now: by the launcher's clock.
        given: those of them that no list takes away; None: all.
        listed: those of --hosts-from.
        is_fixed: the hosts never change.
        failed: hosts whose devices failed in the last day, and why: they work only where too few others are left.
    """
    fleet = Fleet(
        given=job,
        first=tuple(hosts),
        is_fixed=is_fixed,
        wanted=Wanted(given=tuple(hosts if given is None else given), listed=tuple(listed)),
        stays=Stays(since=dict.fromkeys(listed, now)),
        members=tuple(hosts),
        hosts={name: Host(name=name, since=now) for name in hosts},
        now=now,
        unchecked=frozenset(hosts),
        pause_s=job.limits.look_s,
    )
    if failed:
        for name, why in failed.items():
            if fleet.can_do_without(name):
                fleet.move([name], State.ASIDE, why=why)
        used = [name for name in failed if fleet.hosts[name].state is not State.ASIDE]
        names = "; ".join(f"{name} ({why.removeprefix(f'{name}: ')})" for name, why in failed.items())
        end = f"; used in any case, for too few others are left: {', '.join(used)}" if used else ""
        fleet.say(f"failed in the last day, see `doctor --forget`: {names}{end}")
    return fleet, fleet.todo


def step(fleet: Fleet, event: events.Event, now: float) -> tuple[Fleet, list[events.Do]]:
    """The fleet after an event, and what is to be done, in order; `now`: when it happens, by the launcher's clock.

    Of looks and warm-ups one goes on at a time: its end is an event (`Answered`, `Warmed`, or `Mistake`), which is to
    come before the next attempt ends, or not at all.
    """
    fleet = copy(fleet)
    fleet.now, fleet.hosts, fleet.search, fleet.todo = now, dict(fleet.hosts), copy(fleet.search), []
    RULES[type(event)](fleet, event)
    return fleet, fleet.todo


def _on_tick(fleet: Fleet, event: events.Tick) -> None:
    if fleet.search is not None:
        _search_again(fleet, fleet.search)
    elif not fleet.is_fixed:
        looks.follow(fleet)


def _on_answer(fleet: Fleet, event: events.Answered) -> None:
    if not isinstance(fleet.look, events.Look):
        return
    if fleet.search is not None:
        _on_search_answer(fleet, fleet.search, fleet.look, event)
    else:
        looks.on_answer(fleet, fleet.look, event)


def _on_warm(fleet: Fleet, event: events.Warmed) -> None:
    if isinstance(fleet.look, events.Warm):
        looks.on_warm(fleet, fleet.look, event)


def _on_request(fleet: Fleet, event: events.Asked) -> None:
    if event.by == "list":
        looks.follow_list(fleet, event.hosts)
    else:
        fleet.todo.append((looks.join if event.by == "join" else looks.leave)(fleet, event.hosts))


def _due(fleet: Fleet, lost: str = "") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hosts to take in, and working ones that shall leave, without one that is lost."""
    joins = fleet.are(State.WARM)
    present = {*fleet.present_members, *joins} - {lost}
    change = change_to(fleet.wanted_now, fleet.with_members(joins), present, fleet.least)
    working = {*fleet.working}
    return joins, tuple(name for name in change.leaves if name in working)


def _drain(fleet: Fleet, event: events.CanDrain) -> None:
    """Have the ranks save and leave, where hosts are to join or leave."""
    joins, leaves = _due(fleet)
    joins = joins if event.joins_too or leaves else ()
    if not joins and not leaves:
        fleet.leaves_since = None
        return
    since = fleet.leaves_since = fleet.leaves_since or fleet.now
    members = {*fleet.members}
    is_first_look = any(not host.is_known for host in fleet.candidates if host.name not in members)
    if not joins and is_first_look and fleet.now < since + SWAP_S:
        return
    back = [name for name in joins if name in fleet.members]
    new = [name for name in joins if name not in back]
    groups = ((back, "can be used again"), (new, "can join the job"), (leaves, "shall leave the job"))
    with_them = [f"with {', '.join(joins)}"] * bool(joins) + [f"without {', '.join(leaves)}"] * bool(leaves)
    why = "; ".join(f"{', '.join(names)} {what}" for names, what in groups if names)
    fleet.todo.append(events.Drain(why=why, then=f"the job continues {' and '.join(with_them)}"))


def _on_end(fleet: Fleet, event: events.AttemptEnded) -> None:
    """After an attempt: change the hosts of the job, and decide whether there is another attempt."""
    joins, members = (), fleet.members
    taken_in, before = fleet.taken_in, max((one.reached for one in fleet.attempts), default=0)
    if not fleet.is_fixed:
        joins, leaves = _due(fleet, event.lost)
        fleet.change_members(dict.fromkeys((*joins, *fleet.are(State.SPARE))), leaves)
    fleet.look, fleet.leaves_since = None, None
    fleet.with_warm, fleet.taken_in = (), ()
    away = fleet.members_in(*AWAY, State.WARM)
    fleet.move([name for name in away if name not in joins], State.LOST)
    attempt = event.attempt
    others = event.lost and event.lost not in taken_in  # its end is no fault of those that were taken in
    if taken_in and has_come_to_nothing(attempt, before) and not others:
        attempt = replace(attempt, failed_growth=", ".join(taken_in))
        looks.note_return(fleet, taken_in, failed=True)
        back = [name for name in joins if name in members]
        fleet.move([name for name in joins if name not in back], State.SPARE)
        fleet.move((*back, *(name for name in taken_in if name in fleet.members)), State.LOST)
    if attempt.reached <= before or (attempt.cause is not Cause.PREEMPTED and attempt.code not in OF_ONE_HOST):
        fleet.fit = None
    fleet.attempts = (*fleet.attempts, attempt)
    if event.lost in fleet.members and (joins or fleet.has_spare):  # a spare takes its place; it may come back
        fleet.move([event.lost], State.LOST)
    job = fleet.given
    decision = next_action(fleet.attempts, job.max_restarts, job.restart_on, fleet.can_do_without)
    fleet.todo.append(decision)
    if not decision.again:
        return
    if attempt.cause is Cause.INFRASTRUCTURE and attempt.host:
        fleet.unchecked |= {attempt.host}
    if decision.set_aside in fleet.members:
        fleet.move([decision.set_aside], State.ASIDE)
    _let_go(fleet, event.departing)


def _let_go(fleet: Fleet, departing: Sequence[str]) -> None:
    """Go on without hosts that a system has asked to end; wait for the end of those that the job needs."""
    needed: list[str] = []
    for name in departing:
        if name not in fleet.members:
            continue
        if fleet.can_do_without(name):
            fleet.move([name], State.LOST)
        else:
            needed.append(name)
        fleet.move([name], fleet.hosts[name].state, departs_by=fleet.now + DEPART_S)
    if needed:
        fleet.say(
            f"the job needs {', '.join(needed)}: it starts again there when the host has ended and is back, or is "
            f"still there in {DEPART_S:g} s",
            SEARCH,
        )
        fleet.todo.append(events.AwaitEnd(hosts=tuple(needed)))


def _begin(fleet: Fleet, event: events.Begin) -> None:
    """Seek hosts for the next attempt.

    A spare host at once replaces a host that is unreachable or unfit. Before the first attempt the job goes on at once
    without such a host, if it may (`job.min_hosts`); later that host has `job.host_timeout` seconds. A host that the
    job goes on without is asked again when it can be used again, or when too few others are left. The first attempt
    waits as long for `job.min_hosts` hosts, or for all where those that are missing still start.
    """
    if fleet.members_in(State.ASIDE):
        looks.forgive(fleet)
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
    _ask(fleet)


def _ask(fleet: Fleet) -> None:
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


def _on_search_answer(fleet: Fleet, search: Search, look: events.Look, event: events.Answered) -> None:
    """Start, go on with other hosts, wait a moment, or give up."""
    report = event.report
    fleet.look = None
    if _without_failed(fleet, search, report):
        _ask(fleet)
        return
    for _, _, text in merge_alike(result for result in report.findings if result.level == "warning"):
        fleet.say(f"warning: {text}")
    if report.passed:
        _start(fleet, search, look, report)
    else:
        if any(result.level == "error" for result in report.findings):
            fleet.fit = None
        _change(fleet, search, report, event.trusted)


def _search_again(fleet: Fleet, search: Search) -> None:
    """Ask again after a moment. While the job waits for hosts, one that is new will do."""
    fleet.stays = fleet.stays.forget_short()
    if not fleet.is_fixed and (new := fleet.change.newcomers):
        fleet.move(new, State.WANTED)
        fleet.change_members(joins=new)
    fleet.move([name for name in search.replaced if name in fleet.members], State.WANTED)
    search.replaced, search.reserve = frozenset(), frozenset(fleet.members_in(*AWAY))
    _ask(fleet)


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
        looks.note_return(fleet, search.asked, failed={*search.back} != {*search.asked})
    if fleet.lengthened + REPEAT_S <= fleet.now:
        fleet.pause_s = fleet.given.limits.look_s
    if fleet.members_in(State.LOST):
        looks.seek_lost(fleet)
    members = {*fleet.members}
    fleet.move([name for name in fleet.hosts if name not in members], State.WANTED, due=fleet.now)
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
        _ask(fleet)
        return
    rest = tuple(name for name in present if name not in wrong)
    is_replaced = rest != present and len(rest) >= len(working_hosts(job, fleet.members))
    if fleet.is_elastic and rest and rest != present:  # a spare may be one that the batch gives no work
        is_replaced = fleet.assignment_of(rest).devices >= fleet.assignment_of(present).devices
    may_shrink = rest != present and job.min_hosts is not None and len(rest) >= job.min_hosts
    if search.reserve and not (is_replaced or may_shrink):  # one of them may be there by now
        fleet.move([name for name in search.reserve if name in fleet.members], State.WANTED)
        search.reserve = frozenset()
        _ask(fleet)
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
    _ask(fleet)


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
        names = f"host {new[0]}" if len(new) == 1 else f"hosts {fold(new)}"
        fleet.say(f"{limit} {names} to start (--host-timeout): {report.unreachable[new[0]]}", SEARCH)
    fleet.todo.append(events.Wait(seconds=RETRY_S))


RULES: Mapping[type[events.Event], Callable[[Fleet, Any], None]] = {
    events.Begin: _begin,
    events.Answered: _on_answer,
    events.Tick: _on_tick,
    events.Asked: _on_request,
    events.Say: lambda fleet, event: fleet.say(event.text),
    events.Warmed: _on_warm,
    events.Lost: looks.on_loss,
    events.Mistake: looks.on_mistake,
    events.CanDrain: _drain,
    events.AttemptEnded: _on_end,
}
