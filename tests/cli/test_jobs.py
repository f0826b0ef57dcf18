"""Jobs without a terminal: real detached launchers, and the commands that control them."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import gone, wait_for
from job_desk import LIMIT_S, Desk, words_of_all_processes

from roxxel_dist.launcher.control import jobs as stop_jobs
from roxxel_dist.launcher.control import record

NO_JOB = "roxxel-dist: no job runs; `roxxel-dist top` shows runs that `train` began\n"
WAIT = "echo up $ROXXEL_PROCESS_ID; touch up.$ROXXEL_PROCESS_ID; while :; do sleep 0.05; done"
DRAIN = "trap 'echo saving; until [ -e go ]; do sleep 0.02; done; echo saved; exit 42' TERM; " + WAIT


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Desk]:
    (folder / "tmp").mkdir()
    desk = Desk(folder, [])
    yield desk
    for job in desk.jobs():
        if job["state"] not in ("ended", "lost"):
            os.kill(job["controller"]["pid"], signal.SIGKILL)
            wait_for(lambda pid=job["controller"]["pid"]: gone(pid), LIMIT_S, "the end of a launcher")
    for process in desk.started:
        if process.poll() is None:
            process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A desk with one job, of two ranks, that runs and has a secret."""
    with opened(tmp_path_factory.mktemp("running")) as made:
        (made.folder / "env").write_text("MY_API_KEY=s3cr3t-of-a-test\n")
        made.launch(f'echo ${{#MY_API_KEY}} > length; : "$0"; {WAIT}', "--env-from", "env", nprocs=2)
        made.up(2)
        yield made


def test_a_detached_job_is_of_nobody_and_tells_no_secret(running: Desk) -> None:
    desk, job = running, running.job()
    pid, run = job["controller"]["pid"], job["run_id"]
    assert (job["state"], job["nprocs"], job["attempt"]) == ("running", 2, 0)
    assert job["controller"]["host"] == socket.gethostname()
    assert (desk.folder / "length").read_text() == "16\n", "the ranks have the variable"
    words = words_of_all_processes()
    assert "s3cr3t-of-a-test" not in words
    for path in (*desk.folder.glob("runs/**/*.json"), *desk.folder.glob("runs/**/*.log")):
        assert "s3cr3t-of-a-test" not in path.read_text()
    stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    assert int(stat[3]) != os.getsid(0), "a session of its own"
    assert int(stat[4]) == 0, "no terminal"
    log = str(desk.folder / "runs" / f"run_{run}" / "logs" / "launcher.log")
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)] == ["/dev/null", log, log]


def test_secret_flags_are_masked_in_the_list_and_the_logs(desk: Desk) -> None:
    words = ["--", "bash", "-c", "echo done", "--token", "s3cr3t"]
    assert desk.run("launch", "local", "--detach", *words)[0] == 0
    assert desk.over()["command"] == "bash -c 'echo done' --token '***'"
    shown = desk.run("logs", desk.job()["run_id"], "--launcher")[1]
    assert "--token '***'\n" in shown
    assert "s3cr3t" not in shown + desk.run("ps", "--all")[1]


def test_ps(desk: Desk) -> None:
    assert desk.run("ps") == (0, "", NO_JOB)
    run = desk.launch(DRAIN.replace("until [ -e go ]; do sleep 0.02; done", ":"), nprocs=2)
    desk.up(2)
    wait_for(lambda: len(desk.job()["ranks"]) == 2, LIMIT_S, "the ranks in the record")
    code, out, err = desk.run("ps")
    head, line = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["RUN", "STATE", "HOST", "RANKS", "PIDS", "ATTEMPT", "STEP", "SINCE", "COMMAND"]
    pids = ",".join(str(rank["pid"]) for rank in desk.job()["ranks"])
    assert line.split()[:7] == [run, "running", socket.gethostname(), "2", pids, "0", "-"]
    assert "bash -c 'trap" in line
    assert desk.run("stop", run[:-2])[0] == 0
    assert desk.run("ps") == (0, "", "roxxel-dist: no job runs; --all lists 1 that ended\n")
    assert f"{run}  ended 42" in desk.run("ps", "--all")[1]


def test_logs_follow_a_job_to_its_end(desk: Desk) -> None:
    run = desk.launch(
        f"{WAIT.replace('while :; do', 'until [ -e go ]; do')}; echo last of $ROXXEL_PROCESS_ID", nprocs=2
    )
    follows = desk.open("logs", run, "-f", "--rank", 1)
    assert follows.stdout is not None
    assert f"attempt 0, run {run}: bash -c" in follows.stdout.readline()
    assert follows.stdout.readline().endswith(f" {socket.gethostname()} 1 | up 1\n")
    (desk.folder / "go").touch()
    out, err = follows.communicate(timeout=LIMIT_S)
    assert (follows.returncode, out.endswith("1 | last of 1\n")) == (0, True)
    assert err.startswith(f"roxxel-dist: run {run} ended at ")
    assert err.endswith("with 0 (all went well)\n")
    code, out, again = desk.run("logs", run, "-n", 1)  # of a job that is over
    assert (code, out.endswith("0 | last of 0\n"), again) == (0, True, err)
    assert out.count("\n") == 1
    code, out, err = desk.run("logs", run, "--rank", 2)
    assert (code, out) == (2, "")
    assert "--rank 2: run " in err
    assert "has the ranks 0 to 1" in err
    code, out, err = desk.run("logs", run[:-1] + "x")
    assert (code, out) == (2, "")
    assert f"did you mean {run}?" in err
    code, out, err = desk.run("logs")
    assert (code, out) == (2, "")
    assert f"say which run:\n  {run}  ended" in err


def test_nobody_who_reads_is_nobody_to_write_to(running: Desk) -> None:
    follows = running.open("logs", running.job()["run_id"], "-f")
    assert follows.stdout is not None
    follows.stdout.readline()
    follows.stdout.close()
    assert follows.wait(LIMIT_S) == 141


def test_attach_ends_as_the_job_does(desk: Desk) -> None:
    script = f"{WAIT.replace('while :; do', 'until [ -e go ]; do')}; echo and why >&2; exit 7"
    run = desk.launch(script)
    attached = desk.open("attach", f"runs/run_{run}")
    assert attached.stdout is not None
    assert f" run {run}: bash -c" in attached.stdout.readline()
    assert attached.stdout.readline().endswith(" 0 | up 0\n")
    (desk.folder / "go").touch()
    out, err = attached.communicate(timeout=LIMIT_S)
    assert attached.returncode == 7
    assert "roxxel-dist: rank 0 failed first: exit code 7" in out
    assert out.endswith("\nand why\n")
    assert "ended at" in err
    code, out, _ = desk.run("attach", run)
    assert (code, out.endswith("\nand why\n")) == (7, True), "it is the same when it is over"


def test_ctrl_c_in_attach_leaves_the_job(running: Desk) -> None:
    run = running.job()["run_id"]
    attached = running.open("attach", run)
    assert attached.stdout is not None
    attached.stdout.readline()
    attached.stdout.readline()
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=LIMIT_S)
    assert attached.returncode == 130
    assert err == f"roxxel-dist: run {run} goes on; `roxxel-dist stop {run}` ends it\n"
    assert running.job()["state"] == "running"


def test_stop_waits_until_the_ranks_have_saved_and_asks_once(desk: Desk) -> None:
    run = desk.launch(DRAIN, nprocs=2)
    desk.up(2)
    first = desk.open("stop", run)
    wait_for(lambda: desk.job()["state"] == "stopping", LIMIT_S, "the request")
    second = desk.open("stop", run)
    assert second.stderr is not None
    assert second.stderr.readline() == f"roxxel-dist: run {run} was asked to stop before\n"
    code, _, err = desk.run("stop", run, "--timeout", 0.1)
    assert code == 1
    assert f"run {run} is stopping after 0.1 s: `roxxel-dist stop {run} --kill` ends it" in err
    (desk.folder / "go").touch()
    _, err = first.communicate(timeout=LIMIT_S)
    asked, ended = err.splitlines()
    assert asked.endswith("its ranks get 30 s to save and exit; --kill does not wait for them")
    assert ended.endswith("with 42 (stopped, every rank saved)")
    assert second.communicate(timeout=LIMIT_S)[1] == ended + "\n"
    assert (first.returncode, second.returncode, desk.job()["code"]) == (0, 0, 42)
    assert desk.run("logs", run, "-n", 1)[1].endswith("0 | saved\n")
    assert desk.run("stop", run) == (0, "", ended + "\n"), "what is over is stopped"


def test_two_requests_of_one_moment_are_one(desk: Desk) -> None:
    """A second signal would kill the ranks, and the record does not tell of the first one yet."""
    run = desk.launch(DRAIN)
    desk.up()
    os.kill(desk.pid(), signal.SIGSTOP)
    stops = [desk.open("stop", run) for _ in range(2)]
    lines = [stop.stderr.readline() for stop in stops if stop.stderr is not None]
    assert sum(line == f"roxxel-dist: run {run} was asked to stop before\n" for line in lines) == 1
    assert desk.job()["state"] == "running"
    (desk.folder / "go").touch()
    os.kill(desk.pid(), signal.SIGCONT)
    assert [stop.wait(LIMIT_S) for stop in stops] == [0, 0]
    assert desk.job()["code"] == 42


def test_a_socket_of_another_user_blocks_no_stop(desk: Desk) -> None:
    run = desk.launch("trap 'exit 42' TERM; " + WAIT)
    desk.up()
    controller = desk.job()["controller"]
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0roxxel-dist-{os.getuid()}-stop-{controller['pid']}-{controller['start']}")
        assert desk.run("stop", run)[0] == 0
    assert desk.job()["code"] == 42


def test_stop_kill_does_not_wait(desk: Desk) -> None:
    run = desk.launch(DRAIN, nprocs=2)
    desk.up(2)
    code, _, err = desk.run("stop", run, "--kill")
    assert code == 1
    assert "killing its ranks" in err
    assert err.splitlines()[-1].endswith("with 131")
    assert desk.job()["code"] == 131


def test_a_killed_launcher_is_lost_and_hangup_is_nothing_to_it(desk: Desk) -> None:
    run = desk.launch(WAIT)
    desk.up()
    os.kill(desk.pid(), signal.SIGHUP)
    attached = desk.open("attach", run)
    assert attached.stdout is not None
    attached.stdout.readline()
    assert desk.job()["state"] == "running"
    os.kill(desk.pid(), signal.SIGKILL)
    _, err = attached.communicate(timeout=LIMIT_S)
    assert attached.returncode == 1
    assert f"run {run} is lost: its launcher (pid " in err
    assert desk.run("ps")[1].splitlines()[1].split()[:2] == [run, "lost"]
    code, _, err = desk.run("stop", run)
    assert (code, "is lost" in err) == (1, True)
    assert desk.run("logs", run)[1].endswith("0 | up 0\n")


STEPS = """
import os, signal, time
from pathlib import Path
from roxxel_dist.process.progress import Progress
attempt = int(os.environ["ROXXEL_ATTEMPT"])
Progress.from_env(0).enter(12 + attempt)
if attempt == 0:
    while not Path("go").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
Path("up.0").touch()
time.sleep(1000)
"""


def test_the_list_tells_attempt_and_step(desk: Desk) -> None:
    words = ["--", "env", sys.executable, "-c", STEPS]
    assert desk.run("launch", "local", "--detach", *words)[0] == 0
    wait_for(lambda: desk.job()["step"] == 12, LIMIT_S, "the first step")
    assert desk.job()["attempt"] == 0
    (desk.folder / "go").touch()
    desk.up()
    wait_for(lambda: desk.job()["step"] == 13, LIMIT_S, "the next step")
    assert (desk.job()["attempt"], desk.job()["state"]) == (1, "running")
    assert desk.run("ps")[1].splitlines()[1].split()[5:7] == ["1", "13"]
    assert desk.run("stop", desk.job()["run_id"], "--kill")[0] == 1
    assert desk.job()["step"] == 13


def test_what_cannot_start_says_so_and_leaves_nothing(desk: Desk) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = desk.run("launch", "local", "--detach", "--port", port, "--", "bash", "-c", WAIT)
    assert (code, out) == (69, "")
    assert str(port) in err
    assert err.splitlines()[-1].startswith("roxxel-dist: not started: correct what is above")
    assert not (desk.folder / "runs").exists()
    assert desk.run("ps", "--all") == (0, "", NO_JOB)


def test_who_does_not_wait_for_the_start_wants_no_job(desk: Desk) -> None:
    """It was killed, and reads no answer."""
    assert desk.abandoned("a", "touch", "was-here") == 1
    assert "so the job does not start" in (desk.folder / "logs" / "launcher.log").read_text()
    assert desk.over()["code"] == 1
    assert not (desk.folder / "was-here").exists()


def test_a_detached_launcher_keeps_no_descriptor_of_a_wrapper(desk: Desk) -> None:
    """Such as the lock of `flock FILE roxxel-dist launch --detach …`."""
    reader, writer = os.pipe()
    words = ["launch", "local", "--detach", "--", "bash", "-c", WAIT]
    assert desk.open(*words, pass_fds=(writer,)).wait(LIMIT_S) == 0
    os.close(writer)
    assert os.read(reader, 1) == b"", "nobody has it"
    os.close(reader)
    desk.up()


def test_a_launch_that_somebody_sits_before_is_a_job_too(desk: Desk) -> None:
    launcher = desk.open("launch", "local", "--", "bash", "-c", f"trap 'exit 42' TERM; {WAIT}")
    desk.up()
    run = desk.job()["run_id"]
    code, _, err = desk.run("logs", run, "--launcher")
    assert (code, "was launched without --detach" in err) == (2, True)
    attached = desk.open("attach", run)
    assert attached.stdout is not None
    attached.stdout.readline()
    assert attached.stdout.readline().endswith("0 | up 0\n")
    assert desk.run("stop", run)[0] == 0
    attached.communicate(timeout=LIMIT_S)
    launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, attached.returncode) == (42, 42)


def test_two_runs_in_one_directory_have_their_own_lines(desk: Desk) -> None:
    """The directory means the newer one; lines of the older one stay in its logs."""
    for text in ("one", "two"):
        desk.detach(text, "bash", "-c", f"echo {text}")
        wait_for(lambda: {job["state"] for job in desk.jobs()} == {"ended"}, LIMIT_S, "the end of the job")
    assert desk.job()["run_id"] == "two"
    for option in ("--rank=0", "--launcher"):
        head, line = desk.run("logs", "two", option)[1].splitlines()
        assert "run two: bash -c 'echo two'" in head
        assert line.endswith("0 | two")
    assert desk.run("logs", ".")[1].endswith("0 | two\n")
    assert desk.run("logs", "one")[0] == 2
    assert "0 | one\n" in (desk.folder / "logs" / "rank-0.log").read_text()


TRAIN = """
import os, time
from pathlib import Path
from roxxel_dist.process.file_lock import hold_folder
Path("{run}/logs").mkdir(parents=True, exist_ok=True)
Path("{run}/config.yaml").write_text("dim: 64")
release = hold_folder(Path("{run}"), "training in")
Path("up.0").touch()
time.sleep(1000)
"""
"""A process that has the lock of a run directory, as one that trains there has."""


def test_a_run_directory_means_the_job_that_trains_there(desk: Desk) -> None:
    """A second launch is refused; the directory is moved while the first one trains."""
    script = f"print('begun'){TRAIN.format(run='runs/a')}"
    desk.detach("one", "env", sys.executable, "-uc", script, log_dir="runs/a/logs")
    desk.up()
    wait_for(lambda: desk.job()["ranks"], LIMIT_S, "the rank in the record")
    (desk.folder / "runs" / "a").rename(desk.folder / "runs" / "b")
    (desk.folder / "runs" / "link").symlink_to("b")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert desk.run("launch", "local", "--port", taken.getsockname()[1], "--", "true")[0] == 69
    for name in ("runs/b", "runs/link", str(desk.folder / "runs" / "b")):
        assert desk.run("logs", name, "-n", 1)[1].endswith(" 0 | begun\n")
    assert desk.run("stop", "runs/link", "--kill")[0] == 1
    assert {job["state"] for job in desk.jobs()} == {"ended"}


@pytest.mark.parametrize("launched_before", [False, True])
def test_a_training_that_was_not_launched_is_named_by_its_process(desk: Desk, launched_before: bool) -> None:
    if launched_before:  # in the same directory, and over
        desk.detach("one", "true")
        assert desk.over()["run_dir"] == str(desk.folder)
    else:
        desk.launch("true")
    run = "." if launched_before else "runs/b"
    script = TRAIN.format(run=run)
    trains = subprocess.Popen([sys.executable, "-c", script], cwd=desk.folder)
    try:
        desk.up()
        (desk.folder / run / "logs" / "rank-0.log").touch()
        log = Path(run, "logs", "rank-0.log")
        who = f"roxxel-dist: pid {trains.pid} trains in {Path(run)} and was not launched from here"
        assert desk.run("logs", run) == (2, "", f"{who}: its log is {log}\n")
        assert desk.run("attach", run) == (2, "", f"{who}: its log is {log}\n")
        assert desk.run("stop", run) == (2, "", f"{who}: `kill -INT {trains.pid}` makes it save and exit\n")
    finally:
        trains.kill()
        trains.wait()
    if not launched_before:
        code, _, err = desk.run("stop", run)
        assert (code, f"{run} has no record of a launch" in err) == (2, True)
        assert f"nothing trains there now: its log is {log}" in err


@pytest.mark.parametrize("command", ["stop", "attach"])
def test_without_a_job_that_runs_no_job_is_listed(desk: Desk, command: str) -> None:
    assert desk.run(command) == (2, "", "roxxel-dist: no job runs\n")
    run = desk.launch("true")
    desk.over()
    assert desk.run(command) == (2, "", "roxxel-dist: no job runs; `roxxel-dist ps --all` lists 1 that ended\n")
    code, _, err = desk.run(command, "runs/other")
    assert (code, "and no job runs; `roxxel-dist ps --all` lists 1 that ended" in err) == (2, True)
    assert run not in err


def test_a_launcher_that_still_exits_is_not_said_to_run(desk: Desk) -> None:
    """Between the end of the job and the end of its launcher."""
    run = desk.launch(DRAIN)
    desk.up()
    job = record.from_values(desk.job(), desk.job()["log_dir"])
    assert stop_jobs.progress(job) == f"run {run} is still running"
    ended = dataclasses.replace(job, state="ended", step=7)
    assert stop_jobs.progress(ended) == f"run {run} has ended, its launcher (pid {desk.pid()}) still exits"
