"""`launch slurm` on a real SLURM of two or three nodes: what ranks get, how jobs end, and that they go on."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest
from hosts import ROOT
from slurm_desk import OVER, Desk, words_of

SHOW = """
import json, os, socket, sys
facts = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "host": socket.gethostname()}
json.dump(facts, open("facts." + os.environ["ROXXEL_PROCESS_ID"], "w"))
print("here", os.environ["ROXXEL_PROCESS_ID"])
"""
STAY = "touch up.$ROXXEL_PROCESS_ID; sleep 1000; true"
DRAIN = """
trap 'echo saved; exit 42' TERM
echo attempt $ROXXEL_ATTEMPT of $ROXXEL_NUM_PROCESSES on $(hostname)
[ $ROXXEL_ATTEMPT = 0 ] || exit 0
touch up.$ROXXEL_PROCESS_ID
while :; do sleep 0.1; done
"""


def test_what_ranks_get_and_how_a_job_is_looked_at(desk: Callable[[], Desk]) -> None:
    two = desk()
    words = ["a b", "", "q'uo\"te", "$HOME", "`id`", "line\nbreak"]
    options = [
        "--nodes",
        2,
        "--procs-per-host",
        2,
        "--env",
        "MY_TOKEN=sekrit",
        "--env",
        "A=b",
        "--slurm-comment",
        "x y",
    ]
    number = two.launch(*options, "--run-id", "first", "--", "env", sys.executable, "-c", SHOW, *words)
    script = two.slurm.run("scontrol", "write", "batch_script", number, "-").stdout
    job = two.slurm.wait(number, *OVER)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), two.log()
    facts = [json.loads((two.folder / f"facts.{rank}").read_text()) for rank in range(4)]
    assert [fact["argv"] for fact in facts] == [words] * 4
    assert [fact["host"] for fact in facts] == ["h1", "h1", "h2", "h2"]
    assert {fact["cwd"] for fact in facts} == {str(two.folder)}
    for rank, fact in enumerate(facts):
        env = fact["env"]
        assert (env["ROXXEL_PROCESS_ID"], env["ROXXEL_NUM_PROCESSES"]) == (str(rank), "4")
        assert env["ROXXEL_COORDINATOR"].startswith(two.slurm.hosts.address("h1") + ":")
        assert (env["MY_TOKEN"], env["A"], env["SLURM_JOB_ID"]) == ("sekrit", "b", number)
        assert not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_NTASKS"} & set(env)
    assert '#SBATCH --comment="x y"' in script
    assert "sekrit" not in script + two.log()
    assert "first  ended 0  h1 +1" in two.look("ps", "--all").stdout
    assert not two.left()


@pytest.mark.cluster
def test_gpus_are_dealt_out_of_those_that_slurm_gives(desk: Callable[[], Desk]) -> None:
    two = desk()
    other = two.slurm.run(
        "sbatch", "--parsable", "-N2", "--gres=gpu:1", "--wrap", "sleep 1000", cwd=two.folder
    ).stdout.strip()
    two.slurm.wait(other, "RUNNING")
    options = ["--nodes", 2, "--procs-per-host", 2, "--gpus-per-host", 2]
    number = two.launch(*options, "--", sys.executable, "-c", SHOW)
    assert two.slurm.wait(number, *OVER)["JobState"] == "COMPLETED", two.log()
    facts = [json.loads((two.folder / f"facts.{rank}").read_text()) for rank in range(4)]
    assert [fact["env"]["CUDA_VISIBLE_DEVICES"] for fact in facts] == ["1", "2", "1", "2"], "the other job has GPU 0"


@pytest.mark.cluster
def test_a_running_job_is_followed_and_stopped_from_the_login_node(desk: Callable[[], Desk]) -> None:
    two = desk()
    number = two.launch("--nodes", 2, "--run-id", "first", "--", "bash", "-c", DRAIN)
    two.up(2)
    assert two.look("ps").stdout.splitlines()[1].split()[:2] == ["first", "running"]
    assert "0 | " in two.look("logs", "first", "--rank", 0).stdout
    told = two.look("stop", "first")
    way = f"scancel --batch --signal=INT {number}"
    assert (told.returncode, f"`{way}`" in told.stderr) == (2, True), told.stderr
    assert two.slurm.run(*way.split()).returncode == 0
    job = two.slurm.wait(number, *OVER)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "42:0", "0"), (
        "who stops a job wants its end"
    )
    told = two.look("attach", "first")
    assert told.returncode == 42
    assert "0 | saved\n" in told.stdout


@pytest.mark.parametrize("victim", ["launcher", "agent", "rank"])
@pytest.mark.cluster
def test_kill_9_ends_the_job_with_the_right_code(victim: str, desk: Callable[[], Desk]) -> None:
    two = desk()
    number = two.launch("--nodes", 2, "--max-restarts", 0, "--max-requeues", 0, "--", "bash", "-c", STAY)
    two.up(2)
    where, part = {
        "launcher": ("h1", "launch slurm"),
        "agent": ("h2", "launcher.agent.agent"),
        "rank": ("h2", "bash -c touch"),
    }[victim]
    pids = [pid for pid in two.slurm.hosts.processes(where) if part in words_of(pid) and "srun" not in words_of(pid)]
    os.kill(min(pids), signal.SIGKILL)
    job = two.slurm.wait(number, *OVER)
    assert job["JobState"] == "FAILED"
    assert job["ExitCode"] == ("0:9" if victim == "launcher" else "137:0"), two.log()
    if victim == "rank":
        assert "rank 1 failed first: signal SIGKILL (host h2" in two.log()
    two.until(lambda: not two.left(), "everything to be gone")


@pytest.mark.cluster
def test_the_signal_before_the_time_limit_queues_the_job_again(desk: Callable[[], Desk]) -> None:
    two = desk()
    number = two.launch("--nodes", 2, "--run-id", "first", "--", "bash", "-c", DRAIN)
    two.up(2)
    two.slurm.run("scancel", "--batch", "--signal=TERM", number)  # what `#SBATCH --signal=B:TERM@…` has SLURM do
    attached = two.slurm.popen(
        sys.executable, "-m", "roxxel_dist", "attach", "first", cwd=two.folder, stdout=-1, stderr=-1
    )
    seen = set()
    while (job := two.slurm.job(number))["JobState"] not in OVER:
        if (job["JobState"], job["Restarts"]) == ("PENDING", "1") and "PENDING" not in seen:
            (listed,) = json.loads(two.look("ps", "--json").stdout)
            assert (listed["state"], listed["code"], listed["ranks"]) == ("queued", 42, [])
            assert "waits again in the queue of SLURM (job 1" in two.look("logs", "first").stderr
        seen.add(job["JobState"])
        time.sleep(0.05)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), two.log()
    assert "PENDING" in seen
    assert attached.communicate(timeout=60)[0].count(b"# 20") == 2, "it goes on over a requeue"
    assert attached.returncode == 0
    assert "job 1 is queued again (requeue 1 of 10)" in two.log()
    (logs,) = two.folder.glob("runs/run_first/logs")
    text = (logs / "rank-1.log").read_text()
    assert "attempt 0 of 2 on h2" in text
    assert "attempt 1 of 2 on h2" in text
    told = two.look("attach", "first")
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("# 20") == 2, "both launches"
    listed = [line.split()[:3] for line in two.look("ps", "--all").stdout.splitlines()[1:]]
    assert listed == [["first", "ended", "0"]], "a run directory has one record, of its newest launch"


PREEMPTED = (
    "trap 'touch asked; sleep 6; touch saved.$ROXXEL_PROCESS_ID; exit 42' TERM; "
    "touch up.$ROXXEL_PROCESS_ID.$ROXXEL_ATTEMPT; [ $ROXXEL_ATTEMPT = 0 ] || exit 0; while :; do sleep .2; done"
)


@pytest.mark.cluster
def test_a_preemption_with_a_grace_time_is_a_request_at_its_begin(desk: Callable[[], Desk]) -> None:
    """SLURM signals the steps then, and the launcher only when the grace time is over, some seconds before SIGKILL."""
    here = desk()
    low = ["--slurm-partition", "low", "--run-id", "low", "--grace", 2]  # less than SLURM leaves, and a save takes
    job = here.launch("--nodes", 2, *low, "--", "bash", "-c", PREEMPTED)
    here.up(2)
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    urgent = here.slurm.run(*words, "--wrap=sleep 2", cwd=here.folder).stdout.strip()
    here.until((here.folder / "asked").exists, "the request")
    here.until(lambda: len(list(here.folder.glob("saved.*"))) == 2, "both saves")
    here.slurm.wait(urgent, "COMPLETED")
    ended = here.slurm.wait(job, "COMPLETED", limit=200)
    assert ended["Restarts"] == "1", ended
    log = here.log()
    assert re.search(r"SIGTERM at h\d: the ranks get 1[0-5](\.\d)? s to save and exit", log), log
    assert "every rank saved and exited (42)" in log
    assert f"job {job} is queued again (requeue 1 of 10)" in log


@pytest.mark.cluster
def test_a_job_in_the_queue_is_listed_followed_and_stopped(desk: Callable[[], Desk]) -> None:
    here = desk()
    here.slurm.run("scontrol", "update", "nodename=h1", "state=drain", "reason=test")
    words = ["--nodes", 2, "--", "bash", "-c", "echo it runs"]
    first = here.launch("--run-id", "first", *words)
    (listed,) = json.loads(here.look("ps", "--json").stdout)
    assert (listed["run_id"], listed["state"], listed["slurm_job"]) == ("first", "queued", first)
    assert "waits in the queue of SLURM" in here.look("logs", "first").stderr
    stopped = here.look("stop", "first")
    assert (stopped.returncode, f"SLURM job {first} is cancelled" in stopped.stderr) == (0, True), stopped.stderr
    assert here.slurm.wait(first, "CANCELLED")
    second = here.launch("--run-id", "second", *words)
    here.slurm.run("scancel", second)  # by hand
    here.slurm.wait(second, "CANCELLED")
    gone = here.look("attach", "second")
    assert (gone.returncode, "never began, and SLURM job" in gone.stderr) == (1, True), gone.stderr
    third = here.launch("--run-id", "third", *words)
    attached = here.slurm.popen(
        sys.executable, "-m", "roxxel_dist", "attach", "third", cwd=here.folder, stdout=-1, stderr=-1
    )
    here.slurm.run("scontrol", "update", "nodename=h1", "state=resume")
    out, err = attached.communicate(timeout=120)
    assert attached.returncode == 0, err
    assert b"it runs" in out
    here.slurm.wait(third, "COMPLETED")


@pytest.mark.cluster
def test_a_held_requeued_and_suspended_job_is_shown_as_it_is(desk: Callable[[], Desk]) -> None:
    here = desk()
    job = here.launch("--nodes", 2, "--run-id", "first", "--", "bash", "-c", PREEMPTED)
    here.up(2)
    here.slurm.run("scontrol", "suspend", job)
    here.slurm.wait(job, "SUSPENDED")
    here.until(lambda: "SLURM suspends the job" in here.log(), "its word")
    here.slurm.run("scontrol", "resume", job)
    here.until(lambda: "SLURM resumed the job after" in here.log(), "its word")
    here.slurm.run("scontrol", "requeuehold", job)
    here.until(lambda: json.loads(here.look("ps", "--json").stdout)[0]["state"] == "queued", "the queue")
    here.until(lambda: f"`scontrol release {job}` lets it start" in here.look("logs", "first").stderr, "the reason")
    stopped = here.look("stop", "first")
    assert (stopped.returncode, f"waited to go on: SLURM job {job} is cancelled" in stopped.stderr) == (0, True)
    here.slurm.wait(job, "CANCELLED")
    assert not json.loads(here.look("ps", "--json").stdout)


@pytest.mark.cluster
def test_scancel_of_the_steps_with_a_signal_is_a_request(desk: Callable[[], Desk]) -> None:
    here = desk()
    job = here.launch("--nodes", 2, "--run-id", "steps", "--max-requeues", 0, "--", "bash", "-c", PREEMPTED)
    here.up(2)
    here.slurm.run("scancel", "--signal=TERM", job)
    here.until(lambda: len(list(here.folder.glob("saved.*"))) == 2, "both saves")
    assert here.slurm.wait(job, "FAILED")["ExitCode"] == "42:0"


@pytest.mark.cluster
def test_a_cancelled_job_does_not_come_back(desk: Callable[[], Desk]) -> None:
    two = desk()
    number = two.launch("--nodes", 2, "--", "bash", "-c", DRAIN)
    two.up(2)
    two.slurm.run("scancel", number)
    assert two.slurm.wait(number, *OVER)["JobState"] == "CANCELLED"
    assert two.slurm.job(number)["Restarts"] == "0"
    two.until(lambda: not two.left(), "everything to be gone")


@pytest.mark.cluster
def test_inside_an_allocation_it_runs_at_once(desk: Callable[[], Desk]) -> None:
    two = desk()
    command = [sys.executable, "-m", "roxxel_dist", "launch", "slurm", "--procs-per-host", 2]
    script = "echo $ROXXEL_PROCESS_ID of $ROXXEL_NUM_PROCESSES on $(hostname); exit $((ROXXEL_PROCESS_ID == 3 ? 7 : 0))"
    env = {"PYTHONPATH": str(ROOT)}
    told = two.slurm.run("salloc", "-N2", *command, "--all-ranks", "--", "bash", "-c", script, cwd=two.folder, env=env)
    assert told.returncode == 7
    assert "3 | 3 of 4 on h2\n" in told.stdout
    assert "rank 3 failed first: exit code 7 (host h2" in told.stderr
    told = two.slurm.run("salloc", "-N2", *command, "--nodes", 3, "--", "true", cwd=two.folder, env=env)
    assert (told.returncode, "has 2 nodes (h1, h2)" in told.stderr) == (2, True)
    told = two.slurm.run("salloc", "-N2", *command, "--slurm-time", 3, "--", "true", cwd=two.folder, env=env)
    assert (told.returncode, "--slurm-time" in told.stderr) == (2, True)


@pytest.mark.cluster
def test_a_spare_node_takes_the_place_of_one_that_is_down(desk: Callable[[int], Desk]) -> None:
    three = desk(3)
    number = three.launch("--nodes", 2, "--spare-hosts", 1, "--", "bash", "-c", DRAIN)
    three.up(2)
    three.slurm.run("scontrol", "update", "nodename=h2", "state=DOWN", "reason=test")
    job = three.slurm.wait(number, *OVER)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), three.log()
    assert "going on without h2, with h3 instead" in three.log()
    (log,) = three.folder.glob("runs/*/logs/rank-1.log")
    assert "attempt 1 of 2 on h3" in log.read_text()


COPIES = {
    # how the launcher is started: ranks that ran, exit code, the one message
    "batch: srun {launch}": (0, 2, "srun runs this launcher 4 times (step 1.0)"),
    "batch: srun --ntasks=2 {launch}": (0, 2, "srun runs this launcher 2 times"),
    "batch: srun --nodes=1 --ntasks=1 {launch}": (2, 0, "nothing would be saved at the time limit"),
    "batch: {launch}": (2, 0, ""),
    "batch: srun --nodes=1 --ntasks=2 sleep 3 & sleep 1; {launch}": (2, 0, ""),
    "salloc -N2 -n2 srun bash -c '[ $SLURM_PROCID = 1 ] || {submit}'": (2, 0, ""),
    "salloc -N2 -n4 srun {launch}": (0, 2, "`srun --nodes=1 --ntasks=1 roxxel-dist launch"),
    "salloc -N2 -n4 srun -N1 -n1 {launch}": (2, 0, ""),
    "salloc -N2 -n4 {launch}": (2, 0, ""),
    "srun -N2 --ntasks-per-node=2 {launch}": (0, 2, "srun runs this launcher 4 times"),
    "salloc -N2 -n2 srun {ssh}": (0, 2, "srun runs this launcher 2 times"),
    "batch: #SBATCH hetjob\n#SBATCH -N1 -n1\n{launch}": (0, 2, "job JOB is a heterogeneous job"),
}


@pytest.mark.cluster
def test_srun_in_front_of_the_launcher_starts_one_job_or_none(desk: Callable[[], Desk]) -> None:
    two = desk()
    mark = "-- bash -c 'touch ran.$RANDOM.$RANDOM'"
    ours = f"env PYTHONPATH={ROOT} {sys.executable} -m roxxel_dist launch"
    launch, ssh = f"{ours} slurm {mark}", f"{ours} ssh --hosts h1 {mark}"
    inner = two.folder / "inner.sbatch"
    inner.write_text(f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --output=inner.out\n{launch}\n")
    for number, (form, (ranks, code, said)) in enumerate(COPIES.items()):
        line = form.format(launch=launch, ssh=ssh, submit=f"sbatch {inner}")
        script, out = two.folder / f"{number}.sh", two.folder / f"{number}.out"
        asked = "#SBATCH -N2 --ntasks-per-node=2\n" if "hetjob" not in form else "#SBATCH -N1 -n1\n"
        body = line.removeprefix("batch: ")
        script.write_text(f"#!/bin/bash\n{asked if body != line else ''}{body}\n")
        if body != line:
            submitted = two.slurm.run("sbatch", "--parsable", "--output", out, script, cwd=two.folder)
            job = two.slurm.wait(submitted.stdout.strip().partition("+")[0], *OVER)
            text, ended = out.read_text(), int(job["ExitCode"].partition(":")[0])
        else:
            done = two.slurm.run("bash", script, cwd=two.folder)
            text, ended = done.stdout + done.stderr, done.returncode
        if "{submit}" in form:
            two.slurm.wait(two.slurm.run("squeue", "-h", "-o", "%i").stdout.strip(), *OVER)
        ran = list(two.folder.glob("ran.*"))
        assert len(ran) == ranks, (form, text)
        assert ended == code, (form, text)
        told = [line for line in text.splitlines() if line.startswith("roxxel-dist: ")]
        assert len(told) == bool(said), (form, text)
        assert said.replace("JOB", "") in re.sub(r"job \d+", "job ", "".join(told)), (form, text)
        for path in ran:
            path.unlink()


@pytest.mark.cluster
def test_every_form_of_a_list_of_nodes_is_read(desk: Callable[[], Desk]) -> None:
    two = desk()
    read = "import sys; from roxxel_dist.launcher.backends.slurm.backend import nodes; print(*nodes(sys.argv[1]))"
    for form, names in {
        "h1": "h1",
        "h[1-2]": "h1 h2",
        "n[01-03,7],x": "n01 n02 n03 n7 x",
        "c0[08-10],d-1": "c008 c009 c010 d-1",
        "r[1-2]n[3-4]": "r1n3 r1n4 r2n3 r2n4",
    }.items():
        told = two.slurm.run(sys.executable, "-c", read, form, env={"PYTHONPATH": str(ROOT)})
        assert told.stdout.split() == names.split(), (form, told.stderr)
    told = two.slurm.run(sys.executable, "-c", read, "a[1-2]-b", env={"PYTHONPATH": str(ROOT)})
    assert "scontrol cannot list the nodes of SLURM_JOB_NODELIST=a[1-2]-b" in told.stderr, "it says nothing, and 0"
