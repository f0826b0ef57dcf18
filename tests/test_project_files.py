"""CITATION.cff and the issue templates: what hosting sites read of the project."""

import json
import re

import yaml
from reader import ROOT

from roxxel_dist import __version__

TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license"} <= cited.keys()
    assert cited["version"] == __version__
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_templates_ask_for_the_machine():
    forms = [yaml.safe_load(path.read_text()) for path in TEMPLATES if path.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        for part in form["body"]:
            assert part["type"] in ("textarea", "input", "markdown")
            assert part["attributes"]["label"]
        assert re.search(r"`roxxel-dist doctor --json`", yaml.safe_dump(form, width=10_000))


def test_the_code_names_decisions_by_their_numbers():
    numbers = re.findall(r"^### (\d+)\. ", (ROOT / "docs" / "decisions.md").read_text(), re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    sources = (path.read_text() for path in (ROOT / "roxxel_dist").rglob("*.py"))
    named = {number for text in sources for number in re.findall(r"[Dd]ecision (\d+)", text)}
    assert named == set(numbers)


def test_the_mistakes_of_the_mutants_can_be_made():
    for mutant in json.loads((ROOT / "tests" / "mutants.json").read_text()):
        assert (ROOT / mutant["file"]).read_text().count(mutant["old"]) == 1, mutant
        assert mutant["old"] != mutant["new"]
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant["tests"]), mutant["tests"]
