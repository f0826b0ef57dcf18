"""Rules while ranks run: what people ask, which hosts are looked at, and which of them can join. Pure functions.

Each host is asked alone first, and then together with the hosts that work, as before a start, by programs of its own:
the job does not notice it. The first look at a newcomer that would help is the second one. Those that can be used and
help are warm at last.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from zlib import crc32

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.state import AWAY, SEARCH, Fleet, Host, State, change_to
from roxxel_dist.launcher.job.placement import Assignment
from roxxel_dist.launcher.policy.outcome import REPEAT_S, backoff
from roxxel_dist.launcher.preflight.checks import CheckResult
from roxxel_dist.launcher.preflight.run import PreflightReport

KEPT = "cannot leave the job yet"
LOOK_MOST_S = 300.0
"""The longest pause after looks at a host that answers and is not fit: each doubles it."""
AWAY_MOST_S = 60.0
"""The longest pause after looks at a host that does not answer: each makes it a tenth longer, so that a host is asked
within a tenth of the time that it was away."""
GROW_MOST_S = 3600.0
"""The longest pause after growths: each doubles it, so that a host that comes and goes costs little; one that has cost
a start makes it eight times as long. After a day without one it is short again."""
NO_WAY = re.compile(
    r"No route to host|Connection (?:refused|timed out|closed|reset)|Network is (?:unreachable|down)"
    r"|Operation timed out|Could not resolve|Host is down|i/o timeout|was refused|Unable to connect to the server"
    r"|\(NotFound\)|container not found|does not have a host assigned|completed pod|waiting for the condition"
    r"|No such container|no container with name or ID|is not running|container state improper",
    re.IGNORECASE,
)
"""How ssh, kubectl, docker and podman say that a host is away."""


def forgive(fleet: Fleet) -> None:
    """Treat hosts that were set aside a day ago like lost ones: they are asked, and their devices checked."""
    names = [name for name in fleet.members_in(State.ASIDE) if fleet.hosts[name].since + REPEAT_S <= fleet.now]
    if names:
        fleet.move(names, State.LOST, due=fleet.now if fleet.grows_with(names) else math.inf)
        fleet.unchecked |= {*names}
        fleet.say(f"{', '.join(names)} may be used again: set aside a day ago", SEARCH)


def seek_lost(fleet: Fleet) -> None:
    """Lost hosts are asked after a pause where they would help, which the number of members decides too."""
    lost = fleet.members_in(State.LOST)
    helps = fleet.grows_with(lost)
    for name in lost:
        due = max(fleet.now, fleet.hosts[name].departs_by) + fleet.pause_s
        fleet.move([name], State.LOST, due=due if helps else math.inf)


def note_return(fleet: Fleet, names: Collection[str], *, failed: bool) -> None:
    """Take note that these hosts were taken in; `failed`: the attempt with them came to nothing."""
    hosts = fleet.hosts
    names = [name for name in names if name in hosts]
    comes_and_goes = not all(hosts[name].is_known for name in names)  # a newcomer that came once does not
    if failed or comes_and_goes:
        fleet.pause_s, fleet.lengthened = min(fleet.pause_s * (8 if failed else 2), GROW_MOST_S), fleet.now
    for name in names:
        known = hosts[name].is_known and failed
        fleet.move([name], hosts[name].state, failures=0, is_known=known)
    if not failed:
        fleet.unsay(*names)


def next_look(fleet: Fleet) -> None:
    """Ask for the next look, where none goes on."""
    members = {*fleet.members}
    while fleet.look is None:
        due = [host for host in fleet.candidates if host.due <= fleet.now]
        warm, fit = fleet.are(State.WARM), fleet.are(State.FIT)
        if due:
            new = [host.name for host in takewhile(lambda host: host.name not in members and not host.is_known, due)]
            if new and fleet.grows_with([*warm, *fit, new[0]]):  # and with each of the others, which make it no smaller
                fleet.move(new, State.FIT, due=math.inf, passed_alone=False)
            else:
                _look(fleet, (due[0].name,))
        elif fit:
            both = {*warm, *fit}
            together = tuple(host.name for host in fleet.candidates if host.name in both)
            if fleet.grows_with(together):
                _look(fleet, together)
            else:
                _settle(fleet, fit, len(fleet.working) + len(warm))
        else:
            break


def on_answer(fleet: Fleet, look: events.Look, event: events.Answered) -> None:
    """Judge what a look has found."""
    names = _end_look(fleet, look)
    if look.keep and names == look.candidates:
        _judge_together(fleet, look, event.report)
    elif look.keep:
        _ask_others_again(fleet, names)
    elif names:
        _judge_alone(fleet, names[0], event.report)
    next_look(fleet)


def on_warm(fleet: Fleet, warm: events.Warm, event: events.Warmed) -> None:
    """Hosts are ready to join, but those that cannot have ranks."""
    names = _end_look(fleet, warm)
    failed = {name: why for name, why in event.failed.items() if name in names}
    for name, why in failed.items():
        _refuse(fleet, name, {"warm": why})
    if failed or names != warm.candidates:
        _ask_others_again(fleet, names)
    else:
        hosts, working, fleet.fit = warm.plan.hosts, fleet.working, warm.report
        planned = {*hosts}
        used = [name for name in names if name in planned] or list(names)  # or those that were spare work
        fleet.move(names, State.LOOKING, passed_alone=True)
        fleet.move(used, State.WARM, due=math.inf)
        members, others, unused = {*fleet.members}, {*working, *names}, {*names} - {*used}
        fleet.move([name for name in used if name not in members], State.WARM, is_known=True)
        fleet.with_warm = tuple(name for name in hosts if name not in others)
        _settle(fleet, [name for name in names if name in unused], len(working) + len(used))
    next_look(fleet)


def on_loss(fleet: Fleet, event: events.Lost) -> None:
    """A host that was warm is not any more."""
    if event.host in fleet.are(State.WARM):
        _refuse(fleet, event.host, {"agent": event.why})
    next_look(fleet)


def on_mistake(fleet: Fleet, event: events.Mistake) -> None:
    """Say that a look has failed by a mistake of this program, and look again later."""
    names = ", ".join(event.hosts)
    if fleet.look is not None and fleet.look.candidates == event.hosts:
        for name in _end_look(fleet, fleet.look):
            fleet.move([name], State.LOST if name in fleet.members else State.WANTED, due=fleet.now + LOOK_MOST_S)
    fleet.say(f"a look at {names} failed, and is repeated later: {event.error}", names)
    next_look(fleet)


def _end_look(fleet: Fleet, do: events.Look | events.Warm) -> tuple[str, ...]:
    """The hosts of a look that may still join; those that are wanted no more are lost ones, as before, or forgotten."""
    fleet.look = None
    candidates = {*fleet.are(State.LOOKING), *fleet.are(State.WARM)}
    names = tuple(name for name in do.candidates if name in candidates)
    gone, members = [name for name in do.candidates if name not in candidates and name in fleet.hosts], {*fleet.members}
    away = [name for name in fleet.in_order(gone) if fleet.hosts[name].state in (State.LOOKING, State.WARM)]
    fleet.move(away, State.LOST, due=fleet.now + fleet.pause_s)
    fleet.drop([name for name in gone if name not in members])
    return names


def _ask_others_again(fleet: Fleet, names: Collection[str]) -> None:
    """Of hosts that were asked together, one is out: the others are asked without it."""
    asked = {*fleet.are(State.LOOKING)}
    fleet.move([name for name in names if name in asked], State.FIT)


def _look(fleet: Fleet, names: tuple[str, ...]) -> None:
    """Ask one host alone, or some together with those that work."""
    is_alone, working = len(names) == 1 and fleet.hosts[names[0]].state is not State.FIT, {*fleet.working}
    plan = Assignment(hosts=names, job=fleet.job_of(fleet.members)) if is_alone else fleet.plan(names)
    if is_alone:
        fleet.move(names, State.LOOKING, passed_alone=False)
    fleet.look = events.Look(
        assignment=plan,
        port=fleet.port,
        busy=fleet.working,
        check=frozenset(name for name in names if not fleet.hosts[name].passed_alone),
        candidates=names,
        keep=() if is_alone else tuple(name for name in plan.hosts if name not in working),
    )
    warm = {*fleet.are(State.WARM)}
    fleet.move([name for name in names if name not in warm], State.LOOKING, due=math.inf)
    fleet.todo.append(fleet.look)


def _judge_alone(fleet: Fleet, name: str, report: PreflightReport) -> None:
    reasons = _reasons(fleet, report, name) | _same_machines(fleet, [name], report).get(name, {})
    if not report.passed or report.suspects or reasons:
        _refuse(fleet, name, reasons)
        return
    if fleet.hosts[name].absences:  # what kept it away may have kept others away too
        others = [host.name for host in fleet.candidates if host.absences and host.state is State.UNFIT]
        fleet.move(others, State.UNFIT, due=fleet.now)
    fleet.move([name], State.FIT, passed_alone=True, absences=0)


def _judge_together(fleet: Fleet, look: events.Look, report: PreflightReport) -> None:
    names, working = look.candidates, fleet.working
    same = _same_machines(fleet, names, report)
    strange = [
        result
        for result in report.findings
        if result.level == "warning"
        and ("", f"warning: {result.text}") not in fleet.said
        and _strangers(result, working)
    ]
    wrong = report.blamed(working).union(
        *(_strangers(result, working) for result in strange), report.suspects.keys() - {*working}, same
    )
    if report.passed and not wrong:
        fleet.look = events.Warm(plan=look.assignment, report=report, candidates=names)
        fleet.todo.append(fleet.look)
        return
    blamed = wrong & {*names}
    for name in names:
        if name in wrong:
            reasons = _reasons(fleet, report, name) | {result.check: result.text for result in strange}
            _refuse(fleet, name, reasons | same.get(name, {}))
        elif not blamed:  # a start would end the job, whatever it is
            text = "the hosts that work could not start again now: " + "; ".join(report.problems)
            _refuse(fleet, name, {"those that work": text})
    if blamed:
        _ask_others_again(fleet, [name for name in names if name not in wrong])


def _same_machines(fleet: Fleet, names: Sequence[str], report: PreflightReport) -> dict[str, dict[str, str]]:
    """Why newcomers do not join that are a machine of the job, or of one before them, by another name; by name."""
    members, known, of_job = {*fleet.members}, dict[str, str](), dict[str | None, list[str]]()
    for other in fleet.working:
        of_job.setdefault(fleet.report.machines.get(other), []).append(other)
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if (machine := report.machines.get(name)) is None:
            continue
        same = of_job.get(machine, [])
        first = same[0] if same else known.setdefault(machine, name)
        if name not in members and first != name and len(same) <= 1:  # hosts may be few machines from the start
            found[name] = {"machine": f"it is the machine of {first}, by another name"}
    return found


def _strangers(result: CheckResult, working: Collection[str]) -> frozenset[str]:
    """The hosts that agree with none of those that work."""
    known = {*working}
    return frozenset(name for group in result.groups if not known & {*group} for name in group)


def _reasons(fleet: Fleet, report: PreflightReport, name: str) -> dict[str, str]:
    """Why a host does not pass, by check."""
    errors = [result for result in report.findings if result.level == "error"]
    blamed = {result.check: result.blamed(fleet.working) or {name} for result in errors}
    reasons = {result.check: result.text for result in errors if name in blamed[result.check]}
    reasons |= {"devices": report.suspects[name]} if name in report.suspects else {}
    return reasons | ({"host": report.unreachable[name]} if name in report.unreachable else {})


def _refuse(fleet: Fleet, name: str, reasons: Mapping[str, str]) -> None:
    """A host did not pass: it is asked again, later each time if it answers."""
    is_new, host, pause_s = name not in fleet.members, fleet.hosts[name], fleet.pause_s
    is_away = NO_WAY.search(reasons.get("host", "")) is not None
    absences, failures = (host.absences + 1, 0) if is_away else (0, host.failures + 1)
    if is_away:  # launchers of several jobs that have lost it do not ask together
        pause_s = backoff(pause_s, absences - 1, max(pause_s, AWAY_MOST_S), 1.1)
        pause_s *= 1 - crc32(f"{fleet.given.run_id} {name} {absences}".encode()) / 2**34
    else:
        pause_s = backoff(pause_s, failures, max(pause_s, LOOK_MOST_S))
    why = "; ".join(reasons.values())
    known = {"is_known": True} if is_new else {}
    looks = {"failures": failures, "absences": absences}
    fleet.move([name], State.UNFIT, why=why, due=fleet.now + pause_s, **looks, **known)
    what = "does not join yet" if is_new else "is not used again yet"
    if is_new or not is_away:
        fleet.say(f"host {name} {what}, and is asked from time to time: {why}", name)


def _settle(fleet: Fleet, names: Collection[str], working: int) -> None:
    """These can be used, and do not help beside so many that work: newcomers are spares then, if they pass alone."""
    for name in names:
        host = fleet.hosts[name]
        if not host.passed_alone:
            fleet.move([name], State.WANTED, due=fleet.now, is_known=True)
        elif name in fleet.members:
            fleet.move([name], State.LOST, due=fleet.now + fleet.pause_s)
            fleet.say(f"host {name} can be used again; the program cannot use its devices yet", name)
        else:
            fleet.move([name], State.SPARE, due=math.inf, is_known=True)
            fleet.say(f"host {name} is a spare: it passed the checks, and {_why_idle(fleet, host, working)}", name)


def _why_idle(fleet: Fleet, host: Host, working: int) -> str:
    most = fleet.given.max_hosts
    if most is not None and working >= most:
        return f"--max-hosts is {most}"
    if fleet.given.spare_hosts:
        return f"--spare-hosts is {fleet.given.spare_hosts}"
    return "n_devices, fsdp_devices, tensor_devices or virtual_shards leave its devices no work"


def follow(fleet: Fleet) -> None:
    """Let hosts be those that are wanted, as far as that costs no restart; while ranks run."""
    _receive_newcomers(fleet)
    change = fleet.change
    leaves, working = {*change.leaves}, {*fleet.working}
    spares = fleet.are(State.SPARE)
    if spares and not fleet.are(State.WARM):  # else they come in behind these
        fleet.change_members(joins=spares)
        seek_lost(fleet)
    if idle := [name for name in change.leaves if name not in working]:
        fleet.change_members(leaves=idle)
        fleet.say(f"{', '.join(idle)} left the job; no rank ran there")
    if change.kept:
        fleet.say(
            f"{', '.join(change.kept)} {KEPT}: of the {len(fleet.present_members)} hosts that are there, at "
            f"least {fleet.least} stay (--min-hosts)"
        )
    forgive(fleet)
    fleet.move([name for name in fleet.members_in(State.LEAVING) if name not in leaves], State.WORKING)
    fleet.move([name for name in fleet.members_in(State.WORKING) if name in leaves], State.LEAVING)
    next_look(fleet)


def _receive_newcomers(fleet: Fleet) -> None:
    """Hosts that came are looked at, together with spare ones; those that are wanted no more are forgotten."""
    wanted, wanted_names, members = dict.fromkeys(fleet.wanted_now), {*fleet.wanted.hosts}, {*fleet.members}
    fleet.move([name for name in wanted_names if name not in members and name not in wanted], State.HELD)
    fleet.drop([name for name in fleet.hosts if name not in members and name not in wanted_names])
    fleet.move([name for name in fleet.members_in(State.WARM) if name not in wanted], State.LOST)
    held = [name for name, host in fleet.hosts.items() if host.state is State.HELD]
    new = [name for name in wanted if name not in members and (name not in fleet.hosts or name in held)]
    fleet.move(new, State.WANTED, due=fleet.now)
    if new:  # together with these they may help
        fleet.move(fleet.are(State.SPARE), State.FIT)


def follow_list(fleet: Fleet, hosts: Sequence[str]) -> None:
    """Want the hosts of a list that was read again; those that came and went often are held back."""
    before = {*fleet.wanted.hosts}
    fleet.wanted, fleet.stays = fleet.wanted.with_list(hosts), fleet.stays.with_list(hosts, fleet.now)
    stays = fleet.stays
    _forget(fleet, {*fleet.wanted.hosts} ^ before)
    for name in sorted({*fleet.wanted.hosts} - {*fleet.wanted_now}):
        fleet.say(
            f"host {name} left the list {stays.short[name]} times soon after it came; it is taken in when it has "
            f"stayed there for {stays.joins_at(name) - stays.since[name]:.0f} s, or by `join`"
        )
    fleet.said = frozenset(key for key in fleet.said if KEPT not in key[1])


def _forget(fleet: Fleet, names: Sequence[str] | set[str]) -> None:
    """These hosts are looked at, and spoken of, as if they were new."""
    members = {*fleet.members}
    for name in names:
        if name in members:
            host = fleet.hosts[name]
            due = {"due": fleet.now} if host.state is State.UNFIT else {}
            fleet.move([name], host.state, failures=0, absences=0, is_known=False, **due)
    fleet.drop([name for name in names if name not in members])
    fleet.unsay(*names)


def join(fleet: Fleet, hosts: Sequence[str]) -> events.Answer:
    """Want these hosts in the job, and look at them now."""
    members = {*fleet.members} & {*fleet.wanted_now}
    new = [name for name in hosts if name not in members]
    if not new:
        return events.Answer(done=True, text=f"{', '.join(hosts)} is in the job already")
    fleet.wanted = fleet.wanted.with_join(new)
    _forget(fleet, new)
    away = [name for name in fleet.members_in(*AWAY) if name in new]
    fleet.move([name for name in away if fleet.hosts[name].state is not State.LOOKING], State.LOST, due=fleet.now)
    return events.Answer(done=True, text=f"{', '.join(new)} is checked now, and joins the job when it passes")


def leave(fleet: Fleet, hosts: Sequence[str]) -> events.Answer:
    """Want these hosts no more, where enough others are left."""
    names = ", ".join(hosts)
    if strange := [name for name in hosts if name not in fleet.wanted.hosts]:
        text = f"{', '.join(strange)} is no host of the job: it has {', '.join(fleet.wanted.hosts)}"
        return events.Answer(done=False, text=text)
    wanted = fleet.wanted.with_leave(hosts)
    if change_to(wanted.hosts, fleet.members, fleet.present_members, fleet.least).kept or not wanted.hosts:
        return events.Answer(
            done=False,
            text=f"{names} cannot leave: of the {len(fleet.present_members)} hosts that are there, at least "
            f"{fleet.least} stay (--min-hosts); let others join before",
        )
    fleet.wanted = wanted
    if not {*hosts} & {*fleet.working}:
        return events.Answer(done=True, text=f"{names} leaves the job; no rank runs there")
    return events.Answer(done=True, text=f"the ranks save, and the job continues without {names}")
