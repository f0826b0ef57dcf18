"""docs/howto/launching.md and exec.md: every block, in a reader's folder."""

import re

import pytest
from commands import rows
from howto import STEPS, Follower

pytestmark = pytest.mark.docs


@pytest.mark.timeout(600)
def test_several_processes_of_one_machine(tmp_path):
    reader = Follower(tmp_path / "work", XDG_STATE_HOME=str(tmp_path / "state"))
    reader.page("launching.md")
    runs, said = reader.folder / "runs", "\n".join(reader.said)
    assert set(rows(runs / "mine")) == set(rows(runs / "night")) == STEPS
    assert "resuming after step" in (runs / "night" / "logs" / "rank-0.log").read_text()
    assert "here again" in said
    assert "secret" not in said.replace("--secret", "")
    ended = re.findall(r"ended (\d+)", reader.run(["roxxel-dist", "ps", "--all"]))
    assert set(ended) == {"0"}
    assert len(ended) == 3, "of each directory its last launch"


def test_a_command_that_reaches_hosts(tmp_path):
    reader = Follower(tmp_path / "work", XDG_STATE_HOME=str(tmp_path / "state"))
    reader.page("exec.md")
    said = "\n".join(reader.said)
    assert "I am 1 on b" in said
    assert "2 hosts: 0 errors" in said
