"""CITATION.cff, the issue templates, the reference and links between pages: what hosting sites show of a clone."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import reference
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


def test_each_decision_stands_once_in_the_readme_of_a_room_whose_code_names_it():
    named: dict[str, set[str]] = {}
    for path in (ROOT / "roxxel_dist").rglob("*.py"):
        for number in re.findall(r"[Dd]ecision (\d+)", path.read_text()):
            named.setdefault(number, set()).add(path.relative_to(ROOT / "roxxel_dist").parts[0])
    rooms: list[tuple[str, str]] = []
    for readme in (ROOT / "roxxel_dist").glob("*/README.md"):
        _, found, decisions = readme.read_text().partition("\n## Decisions\n")
        assert bool(found) == bool(re.search(r"^### \d+\. ", readme.read_text(), re.MULTILINE)), readme
        rooms += [(number, readme.parent.name) for number in re.findall(r"^### (\d+)\. ", decisions, re.MULTILINE)]
    assert len(dict(rooms)) == len(rooms), "a number stands for one decision"
    assert named.items() <= {number: {room} for number, room in rooms}.items()


def test_the_mistakes_of_the_mutants_can_be_made():
    for mutant in json.loads((ROOT / "tests" / "support" / "mutants.json").read_text()):
        assert (ROOT / mutant["file"]).read_text().count(mutant["old"]) == 1, mutant
        assert mutant["old"] != mutant["new"]
        assert all((ROOT / test.partition("::")[0]).exists() for test in mutant["tests"]), mutant["tests"]


def committed() -> set[str]:
    """The files that a clone has, by their paths in it, and their folders."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {path for path in done.stdout.splitlines() if (ROOT / path).exists()}
    return files | {str(folder) for path in files for folder in Path(path).parents}


def test_the_reference_is_what_the_program_says(tmp_path):
    """`make reference` writes it."""
    reference.write(tmp_path)
    made = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    there = {name: (reference.FOLDER / name) for name in made}
    missing = [name for name, path in there.items() if str(path.relative_to(ROOT)) not in committed()]
    assert not missing, "run `make reference`, and commit them"
    old = [name for name, path in there.items() if path.read_text() != made[name]]
    assert not old, "run `make reference`, and commit what it changes"
    assert {path.name for path in (reference.FOLDER / "schemas").iterdir()} == {Path(n).name for n in made if "/" in n}


def test_every_link_between_files_leads_to_one_of_a_clone():
    files = committed()
    pages = [path for path in files if path.endswith(".md") and not path.startswith("tests/")]
    dead = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\(<?([^)\s>]+)|(?:src|href|srcset)=\"([^\"]+)\"", re.sub(r"`[^`]*`", "", text))
        for link in filter(None, (markdown or html for markdown, html in links)):
            if re.match(r"[a-z]+:|#|//", link):
                continue
            target = (ROOT / page).parent.joinpath(link.partition("#")[0]).resolve()
            if not target.is_relative_to(ROOT) or str(target.relative_to(ROOT)) not in files:
                dead.append(f"{page}: {link}")
    assert pages
    assert not dead
