"""The findings about hosts, from their answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import one_test

from roxxel_dist.cli.doctor import DoctorArgs, requirements
from roxxel_dist.launcher.job.spec import JobSpec, flag, log_dir_for
from roxxel_dist.launcher.preflight.checks import (
    ADVISED_FREE_BYTES,
    MIN_FREE_BYTES,
    CheckResult,
    Requirements,
    fold,
    requirements_of,
    run_checks,
    size,
)

VERSIONS = {"python": "3.11.7", "roxxel-dist": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6"}
Hosts = dict[str, dict[str, Any]]


def healthy(number: int) -> dict[str, Any]:
    return {
        "machine": f"boot{number} net",
        "place": f"boot{number} net mnt",
        "name": f"n{number}",
        "resolves": [f"10.0.0.{number}"],
        "owned": [f"10.0.0.{number}"],
        "ports": [32768, 60999],
        "ssh_address": f"10.0.0.{number}",
        "versions": dict(VERSIONS),
        "data": None,
        "gpus": 0,
        "visible": None,
        "tpu_lock": None,
        "tpus": 0,
        "platforms": None,
        "run_dir": {"path": "/runs", "free": 1 << 40, "why": None, "foreign": None},
    }


def three_hosts() -> Hosts:
    return {f"h{number}": healthy(number) for number in (1, 2, 3)}


def judge(change: Callable[[Hosts], Any], wanted: Requirements | None = None) -> list[CheckResult]:
    """What is not ok with three hosts of which something is changed."""
    hosts = three_hosts()
    change(hosts)
    return [found for found in run_checks(wanted or Requirements(), hosts) if found.level != "ok"]


def test_nothing_is_wrong_with_healthy_hosts() -> None:
    found = run_checks(Requirements(), three_hosts())
    assert {one.level for one in found} == {"ok"}
    checks = {"devices", "disk", "versions", "name"}
    assert {one.check for one in found} == checks
    assert all(one.hosts == ("h1", "h2", "h3") for one in found)


def test_of_one_host_less_is_said() -> None:
    only = {"h1": {name: value for name, value in healthy(1).items() if name not in ("versions", "data")}}
    assert {one.check for one in run_checks(Requirements(), only)} == {"devices", "disk"}


def put(host: str, **values: Any) -> Callable[[Hosts], None]:
    return lambda hosts: hosts[host].update(values)


def disk(free: int, why: str | None = None) -> dict[str, Any]:
    return {"path": "/data/runs", "free": free, "why": why, "foreign": None}


TOKENS = {"path": "d", "fingerprint": "aa"}


def with_data(**others: Any) -> Callable[[Hosts], None]:
    def change(hosts: Hosts) -> None:
        for host in hosts:
            hosts[host]["data"] = others.get(host, TOKENS)

    return change


def name_of(host: str, *addresses: str, others: tuple[str, ...] = (), **more: Any) -> Callable[[Hosts], None]:
    """The host's own name means these addresses to it, and before them `others`, which no interface of it has."""
    return put(host, resolves=[*others, *addresses], owned=list(addresses), **more)


CASES = [
    ("name", "error", name_of("h2", "127.0.1.1"), ["h2", "'n2'", "127.0.1.1", "/etc/hosts", "10.0.0.2 n2"]),
    ("name", "error", name_of("h2", "::1", "10.0.0.2"), ["h2", "::1"]),
    ("name", "error", name_of("h2"), ["h2", "'n2'", "does not resolve"]),
    ("name", "error", name_of("h2", others=("10.9.9.9",)), ["resolves to 10.9.9.9, which no interface of h2 has"]),
    ("name", "error", name_of("h2", "127.0.0.1", others=("10.9.9.9",)), ["127.0.0.1, which other hosts cannot reach"]),
    ("name", "warning", name_of("h2", "127.0.0.1", tpus=4), ["h2"]),
    ("versions", "error", lambda hosts: hosts["h3"]["versions"].update(jax="0.9.0"), ["jax", "0.9.0 on h3", "h1, h2"]),
    ("versions", "error", lambda hosts: hosts["h3"]["versions"].pop("jaxlib"), ["jaxlib", "none on h3"]),
    ("versions", "warning", lambda hosts: hosts["h1"]["versions"].update(numpy="2.0"), ["numpy", "2.0 on h1"]),
    ("data", "error", with_data(h2={"path": "d", "fingerprint": "bb"}), ["d", "aa on h1, h3", "bb on h2"]),
    ("data", "error", with_data(h3={"path": "d", "why": "no such file"}), ["h3", "d", "no such file"]),
    ("data", "error", with_data(h3={"path": "d", "text": True}), ["h3", "text", "tokens on h1"]),
    ("devices", "warning", put("h1", tpus=4), ["4 TPU chips on h1", "0 TPU chips on h2, h3"]),
    ("disk", "error", put("h1", run_dir=disk(MIN_FREE_BYTES - 1)), ["h1", "/data/runs", "0.2 MiB", "--run_dir"]),
    ("disk", "warning", put("h1", run_dir=disk(ADVISED_FREE_BYTES - 1)), ["h1", "/data/runs", "--run_dir"]),
    ("disk", "error", put("h1", run_dir=disk(1 << 40, "no permission")), ["h1", "/data/runs", "no permission"]),
    ("disk", "error", put("h1", run_dir=disk(1 << 40, "is a file")), ["h1: /data/runs is a file: name a folder with"]),
    ("host", "warning", put("h2", machine="boot1 net"), ["h1, h2", "one machine"]),
]


@one_test(("check", "level", "change", "words"), CASES)
def test_one_thing_is_wrong(check: str, level: str, change: Callable[[Hosts], None], words: list[str]) -> None:
    found = [one for one in judge(change) if one.check != "devices" or check == "devices"]
    assert [(one.check, one.level) for one in found] == [(check, level)]
    assert not [word for word in words if word not in found[0].text], found[0].text


def test_gloo_needs_names_only_where_ranks_run_on_cpu() -> None:
    def levels(**facts: Any) -> list[str]:
        bad = {"resolves": ["127.0.0.1"], "owned": ["127.0.0.1"], **facts}
        return [one.level for one in judge(put("h2", **bad), Requirements(platforms=None)) if one.check == "name"]

    assert levels() == ["error"]
    assert levels(gpus=8) == ["warning"]
    assert levels(gpus=8, platforms="cpu") == ["error"]
    assert levels(platforms="cuda,cpu") == ["warning"]
    told = judge(name_of("h2", "127.0.0.1", gpus=8), Requirements(platforms="cpu"))
    assert [one.level for one in told if one.check == "name"] == ["error"]


def test_own_names_that_mean_the_same_address_are_all_wrong() -> None:
    told = judge(name_of("h2", "10.0.0.1"))
    assert [(one.check, one.level, one.hosts) for one in told] == [("name", "error", (host,)) for host in ("h1", "h2")]
    assert "resolves to 10.0.0.1, as that of h1 does there" in told[1].text
    assert "`10.0.0.2 n2` instead" in told[1].text


def test_of_two_names_of_one_machine_the_one_that_has_worked_is_right() -> None:
    """A client that led to another host until its context changed."""
    hosts = {name: healthy(number) for name, number in (("h1", 1), ("h2", 2), ("h3", 2))}
    (found,) = [one for one in run_checks(Requirements(distinct=True), hosts) if one.level == "error"]
    assert (found.check, found.hosts) == ("machine", ("h2", "h3"))
    assert found.blamed() == frozenset(), "nobody knows which"
    assert found.blamed(["h1", "h3"]) == {"h2"}
    hosts["h3"]["place"] = "boot2 net of another container"
    levels = [(one.check, one.level) for one in run_checks(Requirements(distinct=True), hosts) if one.level != "ok"]
    assert ("host", "warning") in levels
    assert ("machine", "error") not in levels


def test_hosts_that_are_one_machine_need_no_name() -> None:
    def change(hosts: Hosts) -> None:
        for facts in hosts.values():
            facts.update(machine="one", resolves=["127.0.0.1"], owned=["127.0.0.1"])

    assert [(one.check, one.level) for one in judge(change)] == [("host", "warning")]


def gpus(*counts: int | None) -> Callable[[Hosts], None]:
    return lambda hosts: (
        [facts.update(gpus=count) for facts, count in zip(hosts.values(), counts, strict=True)] and None
    )


def test_gpus_are_as_many_as_wanted() -> None:
    need = Requirements(gpus_per_host=8)
    assert judge(gpus(8, 8, 8), need) == []
    few = judge(gpus(8, 4, 0), need)
    assert [(one.level, one.hosts) for one in few] == [("error", ("h2",)), ("error", ("h3",))]
    assert "use --gpus-per-host 4" in few[0].text
    assert "leave --gpus-per-host out" in few[1].text
    assert judge(gpus(None, None, None), need) == []
    assert judge(gpus(1, 1, 1), Requirements(gpus_per_host=2, visible="MIG-a,MIG-b")) == []


def test_text_is_read_by_rank_0_alone() -> None:
    text, absent = {"path": "t.txt", "text": True}, {"path": "t.txt", "why": "no such file"}
    assert judge(with_data(h1=text, h2=absent, h3=absent)) == []
    assert [one.level for one in judge(with_data(h1=absent, h2=text, h3=text))] == ["error", "error"]


def test_many_hosts_are_counted() -> None:
    hosts = [f"h{number}" for number in range(40)]
    assert fold(hosts[:9]) == ", ".join(hosts[:9])
    assert fold(hosts) == "h[0-39]"
    assert fold([f"h{number:03}" for number in (*range(1, 193), 200)]) == "h[001-192], h200"
    assert fold([f"n7.rack{number}.site" for number in range(8, 12)] * 4) == ", ".join(["n7.rack[8-11].site"] * 4)
    assert fold([f"h{number}" for number in range(0, 40, 2)]) == "h0, h2, h4, h6, h8, h10, h12, h14 and 12 more"
    assert fold([f"h{number} (10.0.0.{number})" for number in range(10)]).endswith("h7 (10.0.0.7) and 2 more")
    assert fold(["10.0.1.254", "10.0.1.255", *(f"10.0.2.{number}" for number in range(9))]) == (
        "10.0.1.[254-255], 10.0.2.[0-8]"
    )


def test_sizes() -> None:
    assert [size(MIN_FREE_BYTES), size(3 << 29), size(5000 << 30)] == ["0.2 MiB", "1.5 GiB", "5,000.0 GiB"]


def job(*command: str, **more: Any) -> JobSpec:
    return JobSpec(command=command, nprocs=2, run_id="r", log_dir=log_dir_for(command, "r"), **more)


def test_what_a_job_wants() -> None:
    wanted = requirements_of(
        job("train", "--run-dir=x", "--data-path", "a", "--data_path=b", "--resume"), {}, writes=False
    )
    assert wanted == Requirements(run_dir="x", shared=True, data_path="b", resume=True, jax={})
    assert not requirements_of(job("train", "--resume", "False"), {}, writes=False).resume
    assert requirements_of(job("train", "--resume=True"), {}, writes=False).resume
    assert requirements_of(job("train"), {}, writes=False).run_dir == str(Path("runs/run_r"))
    other = requirements_of(job("python", "a.py", "--data_path", "b", devices_per_proc=2), {}, writes=False)
    assert other == Requirements(platforms="cpu")
    of_jax = job("train", devices_per_proc=2, env={"XLA_FLAGS": "--a", "HOME": "x"})
    assert requirements_of(of_jax, {}, writes=False).jax == {"XLA_FLAGS": "--a", "JAX_PLATFORMS": "cpu"}
    assert of_jax.jax_environment({"JAX_PLATFORMS": "cuda"})["JAX_PLATFORMS"] == "cuda"
    assert requirements_of(job("true"), {}, writes=True).run_dir == str(Path("runs/run_r"))
    outer = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert requirements_of(job("true", gpus_per_host=2), outer, writes=False).visible == "0,1"
    more = requirements_of(job("true", gpus_per_host=2, env={"CUDA_VISIBLE_DEVICES": "4,5"}), outer, writes=False)
    assert (more.gpus_per_host, more.visible) == (2, "4,5")


def test_what_somebody_wants_by_hand() -> None:
    assert requirements(DoctorArgs(), ()) == Requirements(run_dir="runs/run_new", jax={})
    told = requirements(DoctorArgs(run_dir="x", gpus_per_host=2), ("train", "--data_path", "a"))
    assert told == Requirements(run_dir="x", shared=True, data_path="a", gpus_per_host=2, jax={})
    told = requirements(DoctorArgs(data_path="b"), ("train", "--run_dir", "y"))
    assert told == Requirements(run_dir="y", shared=True, data_path="b", jax={})


def test_words_of_a_command() -> None:
    assert flag(["--a_b", "1", "--a-b=2"], "a_b") == "2"
    assert flag(["--a"], "a") is None


def compared(*groups: tuple[str, ...]) -> CheckResult:
    hosts = tuple(host for group in groups for host in group)
    return CheckResult("error", "versions", hosts, "jax differs", groups)


@one_test(
    ("result", "trusted", "blamed"),
    [
        (CheckResult("error", "disk", ("b",), "full"), (), {"b"}),
        (CheckResult("error", "disk", ("b",), "full"), ("a", "b"), {"b"}),
        (CheckResult("error", "port", ("b", "a"), "no way"), (), set()),
        (CheckResult("error", "port", ("b", "a"), "no way"), ("a",), {"b"}),
        (CheckResult("error", "port", ("b", "a"), "no way"), ("a", "b"), set()),
        (compared(("a", "b"), ("c",)), ("a", "b"), {"c"}),
        (compared(("a",), ("b", "c")), ("a",), {"b", "c"}),  # those that came back, though they are more
        (compared(("a",), ("b", "c")), (), {"a"}),  # no host has worked yet: the most
        (compared(("a",), ("b",)), (), set()),
        (compared(("a",), ("b",), ("c",)), ("b", "c"), {"a"}),  # a folder that the others do not see
        (compared(("a",), ("b",)), ("a", "b"), set()),
        (compared(("a",), ("b",), ("c", "d")), ("a", "b"), {"c", "d"}),
    ],
)
def test_which_hosts_are_to_blame(result: CheckResult, trusted: tuple[str, ...], blamed: set[str]) -> None:
    assert result.blamed(trusted) == blamed
