"""The pages that need a corpus and a run: each followed by somebody who has done the quickstart."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from commands import losses
from pages import left_out, pages_of
from reader import ROOT, Reader, blocks

from roxxel_dist import Config
from roxxel_dist.settings.config import FIELD_TYPES, SECTIONS
from roxxel_dist.sweep.space.sweep_file import read_sweep

# One worker, so that the quickstart is done once.
pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("guides"), pytest.mark.timeout(900)]
QUICKSTART = ROOT / "docs" / "quickstart.md"
PAGES = [page for page in pages_of(Path(__file__).name) if page != QUICKSTART]


def follow(page, folder):
    """Do what a page says, in a folder. Every line of its `text` blocks was printed, with whatever numbers."""
    doing = Reader(folder)
    for block in blocks(page):
        if not left_out(block.note):
            doing.follow(block)
    said = {plain(line) for words in doing.said for line in words.splitlines()}
    for block in blocks(page):
        missing = [line for line in block.text.splitlines() if plain(line) not in said]
        assert block.language != "text" or not missing, f"{block.where}: nobody printed {missing}"
    return doing


def plain(line):
    """A line without its numbers and spaces, which depend on the text and on the version of Python."""
    return " ".join(re.sub(r"[\d.,%]+", " ", line).split())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Somebody who has done the quickstart."""
    return follow(QUICKSTART, tmp_path_factory.mktemp("quickstart"))


def test_the_quickstart(done):
    runs = {run.name: losses(run) for run in (done.folder / "runs").iterdir()}
    assert max(runs["first"]) == 50
    assert max(runs["two"]) == 10
    assert runs["first"][50][1] < runs["first"][1][1] - 0.5  # it learns
    assert runs["two"][10] == pytest.approx(runs["first"][10], abs=1e-4)  # the same rows on two processes
    assert "resuming after step 20" in "\n".join(done.said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_followed(page, done, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(done.folder, folder, symlinks=True)
    doing = follow(page, folder)
    for name, values in doing.files.items():
        if set(values) <= {*FIELD_TYPES, *SECTIONS}:
            Config.from_dict(values, name).validate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_sweeps_are_such(page, tmp_path):
    definition = tmp_path / "plain.yaml"
    for block in blocks(page):
        values = yaml.safe_load(block.text) if block.language == "yaml" else {}
        if "parameters" in values:
            definition.write_text(block.text)
            read_sweep(definition)
        if "derived" in values:  # beside the file that the page has shown before
            (tmp_path / "extras.yaml").write_text(block.text)
            read_sweep(definition, tmp_path / "extras.yaml")
