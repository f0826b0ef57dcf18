"""What a job may be, the environment of its ranks, run ids, log folders, ports."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.launcher.backends.ssh import SshBackend
from roxxel_dist.launcher.control.supervisor import run
from roxxel_dist.launcher.job.placement import coordinator_port, placements, rank_environment, visible_gpus
from roxxel_dist.launcher.job.spec import CONTRACT, JobSpec, log_dir_for, new_run_id

GOOD: dict[str, Any] = {"command": ("train",), "nprocs": 2, "run_id": "r", "log_dir": Path("logs")}


@one_test(
    ("field", "value", "flag", "fix"),
    [
        ("command", (), "no command", "-- train"),
        ("command", ("",), "no command", "-- train"),
        ("command", ("a", "b\0c"), "NUL", "take it out"),
        ("nprocs", 0, "--nprocs 0", "at least 1"),
        ("devices_per_proc", 0, "--devices-per-proc 0", "leave it out"),
        ("port", 70000, "--port 70000", "leave --port out"),
        ("port", 0, "--port 0", "leave --port out"),
        ("max_restarts", -1, "--max-restarts -1", "0 (none) or more"),
        ("step_timeout", 0.0, "--step-timeout 0.0", "leave it out"),
        ("step_timeout", float("inf"), "--step-timeout inf", "leave it out"),
        ("gpus_per_host", 0, "--gpus-per-host 0", "leave it out"),
        ("exit_timeout", -1.0, "--exit-timeout -1.0", "0 (no limit) or more"),
        ("grace", float("nan"), "--grace nan", "0 or more"),
        ("env", {"ROXXEL_PROCESS_ID": "1"}, "ROXXEL_PROCESS_ID", "leave it out"),
    ],
)
def test_what_cannot_be_started_names_flag_and_fix(field: str, value: Any, flag: str, fix: str) -> None:
    with pytest.raises(ValueError, match=re.escape(flag)) as caught:
        JobSpec(**{**GOOD, field: value})
    assert fix in str(caught.value)


def test_the_environment_of_a_rank() -> None:
    job = JobSpec(**{**GOOD, "nprocs": 3, "devices_per_proc": 64, "env": {"MINE": "x"}})
    env = rank_environment(job, 1, "127.0.0.1:99", {})
    assert env == {
        "MINE": "x",
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": str(max(192, os.cpu_count() or 1)),
        "PYTHONUNBUFFERED": "1",
        "ROXXEL_ATTEMPT": "0",
        "ROXXEL_COORDINATOR": "127.0.0.1:99",
        "ROXXEL_EXIT_TIMEOUT": "65",
        "ROXXEL_LOCAL_DEVICES": "64",
        "ROXXEL_NUM_PROCESSES": "3",
        "ROXXEL_PROCESS_ID": "1",
        "ROXXEL_RUN_ID": "r",
        "ROXXEL_STATUS": "1",
    }


def test_the_attempt_is_counted() -> None:
    assert rank_environment(JobSpec(**GOOD), 0, "c", {}, attempt=2)["ROXXEL_ATTEMPT"] == "2"


@pytest.mark.parametrize(
    ("gpus", "procs", "outer", "shares"),
    [
        (4, 2, None, ["0,1", "2,3"]),
        (2, 2, None, ["0", "1"]),
        (8, 1, None, ["0,1,2,3,4,5,6,7"]),
        (2, 2, "5, 3,1", ["5", "3"]),
        (2, 1, "GPU-a,GPU-b", ["GPU-a,GPU-b"]),
    ],
)
def test_every_gpu_goes_to_one_process(gpus: int, procs: int, outer: str | None, shares: list[str]) -> None:
    assert [visible_gpus(gpus, procs, index, outer) for index in range(procs)] == shares


def test_gpus_that_do_not_divide_or_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"--gpus-per-host 4 is not a multiple of the 3 processes.*divides 4"):
        visible_gpus(4, 3, 0)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=7 allows 1: use --gpus-per-host 1"):
        visible_gpus(2, 1, 0, "7")
    for outer, words in (
        ("-1", "'-1' is no GPU"), ("all", "'all' is no GPU"), ("0-1", "'0-1' is no GPU"), ("NoDevFiles", "is no GPU"),
        ("0,0", "names a GPU twice"), ("GPU-a,GPU-a", "names a GPU twice"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={outer}: .*{words}"):
            visible_gpus(2, 2, 0, outer)
    with pytest.raises(ValueError, match="allows 0"):
        visible_gpus(2, 1, 0, "")
    with pytest.raises(ValueError, match=r"--gpus-per-host 2 and --devices-per-proc 4: .*leave one of the two out"):
        JobSpec(**GOOD, gpus_per_host=2, devices_per_proc=4)


def test_ranks_are_dealt_to_hosts_in_blocks_and_gpus_within_each_host() -> None:
    job = JobSpec(**{**GOOD, "nprocs": 4, "gpus_per_host": 4})
    left, right = placements(job, ("left", "right"), "c", {}, attempt=1)
    assert (left.host, list(left.ranks), right.host, list(right.ranks)) == ("left", [0, 1], "right", [2, 3])
    devices = [env["CUDA_VISIBLE_DEVICES"] for place in (left, right) for env in place.ranks.values()]
    assert devices == ["0,1", "2,3"] * 2
    assert {env["ROXXEL_ATTEMPT"] for place in (left, right) for env in place.ranks.values()} == {"1"}
    job = JobSpec(**{**GOOD, "gpus_per_host": 2, "env": {"CUDA_VISIBLE_DEVICES": "6,7"}})
    (place,) = placements(job, ("h",), "c", {"CUDA_VISIBLE_DEVICES": "0"})
    assert [env["CUDA_VISIBLE_DEVICES"] for env in place.ranks.values()] == ["6", "7"]
    plain = placements(JobSpec(**GOOD), ("h",), "c", {"CUDA_VISIBLE_DEVICES": "0"})
    assert "CUDA_VISIBLE_DEVICES" not in plain[0].ranks[0]


def test_a_host_without_a_rank_is_refused(tmp_path: Path) -> None:
    job = JobSpec(**{**GOOD, "nprocs": 1, "log_dir": tmp_path})
    with pytest.raises(ValueError, match="nprocs 1: there are 2 hosts"):
        run(job, SshBackend(["a", "b"]))


def test_what_the_caller_set_stays() -> None:
    job = JobSpec(**{**GOOD, "devices_per_proc": 1})
    env = rank_environment(job, 0, "c", {"PJRT_NPROC": "7", "JAX_PLATFORMS": "cuda"})
    assert (env["PJRT_NPROC"], env["JAX_PLATFORMS"]) == ("7", "cuda")
    job = JobSpec(**{**GOOD, "env": {"PJRT_NPROC": "5"}})
    env = rank_environment(job, 0, "c", {"PJRT_NPROC": "7"})
    assert env["PJRT_NPROC"] == "5"
    assert not {"JAX_PLATFORMS", "ROXXEL_LOCAL_DEVICES"} & set(env)


def test_the_thread_count_of_an_outer_launch_does_not_leak() -> None:
    outer = {"ROXXEL_COORDINATOR": "x", "PJRT_NPROC": "100000"}
    assert rank_environment(JobSpec(**GOOD), 0, "c", outer)["PJRT_NPROC"] != "100000"


def test_the_contract_names_all_that_the_launcher_sets() -> None:
    job = JobSpec(**{**GOOD, "devices_per_proc": 1, "command": ("train",)})
    own = {name for name in rank_environment(job, 0, "c", {}, reached=3) if name.startswith("ROXXEL_")}
    given = {"ROXXEL_PROGRESS", "ROXXEL_PIPE", "ROXXEL_MEMORY", "ROXXEL_SPARE"}  # by the agent
    assert own | given == set(CONTRACT)


def test_the_step_that_was_reached_is_for_train_alone() -> None:
    """A program of the user's may have done the steps of another run than the one that it begins."""
    for command, reached, value in ((("train",), 7, "7"), (("train",), 0, None), (("python", "a.py"), 7, None)):
        job = JobSpec(**{**GOOD, "command": command})
        assert rank_environment(job, 0, "c", {}, attempt=1, reached=reached).get("ROXXEL_REACHED_STEP") == value
        (place,) = placements(job, ("h",), "c", {}, attempt=1, reached=reached)
        assert place.ranks[1].get("ROXXEL_REACHED_STEP") == value


@one_test(
    ("command", "folder"),
    [
        ("train data --run_dir here", "here/logs"),
        ("train data --run-dir here --lr 1", "here/logs"),
        ("train --run_dir=a/b data", "a/b/logs"),
        ("train --run-dir=a --run_dir b", "b/logs"),
        ("train --run_dir", "runs/run_ID/logs"),
        ("train data", "runs/run_ID/logs"),
        ("python file.py --run_dir here", "runs/run_ID/logs"),
    ],
)
def test_where_logs_go(command: str, folder: str) -> None:
    assert log_dir_for(tuple(command.split()), "ID") == Path(folder)


def test_run_ids_differ_within_a_second_and_between_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ids = [new_run_id() for _ in range(5)]
    assert all(re.fullmatch(r"\d{8}_\d{6}(_\d+)?", run_id) for run_id in ids)
    (tmp_path / "runs" / f"run_{ids[-1]}").mkdir(parents=True)
    code = "from roxxel_dist.launcher.job.spec import new_run_id as n; print(n(), n(), flush=True); input()"
    others = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for other in others:  # all of them live at once: only then must their ids differ
        assert other.stdout is not None
        ids += other.stdout.readline().split()
    for other in others:
        other.communicate("\n")
    assert len(ids) == 11
    assert len(set(ids)) == 11


def test_a_run_that_is_on_the_disk_is_not_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20300101_000000")
    (tmp_path / "runs" / "run_20300101_000000").mkdir(parents=True)
    assert new_run_id() == "20300101_000000_2"


def test_a_port_that_somebody_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}.*leave --port out"):
            coordinator_port(port)
    assert coordinator_port(port) == port
    assert coordinator_port(None) > 0


def test_the_launcher_imports_nothing_heavy() -> None:
    code = (
        "import sys; from roxxel_dist.launcher import JobSpec, LocalBackend, log_dir_for, new_run_id, run;"
        "import roxxel_dist.launcher.agent.agent,"
        "roxxel_dist.launcher.host.worker, roxxel_dist.launcher.output;"
        "print(sorted({'jax', 'numpy', 'yaml', 'rich', 'flax'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_thread_pool_of_xla_follows_the_hosts_and_not_the_machine_that_launches() -> None:
    job = JobSpec(command=("true",), nprocs=4, run_id="r", log_dir=Path("logs"))
    for cores, threads in ((64, "64"), (2, "4")):  # at least the devices of the job
        places = placements(job, ["a", "b"], "a:1", {}, cores=cores)
        assert {env["PJRT_NPROC"] for place in places for env in place.ranks.values()} == {threads}
