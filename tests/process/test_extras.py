"""The command that installs an optional part: in messages and on the pages it works before there is a release."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from roxxel_dist.process.exit_codes import pip_install

ROOT = Path(__file__).parents[2]
FILES = [
    *(ROOT / "roxxel_dist").rglob("*.py"),
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference"),
    *(ROOT / "examples").rglob("*.md"),
]


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": "file://{clone}", "dir_info": {"editable": True}}, "pip install -e '{clone}[plot]'"),
        ({"url": "file://{clone}", "dir_info": {}}, "pip install '{clone}[plot]'"),
        ({"url": "file://{clone}%20b", "dir_info": {}}, "pip install '{clone} b[plot]'"),
        ({"url": "file://{clone}/gone", "dir_info": {}}, "pip install '.[plot]' in a clone of the repository"),
        ({"url": "https://host/x.whl", "archive_info": {}}, "pip install '.[plot]' in a clone of the repository"),
        ([], "pip install '.[plot]' in a clone of the repository"),
        (None, "pip install '.[plot]' in a clone of the repository"),
    ],
)
def test_the_command_names_where_the_package_came_from(tmp_path, monkeypatch, source, command):
    clone = tmp_path / "clone"
    for folder in (clone, tmp_path / "clone b"):
        folder.mkdir()
        (folder / "pyproject.toml").touch()
    info = tmp_path / "site" / "roxxel_dist-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: roxxel-dist\nVersion: 9\n")
    if source is not None:
        (info / "direct_url.json").write_text(json.dumps(source).replace("{clone}", str(clone)))
    monkeypatch.syspath_prepend(info.parent)
    assert pip_install("plot") == command.replace("{clone}", str(clone))


def test_no_page_and_no_message_installs_from_a_registry_that_has_no_such_package():
    wrong = re.compile(r"pip3? install[^\n`]*['\" ]roxxel[-_]dist\b(?!/)")
    assert [path for path in FILES if wrong.search(path.read_text())] == []


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    named = {
        name
        for path in FILES
        for group in re.findall(r"pip_install\(['\"]([\w-]+)|pip install [^\n`]*\.\[([\w,-]+)\]", path.read_text())
        for name in ",".join(group).strip(",").split(",")
    }
    assert {"plot", "cloud", "ray", "tensorboard"} <= named <= extras
