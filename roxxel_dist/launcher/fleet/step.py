"""What follows from an event: the fleet after it, and what is to be done. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roxxel_dist.launcher.fleet import looks, start
from roxxel_dist.launcher.fleet.looks import note_return
from roxxel_dist.launcher.fleet.state import (
    AWAY,
    Answer,
    Answered,
    AttemptEnded,
    AwaitEnd,
    Begin,
    CanDrain,
    Do,
    Drain,
    Event,
    Fault,
    Fleet,
    Host,
    Joined,
    Left,
    Listed,
    Look,
    Lost,
    Mistake,
    State,
    Tick,
    Turn,
    Warm,
    Warmed,
)
from roxxel_dist.launcher.fleet.wanted import Stays, Wanted, change_to
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.restart import Cause, has_come_to_nothing, next_action

SWAP_S = 10.0
"""A host that is to leave stays so long for the first look at those that are to join: one restart does for both."""
DEPART_S = 120.0
"""A host that a system has asked to end is not used again sooner: clouds and schedulers end it within two minutes."""
KEPT = "cannot leave the job yet"


def fleet_of(
    job: JobSpec,
    hosts: Sequence[str],
    *,
    now: float,
    given: Sequence[str] | None = None,
    listed: Sequence[str] = (),
    is_fixed: bool = False,
    failed: Mapping[str, str] | None = None,
) -> tuple[Fleet, list[Do]]:
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
    turn = Turn(fleet)
    if failed:
        for name, why in failed.items():
            if turn.fleet.can_do_without(name):
                turn.move([name], State.ASIDE, why=why)
        used = [name for name in failed if turn.fleet.hosts[name].state is not State.ASIDE]
        names = "; ".join(f"{name} ({why.removeprefix(f'{name}: ')})" for name, why in failed.items())
        end = f"; used in any case, for too few others are left: {', '.join(used)}" if used else ""
        turn.say(f"failed in the last day, see `doctor --forget`: {names}{end}")
    return turn.fleet, turn.todo


def step(fleet: Fleet, event: Event) -> tuple[Fleet, list[Do]]:
    """The fleet after an event, and what is to be done, in order.

    Of looks and warm-ups one goes on at a time: its end is an event (`Answered`, `Warmed`, or `Mistake`), which is to
    come before the next attempt ends, or not at all.
    """
    turn = Turn(replace(fleet, now=event.now))
    RULES[type(event)](turn, event)
    return turn.fleet, turn.todo


def _on_tick(turn: Turn, event: Tick) -> None:
    if turn.fleet.search is not None:
        start.waited(turn, turn.fleet.search)
    elif not turn.fleet.is_fixed:
        _follow(turn)


def _on_answer(turn: Turn, event: Answered) -> None:
    fleet = turn.fleet
    if not isinstance(fleet.look, Look):
        return
    if fleet.search is not None:
        start.answered(turn, fleet.search, fleet.look, event)
    else:
        looks.answered(turn, fleet.look, event)


def _on_warm(turn: Turn, event: Warmed) -> None:
    if isinstance(turn.fleet.look, Warm):
        looks.warmed(turn, turn.fleet.look, event)


def _follow(turn: Turn) -> None:
    """While ranks run: let hosts be those that are wanted, as far as that costs no restart."""
    _receive_newcomers(turn)
    change = turn.fleet.change
    spares = turn.fleet.are(State.SPARE)
    if spares and not turn.fleet.are(State.WARM):  # else they come in behind these
        turn.change_members(joins=spares)
    if idle := [name for name in change.leaves if name not in turn.fleet.working]:
        turn.change_members(leaves=idle)
        turn.say(f"{', '.join(idle)} left the job; no rank ran there")
    if change.kept:
        there = len(turn.fleet.there)
        turn.say(
            f"{', '.join(change.kept)} {KEPT}: of the {there} hosts that are there, at least {turn.fleet.least} stay "
            "(--min-hosts)"
        )
    turn.move([name for name in turn.fleet.members_in(State.LEAVING) if name not in change.leaves], State.WORKING)
    turn.move([name for name in turn.fleet.members_in(State.WORKING) if name in change.leaves], State.LEAVING)
    looks.next_look(turn)


def _receive_newcomers(turn: Turn) -> None:
    """Hosts that came are looked at, together with spare ones; those that are wanted no more are forgotten."""
    fleet = turn.fleet
    wanted, every, members = dict.fromkeys(fleet.wanted_now), {*fleet.wanted.hosts}, {*fleet.members}
    turn.move([name for name in every if name not in members and name not in wanted], State.HELD)
    turn.drop([name for name in fleet.hosts if name not in members and name not in every])
    warm = [name for name in fleet.members_in(State.WARM) if name not in wanted]
    turn.move(warm, State.LOST)
    hosts = turn.fleet.hosts
    new = [
        name for name in wanted if name not in fleet.members and (name not in hosts or hosts[name].state is State.HELD)
    ]
    turn.move(new, State.WANTED, due=fleet.now)
    if new:  # together with these they may help
        turn.move(turn.fleet.are(State.SPARE), State.FIT)


def _on_list(turn: Turn, event: Listed) -> None:
    fleet, before = turn.fleet, {*turn.fleet.wanted.hosts}
    turn.update(wanted=fleet.wanted.with_list(event.hosts), stays=fleet.stays.with_list(event.hosts, fleet.now))
    fleet = turn.fleet
    _forget(turn, {*fleet.wanted.hosts} ^ before)
    for name in sorted({*fleet.wanted.hosts} - {*fleet.wanted_now}):
        stays = fleet.stays
        turn.say(
            f"host {name} left the list {stays.short[name]} times soon after it came; it is taken in when it has "
            f"stayed there for {stays.joins_at(name) - stays.since[name]:.0f} s, or by `join`"
        )
    turn.update(said=frozenset(key for key in turn.fleet.said if KEPT not in key[1]))


def _forget(turn: Turn, names: Sequence[str] | set[str]) -> None:
    """These hosts are looked at, and spoken of, as if they were new."""
    fleet = turn.fleet
    for name in names:
        if name in fleet.members:
            turn.move([name], fleet.hosts[name].state, failures=0, is_known=False)
    turn.drop([name for name in names if name not in fleet.members])
    turn.unsay(*names)


def _on_join(turn: Turn, event: Joined) -> None:
    turn.todo.append(_join(turn, event.hosts))


def _join(turn: Turn, hosts: Sequence[str]) -> Answer:
    fleet = turn.fleet
    members = {*fleet.members} & {*fleet.wanted_now}
    new = [name for name in hosts if name not in members]
    if not new:
        return Answer(done=True, text=f"{', '.join(hosts)} is in the job already")
    turn.update(wanted=fleet.wanted.with_join(new))
    _forget(turn, new)
    away = [name for name in fleet.members_in(*AWAY) if name in new]
    turn.move([name for name in away if fleet.hosts[name].state is not State.LOOKING], State.LOST, due=fleet.now)
    return Answer(done=True, text=f"{', '.join(new)} is checked now, and joins the job when it passes")


def _on_leave(turn: Turn, event: Left) -> None:
    turn.todo.append(_leave(turn, event.hosts))


def _leave(turn: Turn, hosts: Sequence[str]) -> Answer:
    fleet, names = turn.fleet, ", ".join(hosts)
    if strange := [name for name in hosts if name not in fleet.wanted.hosts]:
        text = f"{', '.join(strange)} is no host of the job: it has {', '.join(fleet.wanted.hosts)}"
        return Answer(done=False, text=text)
    wanted = fleet.wanted.with_leave(hosts)
    if change_to(wanted.hosts, fleet.members, fleet.there, fleet.least).kept or not wanted.hosts:
        return Answer(
            done=False,
            text=f"{names} cannot leave: of the {len(fleet.there)} hosts that are there, at least {fleet.least} stay "
            "(--min-hosts); let others join before",
        )
    turn.update(wanted=wanted)
    if not {*hosts} & {*fleet.working}:
        return Answer(done=True, text=f"{names} leaves the job; no rank runs there")
    return Answer(done=True, text=f"the ranks save, and the job continues without {names}")


def _due(fleet: Fleet, lost: str = "") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hosts to take in, and working ones that shall leave, without one that is lost."""
    joins = fleet.are(State.WARM)
    there = {*fleet.there, *joins} - {lost}
    change = change_to(fleet.wanted_now, fleet.with_members(joins), there, fleet.least)
    return joins, tuple(name for name in change.leaves if name in fleet.working)


def _drain(turn: Turn, event: CanDrain) -> None:
    """Have the ranks save and leave, where hosts are to join or leave."""
    fleet = turn.fleet
    joins, leaves = _due(fleet)
    joins = joins if event.joins_too or leaves else ()
    if not joins and not leaves:
        turn.update(leaves_since=None)
        return
    since = fleet.leaves_since or fleet.now
    turn.update(leaves_since=since)
    is_first_look = any(not host.is_known for host in fleet.candidates if host.name not in fleet.members)
    if not joins and is_first_look and fleet.now < since + SWAP_S:
        return
    back = [name for name in joins if name in fleet.members]
    new = [name for name in joins if name not in back]
    groups = ((back, "can be used again"), (new, "can join the job"), (leaves, "shall leave the job"))
    with_them = [f"with {', '.join(joins)}"] * bool(joins) + [f"without {', '.join(leaves)}"] * bool(leaves)
    why = "; ".join(f"{', '.join(names)} {what}" for names, what in groups if names)
    turn.todo.append(Drain(why=why, then=f"the job continues {' and '.join(with_them)}"))


def _on_end(turn: Turn, event: AttemptEnded) -> None:
    """After an attempt: change the hosts of the job, and decide whether there is another attempt."""
    fleet, joins = turn.fleet, ()
    taken_in, before = fleet.taken_in, max((one.reached for one in fleet.attempts), default=0)
    if not fleet.is_fixed:
        joins, leaves = _due(fleet, event.lost)
        turn.change_members(dict.fromkeys((*joins, *fleet.are(State.SPARE))), leaves)
    turn.update(look=None, leaves_since=None, with_warm=(), kept=(), taken_in=())
    away = turn.fleet.members_in(*AWAY, State.WARM)
    turn.move([name for name in away if name not in joins], State.LOST)
    has_spare = turn.fleet.has_spare or bool(joins)
    attempt = event.attempt
    others = event.lost and event.lost not in taken_in  # its end is no fault of those that were taken in
    if taken_in and has_come_to_nothing(attempt, before) and not others:
        attempt = replace(attempt, failed_growth=", ".join(taken_in))
        note_return(turn, taken_in, failed=True)
        back = [name for name in joins if name in fleet.members]
        turn.move([name for name in joins if name not in back], State.SPARE)
        turn.move((*back, *(name for name in taken_in if name in turn.fleet.members)), State.LOST)
    turn.update(attempts=(*fleet.attempts, attempt))
    if event.lost and has_spare:  # a spare host takes its place without an attempt to reach it
        _set_aside(turn, event.lost)
    job = fleet.given
    decision = next_action(turn.fleet.attempts, job.max_restarts, job.restart_on, turn.fleet.can_do_without)
    turn.todo.append(decision)
    if not decision.again:
        return
    if attempt.cause is Cause.INFRASTRUCTURE and attempt.host:
        turn.update(unchecked=turn.fleet.unchecked | {attempt.host})
    if decision.set_aside:
        _set_aside(turn, decision.set_aside)
    _let_go(turn, event.departing)


def _set_aside(turn: Turn, name: str) -> None:
    """Use this host only where there are too few others."""
    if name in turn.fleet.members:
        turn.move([name], State.ASIDE)


def _let_go(turn: Turn, departing: Sequence[str]) -> None:
    """Go on without hosts that a system has asked to end; wait for the end of those that the job needs."""
    needed: list[str] = []
    for name in departing:
        if name not in turn.fleet.members:
            continue
        if turn.fleet.can_do_without(name):
            turn.move([name], State.LOST)
        else:
            needed.append(name)
        turn.move([name], turn.fleet.hosts[name].state, departs_by=turn.fleet.now + DEPART_S)
    if needed:
        turn.say(
            f"the job needs {', '.join(needed)}: it starts again there when the host has ended and is back, or is "
            f"still there in {DEPART_S:g} s",
            start.SEARCH,
        )
        turn.todo.append(AwaitEnd(hosts=tuple(needed)))


def _on_fault(turn: Turn, event: Fault) -> None:
    turn.say(event.text)


RULES: Mapping[type[Event], Callable[[Turn, Any], None]] = {
    Begin: start.begin,
    Answered: _on_answer,
    Tick: _on_tick,
    Listed: _on_list,
    Joined: _on_join,
    Left: _on_leave,
    Fault: _on_fault,
    Warmed: _on_warm,
    Lost: looks.lost,
    Mistake: looks.mistaken,
    CanDrain: _drain,
    AttemptEnded: _on_end,
}
