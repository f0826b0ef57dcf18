"""CITATION.cff and the issue templates: what hosting sites read of the project."""

import json
import re
import tomllib

import yaml
from reader import ROOT

TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license"} <= cited.keys()
    assert "version" not in cited  # it is that of the git tag


def test_vendored_files_name_their_source_and_have_their_license():
    """Each minified file begins with its address and version; its license lies beside it, and goes into the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    vendored = [path for path in (ROOT / "roxxel_dist").rglob("*") if ".min." in path.name]
    assert vendored
    for path in vendored:
        license = path.with_name(f"{path.name.split('.')[0]}.LICENSE")
        if path.suffix == ".js":
            assert re.match(r"/\*! https://\S+ \(v[\d.]+\) \*/", path.read_text()), path
        assert re.search(r"MIT License|BSD|Apache License", license.read_text()), path
        assert str(license.relative_to(ROOT)) in listed, path


def test_only_the_job_that_publishes_may_and_it_runs_nothing_of_the_repository():
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        for job in workflow["jobs"].values():
            rights = set(job.get("permissions", ()))
            assert rights <= {"id-token", "pages"}, path
            assert not rights or not any(
                "run" in step or "checkout" in step.get("uses", "") for step in job["steps"]
            ), path


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
