"""docs/howto/kubernetes.md and tpu.md: what their commands print; containers.md: what it names."""

import re
import shlex

import pytest
import yaml
from howto import HOWTO, ROOT, Follower
from reader import blocks

pytestmark = pytest.mark.docs


@pytest.fixture
def reader(tmp_path):
    return Follower(tmp_path / "work", XDG_STATE_HOME=str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("page", "section", "file"), [("kubernetes.md", "Print the manifest", "jobset"), ("tpu.md", "GKE", "jobset_tpu")]
)
def test_a_page_prints_the_manifest_of_launch(page, section, file, reader):
    reader.page(page, section)
    assert (reader.folder / f"{file}.yaml").read_text() == (ROOT / "launch" / f"{file}.yaml").read_text()


def test_a_member_is_started_by_hand(reader):
    reader.page("kubernetes.md", "A member")


@pytest.mark.parametrize("page", ["kubernetes.md", "tpu.md"])
def test_what_is_not_run_names_what_there_is(page):
    for block in blocks(HOWTO / page):
        if block.language == "bash" and block.note:
            assert block.note.startswith("not run: no "), block.where


def test_what_the_containers_page_builds_and_starts_is_there():
    found = [block for block in blocks(HOWTO / "containers.md") if block.language == "bash"]
    assert all(block.note.startswith(("run by docker/check", "not run: ")) for block in found)
    text = "\n".join(block.text for block in found)
    assert set(re.findall(r"docker/[\w.]+", text)) == {"docker/Dockerfile", "docker/compose.yaml"}
    assert f"ARG {re.search(r'--build-arg (EXTRAS)=', text)[1]}" in (ROOT / "docker" / "Dockerfile").read_text()
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert re.search(r"--exit-code-from (\w+)", text)[1] in services
    checked = (ROOT / "docker" / "check").read_text()
    (wheels,) = (line for line in text.splitlines() if line.startswith("pip wheel"))
    assert all(word in checked for word in shlex.split(wheels, comments=True) if word.startswith("--"))
