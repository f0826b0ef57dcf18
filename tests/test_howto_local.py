"""docs/howto/local.md and launching.md: every block, in a reader's folder."""

import re

import pytest
from commands import rows
from howto import STEPS, Follower

pytestmark = pytest.mark.docs


@pytest.fixture
def reader(tmp_path):
    return Follower(tmp_path / "work", XDG_STATE_HOME=str(tmp_path / "state"))


@pytest.mark.timeout(600)
def test_several_processes_of_one_machine(reader):
    reader.page("local.md")
    runs = reader.folder / "runs"
    assert set(rows(runs / "mine")) == set(rows(runs / "night")) == STEPS
    ended = re.findall(r"ended (\d+)", reader.run(["roxxel-dist", "ps", "--all"]))
    assert ended == ["0", "0", "0"], "of each directory its last launch"
    assert "resuming after step" in (runs / "night" / "logs" / "rank-0.log").read_text()


def test_what_all_launches_share(reader):
    (reader.folder / "my_program.py").write_text("")
    reader.page("launching.md")
    said = "\n".join(reader.said)
    assert "I am 0 of 2" in said
    assert "three steps" in said
    assert "secret" not in said.replace("--secret", "")
    assert re.search(r"counts +ended 0", said)
