"""Two ranks on two hosts, which are two folders here: one is lost with its memory, and its neighbour has the rest."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import environment, rows
from corpora import write_corpus

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parent / "memory_hosts.py"
TIMES = {"ms_per_step", "tokens_per_s", "ram_gb"}


@pytest.fixture
def hosts():
    """The folders of two hosts, with the job's key."""
    folders = [Path(tempfile.mkdtemp(prefix="test-memory-", dir="/dev/shm")) for _ in range(2)]
    for folder in folders:
        (folder / "key").write_text("5a" * 32)
    yield folders
    for folder in folders:
        shutil.rmtree(folder)


def train(work, hosts, kill_at=0, reached=0):
    """The codes of two ranks, and what rank 0 said; after a kill the other rank is killed too, as its agent does."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {
        "ROXXEL_COORDINATOR": f"127.0.0.1:{port}", "ROXXEL_NUM_PROCESSES": "2", "ROXXEL_LOCAL_DEVICES": "2",
        "ROXXEL_STATUS": "1", "PJRT_NPROC": "8",
    }  # fmt: skip
    common |= {"ROXXEL_REACHED_STEP": str(reached)} if reached else {}
    ranks = []
    for rank in range(2):
        memory = {"ROXXEL_MEMORY": str(hosts[rank])} if hosts else {}
        with (work / f"rank-{rank}.txt").open("w") as log:
            env = environment(**common, **memory, ROXXEL_PROCESS_ID=str(rank))
            words = [sys.executable, "-u", SCRIPT, work, kill_at]
            ranks.append(subprocess.Popen([*map(str, words)], env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [ranks[1].wait(300)]
        if kill_at:
            ranks[0].kill()
        codes.insert(0, ranks[0].wait(300))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return codes, (work / "rank-0.txt").read_text()


def result(work):
    found = {step: {k: v for k, v in row.items() if k not in TIMES} for step, row in rows(work / "run").items()}
    return found, json.loads((work / "end.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    work = tmp_path_factory.mktemp("whole")
    write_corpus(work)
    codes, said = train(work, [])
    assert codes == [0, 0], said
    return result(work)


@pytest.fixture
def killed(tmp_path, hosts):
    """A run whose rank 1 was killed after step 13: copies are of step 12, the checkpoint of step 1."""
    write_corpus(tmp_path)
    codes, said = train(tmp_path, hosts, kill_at=13)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL], said
    return tmp_path


def resumed(said):
    """(step, the rest of the line) from which a run went on."""
    return re.search(r"resuming after step (\d+) of 24, from (.*)", said).groups()


def test_a_lost_host_comes_back_from_its_neighbour(killed, hosts, whole):
    assert sorted(path.name for path in hosts[0].iterdir()) == ["0-0.own", "0-1.copy", "1-0.own", "1-1.copy", "key"]
    for path in hosts[1].glob("[01]-*"):  # a spare host
        path.unlink()
    codes, said = train(killed, hosts, reached=13)
    assert codes == [0, 0], said
    step, rest = resumed(said)
    assert int(step) in (10, 12)
    assert rest.startswith(
        f"the copy in shared memory, partly from the copy on another host; {13 - int(step)} steps are done again"
    )
    assert result(killed) == whole


def test_a_damaged_copy_is_passed_over_by_all_ranks_together(killed, hosts, whole):
    from roxxel_dist.checkpoint.blocks import read_header

    older = min(header.step for path in hosts[1].glob("*.own") if (header := read_header(path)))
    newest = max(hosts[1].glob("*.own"), key=lambda path: header.step if (header := read_header(path)) else 0)
    header = read_header(newest)
    for path in (newest, hosts[0] / f"{newest.name[0]}-1.copy"):
        with path.open("r+b") as file:
            file.seek(header.blocks[min(header.blocks)][0])
            file.write(b"\x11\x22")
    codes, said = train(killed, hosts)
    assert codes == [0, 0], said
    assert said.count(f"the generation of step {header.step} in shared memory is damaged") == 2
    assert resumed(said) == (str(older), "the copy in shared memory")
    assert result(killed) == whole


def test_a_wrong_key_costs_the_copy_and_not_the_training(tmp_path, hosts, whole):
    write_corpus(tmp_path)
    (hosts[1] / "key").write_text("00" * 32)
    codes, said = train(tmp_path, hosts)
    assert codes == [0, 0], said
    assert said.count("the neighbour of rank 1, does not keep its copy") == 1
    refused = "a connection from 127.0.0.1 for copies in memory was refused: it does not know the key of this job"
    assert said.count(refused) == 1
    assert (tmp_path / "rank-1.txt").read_text().count(refused) == 1
    assert not list(hosts[0].glob("*.copy"))
    assert result(tmp_path) == whole


def test_without_copies_a_lost_host_goes_back_to_the_disk(killed, hosts, whole):
    for folder in hosts:
        for path in folder.glob("*-1.*"):
            path.unlink()
    codes, said = train(killed, hosts)
    assert codes == [0, 0], said
    assert resumed(said) == ("1", "its checkpoint")
    assert result(killed) == whole
    assert os.listdir(hosts[0])
