"""`launch slurm` without SLURM: the script, the words of its steps, and when a job is queued again."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.backends.slurm.backend import (
    Allocation,
    SlurmBackend,
    current_allocation,
    left_of,
    requeue,
    step_environment,
)
from roxxel_dist.launcher.backends.slurm.launch import Options, hide_secrets, script
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.control.supervisor import JobResult
from roxxel_dist.launcher.job.spec import JobSpec

ROOT = Path(__file__).parent.parent.parent
TEMPLATE = ROOT / "launch" / "train.sbatch"


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(cli: Launch, tmp_path: Path) -> Launch:
    """Run `roxxel-dist launch slurm`; no SLURM is needed to print."""
    return lambda *words: cli("launch", "slurm", *words, cwd=tmp_path, environ={"PATH": "/nowhere"})


def test_the_template_is_what_its_own_command_prints(tmp_path: Path, launch: Launch) -> None:
    text = TEMPLATE.read_text()
    (line,) = re.findall(r"^# made by: roxxel-dist launch slurm (.*)$", text, re.MULTILINE)
    printed = launch(*line.split())
    assert (printed.returncode, printed.stderr) == (0, "")
    own = printed.stdout.replace(sys.executable, "PYTHON").replace(str(tmp_path), "/shared/project")
    kept = [one for one in text.splitlines() if not re.match(r"# ", one)]
    assert [one for one in own.splitlines() if not re.match(r"# ", one)] == kept
    assert subprocess.run(["bash", "-n"], input=printed.stdout, text=True).returncode == 0


def test_no_form_of_print_gets_into_the_script(launch: Launch) -> None:
    for form in (["--print"], ["--print", "True"], ["--print=True"]):
        told = launch(*form, "--nodes", "2", "--", "true")
        assert told.returncode == 0, told.stderr
        assert told.stdout.endswith("--nodes 2 -- true\n")


def test_a_secret_in_the_command_is_refused(launch: Launch) -> None:
    for words in (["--api-key", "geheim"], ["bash", "-c", "HF_TOKEN=geheim true"]):
        told = launch("--print", "--", "python", "x.py", *words)
        assert (told.returncode, told.stdout) == (2, "")
        assert "the command holds a secret" in told.stderr
        assert "geheim" not in told.stderr
    for flag in ("--notify", "--preflight"):
        told = launch("--print", flag, "HF_TOKEN=geheim true", "--", "true")
        assert (told.returncode, told.stdout, f"{flag} holds a secret" in told.stderr) == (2, "", True)
    told = launch("--print", "--env", "TOKENIZERS_PARALLELISM=false", "--", "true")
    assert "TOKENIZERS_PARALLELISM=false" in told.stdout


def test_a_machine_without_sbatch_is_not_fit_and_nothing_is_made(tmp_path: Path, launch: Launch) -> None:
    told = launch("--nodes", "2", "--", "true")
    assert (told.returncode, told.stdout) == (69, "")
    assert "there is no `sbatch` on this machine: run this on a login node" in told.stderr
    assert not list(tmp_path.iterdir())


def test_a_job_of_another_cluster_is_known_as_one(tmp_path: Path, cli: Launch) -> None:
    """Where --clusters is given, sbatch prints the number and the name."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho '5;far'\n")
    (tmp_path / "sbatch").chmod(0o755)
    state = {"PATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    told = cli("launch", "slurm", "--slurm-clusters", "far", "--run-id", "a", "--", "true", cwd=tmp_path, environ=state)
    assert (told.returncode, told.stdout) == (0, "5\n"), told.stderr
    assert "(`squeue -j 5 -M far`, `scancel 5 -M far`)" in told.stderr
    written = json.loads((tmp_path / "runs" / "run_a" / "logs" / "launcher.json").read_text())
    assert (written["state"], written["slurm_job"], written["slurm_cluster"]) == ("queued", "5", "far")


def test_options_for_sbatch_are_taken_from_the_launchers_own() -> None:
    words = ["--nodes", "2", "--slurm-partition", "gpu", "--slurm-exclusive", "--slurm_mail_user=a@b", "--grace", "9"]
    words[4:4] = ["--slurm-comment", "a b"]
    options, own = Options.split_words([word.replace("--slurm_mail", "--slurm-mail") for word in words])
    assert options == {"partition": "gpu", "comment": "a b", "exclusive": None, "mail-user": "a@b"}
    assert own == ["--nodes", "2", "--grace", "9"]


@one_test(
    ("words", "said"),
    [
        (["--slurm-gpus-per-task", "1"], "jax#23452"),
        (["--slurm-gpus-per-task=1"], "--gpus-per-host"),
        (["--slurm-ntasks-per-node", "4"], "--procs-per-host"),
        (["--slurm-nodes", "4"], "use --nodes"),
        (["--slurm-array", "1-4"], "one job a run"),
        (["--slurm-wait"], "roxxel-dist attach"),
        (["--slurm-chdir", "/x"], "--directory"),
        (["--slurm-", "4"], "--slurm-KEY VALUE"),
        (["--slurm-time", "1", "--slurm-time=2"], "twice"),
        (["--slurm-comment", "a\n#SBATCH --uid=0"], "line end"),
    ],
)
def test_options_that_cannot_be(words: list[str], said: str, launch: Launch) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Options.split_words(words)
    told = launch("--nodes", "2", *words, "--", "true")
    assert (told.returncode, told.stdout) == (2, "")
    assert said in told.stderr


@one_test(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--min-hosts", "3", "--nodes", "2"], "--min-hosts 3"),
        (["--runtime", "pyxis"], "--container"),
        (["--container", "a.sif"], "--runtime"),
        (["--mount", "/data"], "--container"),
        (["--gpus-per-host", "3", "--procs-per-host", "2"], "is not a multiple"),
        (["--grace", "-1"], "--grace"),
        (["--run-id", "a/b"], "--run-id"),
        (["--directory", "/a\\b"], "backslash"),
        (["--dry-run"], "--print"),
        (["--detach"], "--detach"),
    ],
)
def test_slips_are_told_before_anything_is_submitted(words: list[str], said: str, launch: Launch) -> None:
    told = launch(*words, "--", "true")
    assert (told.returncode, told.stdout) == (2, "")
    assert said in told.stderr


def test_what_cannot_be_in_an_allocation(cli: Launch, tmp_path: Path) -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "PATH": "/nowhere"}
    for options, said in (
        (["--slurm-time", "3"], "--slurm-time is for a job that is still"),
        ([], "there is no `srun`"),
    ):
        told = cli("launch", "slurm", *options, "--", "true", cwd=tmp_path, environ=inside)
        assert (told.returncode, said in told.stderr) == (2, True), told.stderr


def lines(passed: dict[str, str | None] | None = None, **more: Any) -> list[str]:
    options = Options(nodes=3, procs_per_host=2, directory="/d", grace=30, **more)
    return script(options, passed or {}, "o", ["python", "a b", "it's"]).splitlines()


def test_what_slurm_is_asked_for() -> None:
    text = lines()
    assert text[0] == "#!/bin/bash"
    assert text[-1] == "exec python 'a b' 'it'\"'\"'s'"
    assert {"#SBATCH --nodes=3", "#SBATCH --ntasks-per-node=2", "#SBATCH --open-mode=append"} < set(text)
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:TERM@45"} < set(text)
    assert not [line for line in text if "gres" in line or "no-kill" in line]
    assert "#SBATCH --gres=gpu:8" in lines(gpus_per_host=8)
    asked = lines({"gpus-per-node": "h100:8", "comment": 'a "b"', "exclusive": None}, gpus_per_host=8)
    assert not [line for line in asked if "gres" in line]
    assert {"#SBATCH --gpus-per-node=h100:8", '#SBATCH --comment="a \\"b\\""', "#SBATCH --exclusive"} < set(asked)
    assert "#SBATCH --no-kill" in lines(min_hosts=1)
    assert "#SBATCH --no-requeue" in lines(max_requeues=0)
    assert "#SBATCH --signal=B:USR1@9" in lines({"signal": "B:USR1@9"})
    assert "#SBATCH --signal=B:TERM@45" not in lines({"signal": "B:USR1@9"})


def test_secrets_are_handed_on_and_not_written_down(launch: Launch) -> None:
    words = ["--env", "WANDB_API_KEY=sekrit", "--env=MY_TOKEN=other", "--env", "A=b", "--env", "C"]
    assert hide_secrets(words) == (
        ["--env", "WANDB_API_KEY", "--env=MY_TOKEN", "--env", "A=b", "--env", "C"],
        {"WANDB_API_KEY": "sekrit", "MY_TOKEN": "other"},
    )
    printed = launch("--print", "--env", "WANDB_API_KEY=sekrit", "--", "true")
    assert "sekrit" not in printed.stdout
    assert "export WANDB_API_KEY" in printed.stdout


def words_of(**more: Any) -> list[str]:
    return SlurmBackend("7", ["n1", "n2"], python="py", directory="/work", **more).argv("n2", "agent", "10")


def test_the_words_of_a_step() -> None:
    plain = words_of()
    assert plain[:3] == ["srun", "--jobid=7", "--nodelist=n2"]
    assert plain[-6:] == ["py", "-u", "-P", "-m", "agent", "10"]
    assert {"--overlap", "--ntasks=1", "--cpu-bind=none", "--chdir=/work"} < set(plain)
    assert "--cpu-bind=none" not in words_of(binds=False)
    assert not [word for word in plain if "gpus-per-task" in word or "container" in word]


def test_the_words_of_a_step_in_a_container() -> None:
    pyxis = words_of(container="image+x", runtime="pyxis", mounts=["/data", "/a:/b"])
    assert "--container-mounts=/work:/work,/data:/data,/a:/b" in pyxis
    assert {"--container-image=image+x", "--container-workdir=/work"} < set(pyxis)
    assert pyxis[-6:] == ["py", "-u", "-P", "-m", "agent", "10"]
    told = words_of(container="a.sif", runtime="apptainer", mounts=["/data"], gpus=True)
    inside = told[told.index("apptainer") :]
    assert inside[:-6] == ["apptainer", "exec", "--nv", "--pwd=/work", "--bind=/work", "--bind=/data", "a.sif"]
    assert "--nv" not in words_of(container="a.sif", runtime="apptainer")
    assert SlurmBackend("7", ["n1"], container="a.sif", runtime="apptainer").python == "python3"


def test_a_step_gets_no_options_from_the_variables_of_its_job() -> None:
    outer = {"SLURM_NTASKS": "8", "SBATCH_X": "1", "SRUN_X": "1", "SLURM_CONF": "c", "PATH": "p"}
    assert step_environment(outer) == {"SLURM_CONF": "c", "PATH": "p"}


def test_what_slurms_variables_say() -> None:
    assert current_allocation({}) is None
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "ENVIRONMENT": "BATCH", "SLURM_RESTART_COUNT": "2"}
    told = current_allocation(batch | {"SLURMD_NODENAME": "n1"})
    assert told == Allocation(job_id="7", nodelist="n[1-2]", batch=True, restarts=2, node="n1")
    assert current_allocation(batch | {"ROXXEL_PROCESS_ID": "0"}) is None, (
        "a rank of a launch has no allocation of its own"
    )
    told = current_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"})
    assert told == Allocation(job_id="7", nodelist="n1", batch=False, restarts=0, node="")


TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


@one_test(
    ("result", "state", "before", "asked", "words"),
    [
        (JobResult(code=0), "RUNNING", 0, False, ""),
        (JobResult(code=1), "RUNNING", 0, False, ""),
        (JobResult(code=137), "RUNNING", 0, False, ""),
        (JobResult(code=42, requested=TERM), "RUNNING", 0, True, "requeue 1 of 3"),
        (JobResult(code=143, requested=TERM), "RUNNING", 2, True, "did not save in time"),
        (JobResult(code=42, requested=TERM), "RUNNING", 3, False, "--max-requeues is 3"),
        (JobResult(code=42, requested=TERM), "SIGNALING", 0, True, "requeue 1 of 3"),
        (JobResult(code=42, requested=TERM), "COMPLETING", 0, False, "SLURM decides"),
        (JobResult(code=42, requested=INT), "RUNNING", 0, False, ""),
        (JobResult(code=1, requested=TERM), "RUNNING", 0, False, ""),
        (JobResult(code=137, requested=TERM), "RUNNING", 0, True, "did not save in time"),
        (JobResult(code=42, requested=TERM, idle=True), "RUNNING", 0, True, "no time for a step"),
        (JobResult(code=69, host_lost=True), "RUNNING", 0, True, "a node is out of reach"),
        (JobResult(code=137, host_lost=True, requested=INT), "RUNNING", 0, False, ""),
        (JobResult(code=69), "RUNNING", 0, False, ""),
    ],
)
def test_when_a_job_is_queued_again(result: JobResult, state: str, before: int, asked: bool, words: str) -> None:
    inside = Allocation(job_id="7", nodelist="n1", batch=True, restarts=50, node="n1")
    told = requeue(result, inside, 3, state, before=before)
    assert told.again is asked
    assert words in told.why
    assert bool(words) == bool(told.why)


def test_requeues_are_counted_since_the_job_came_to_a_new_step(tmp_path: Path) -> None:
    """A count of its life ended a job after a hundred time limits, however far it had come."""
    job = JobSpec(command=("true",), nprocs=1, run_id="7", log_dir=tmp_path)

    def start(step: int, seconds: float = 0.0, *, counts: bool = True, slurm_job: str = "7") -> int:
        """Requeues in a row before the end of a start that came to a step."""
        with JobRecorder(job, LocalBackend(), slurm_job=slurm_job) as recorder:
            recorder.entry = replace(recorder.entry, begun=0.0)  # the clock of this machine was set meanwhile
            recorder._began -= seconds
            recorder.update(state="running", step=step)
            before = recorder.requeues(counts=counts)
            recorder.update(requeues=before + 1)
            recorder.queue_again(42)
        return before

    assert [start(step) for step in (10, 20, 20, 15, 0, 20, 21, 0)] == [0, 0, 1, 2, 3, 4, 0, 1]
    assert [start(0, 3700.0), start(0, 3700.0, counts=False), start(0, counts=False)] == [2, 0, 1]
    assert start(0, slurm_job="8") == 0, "another job in the same run directory"


def test_slurms_own_requeue_is_said_to_be_one() -> None:
    inside = Allocation(job_id="7", nodelist="n1", batch=True, restarts=0, node="n1")
    told = requeue(JobResult(code=42, requested=TERM), inside, 3, "COMPLETING", before=0, in_queue=True)
    assert (told.again, told.why) == (False, "SLURM asked it to end, and has queued job 7 again")


def test_an_interactive_job_is_never_queued_again() -> None:
    inside = Allocation(job_id="7", nodelist="n1", batch=False, restarts=0, node="")
    assert not requeue(JobResult(code=42, requested=TERM), inside, 3, "RUNNING", before=0).again


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ("EndTime=2026-11-28T08:56:27 PreemptEligibleTime=2026-11-28T08:56:04 PreemptTime=2026-11-28T08:56:07", 17.0),
        ("EndTime=2027-11-28T08:56:04 PreemptEligibleTime=2026-11-28T08:56:04 PreemptTime=None", None),
        ("EndTime=2026-11-28T08:56:00 PreemptTime=2026-11-28T08:55:00", 0.0),
        ("EndTime=Unknown PreemptTime=2026-11-28T08:55:00", None),
        ("", None),  # slurmctld does not answer
    ],
)
def test_the_time_that_a_preemption_leaves(told: str, left: float | None) -> None:
    assert left_of(told, datetime(2026, 11, 28, 8, 56, 10)) == left
