"""The site is built without a warning, what it says of the program is what the program says, and no block is unread."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import reference
import yaml
from browser import CHROMIUM, Browser
from pages import RUN_BY, left_out
from reader import ROOT, blocks
from tables import one_test

import roxxel_dist
from roxxel_dist import lora, sharding
from roxxel_dist.cli import COMMANDS
from roxxel_dist.launcher import backends
from roxxel_dist.launcher.job.spec import SCALE_ENV
from roxxel_dist.settings.config import FIELD_TYPES

pytestmark = pytest.mark.xdist_group("docs")  # one build of the site
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "roxxel_dist").rglob("*.py"))
AXE = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], "resultTypes": ["violations"]}
STILL = "<style>* { transition: none !important }</style>"
"""So that no colour is on its way from one scheme to the other."""
LANGUAGES = {"bash", "python", "yaml", "text", "json", "mermaid"}
COMMAND_LINE = re.compile(r"^\s*(?:\$ )?(?:roxxel-dist|python3?|pip|make) ", re.MULTILINE)
PREFIXES = (
    "ROXXEL", "CUDA", "JAX", "JOB", "LIBTPU", "OMP", "PJRT", "RAYON", "RAY", "SLURMD", "SLURM", "TOKENIZERS", "TPU",
    "WANDB", "XDG", "XLA",
)  # fmt: skip
WHOLE = "NETRC|TMPDIR|PATH|ENVIRONMENT|PYTHONUNBUFFERED"
VARIABLE = re.compile(rf"(?:{'|'.join(PREFIXES)})_[A-Za-z0-9_]*[A-Za-z0-9]|{WHOLE}")

GENERATED = [reference.FOLDER / name for name in reference.PAGES]

pages = [ROOT / "README.md", *sorted({*DOCS.rglob("*.md")} - {*GENERATED}), *sorted(reference.PAGES_FROM.glob("*.md"))]


class Seen(HTMLParser):
    """What a built page would have a browser fetch, and the names of its places."""

    def __init__(self, page):
        super().__init__()
        self.fetched, self.places = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        told = dict(attrs)
        self.places.add(told.get("id"))
        if tag in ("script", "img", "iframe") and told.get("src"):
            self.fetched.append(told["src"])
        if tag == "link" and told.get("rel") != "canonical" and told.get("href"):
            self.fetched.append(told["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    reference.write(folder / "docs" / "reference")
    # A warning, such as that of a broken link, is an error (--strict).
    words = [Path(sys.executable).parent / "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    env = os.environ | {"NO_COLOR": "1"}
    result = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / ".cache" / "site"


def test_the_generated_pages_are_whole(site):
    made = [site.parent.parent / "docs" / "reference" / name for name in reference.PAGES]
    assert "<!-- generated" not in "".join(page.read_text() for page in made)


@one_test("word", ["hang", "OOM", "preempt", "resume", "NaN", "early stopping", "mixture"])
def test_a_search_finds_what_people_look_for(site, word):
    found = re.compile(rf"\b{word}", re.IGNORECASE)
    items = json.loads((site / "search.json").read_text())["items"]
    titled = [item["location"] for item in items if found.search(item["title"])]
    if word in ("early stopping", "mixture"):
        assert titled or any(found.search(item["text"][:600]) for item in items)
    else:
        assert any(location.startswith("troubleshooting.html#") for location in titled), titled


def constants():
    """Every string constant of the modules that may name a variable."""
    for tree in parsed(VARIABLE):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def parsed(pattern):
    """The modules of the package in whose text the pattern is found."""
    return (ast.parse(text) for text in map(Path.read_text, SOURCES) if pattern.search(text))


def test_every_page_is_built_and_fetches_nothing_from_elsewhere(site):
    for page in {*DOCS.rglob("*.md"), *GENERATED}:
        built = site / page.relative_to(DOCS).with_suffix(".html")
        foreign = [one for one in Seen(built).fetched if re.match(r"(?:\w+:)?//", one)]
        assert not foreign, f"{built}: {foreign}"


def test_the_reference_has_every_public_name_command_and_field(site):
    places = Seen(site / "reference" / "api.html").places
    missing = [name for name in roxxel_dist.__all__ if name != "Config" and f"roxxel_dist.{name}" not in places]
    for part in (lora, sharding):  # a kind of variable of flax is described in words
        names = [name for name in part.__all__ if name != "LoRAParam"]
        missing += [f"{part.__name__}.{name}" for name in names if f"{part.__name__}.{name}" not in places]
    assert not missing
    assert {"roxxel_dist.sweep.make", "roxxel_dist.Roxxel.stream", "config"} <= places
    places = Seen(site / "reference" / "cli.html").places
    groups = {"data": ("build", "append", "info", "verify", "index"), "launch": tuple(backends.options())}
    names = [f"{name}-{sub}".strip("-") for name in COMMANDS for sub in groups.get(name, ("",))]
    assert set(names) <= places
    text = (site.parent.parent / "docs" / "reference" / "cli.md").read_text()
    assert text.count("usage: roxxel-dist ") == 1 + len(names)
    assert "--n_heads " not in text  # the fields stand on the page of the config alone
    fields = (site / "reference" / "config.html").read_text()
    assert not [name for name in FIELD_TYPES if f"<code>{name}</code>" not in fields]


def test_the_menu_has_every_page():
    def leaves(one):
        if isinstance(one, str):
            return [one]
        return [leaf for part in (one.values() if isinstance(one, dict) else one) for leaf in leaves(part)]

    menu = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(menu) == sorted(
        str(page.relative_to(DOCS)) for page in (*pages, *GENERATED) if page.is_relative_to(DOCS)
    )


def test_the_page_of_variables_names_those_of_the_source():
    page = (DOCS / "reference" / "environment.md").read_text()
    named = {one for one in re.findall(r"`([^`\s]+)`", page) if VARIABLE.fullmatch(one)}
    used = {one for one in constants() if VARIABLE.fullmatch(one)}
    assert used - named == {SCALE_ENV}, "that of tests is for nobody else"
    words = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text())}
    assert named - words == set()


def test_the_page_of_exit_codes_has_those_of_the_source():
    codes = {"0", "130", "141", "n", "128 + s"}
    for tree in parsed(re.compile("EXIT_|NO_WAY")):
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, node.value
                if (name.startswith("EXIT_") or name == "NO_WAY") and isinstance(value, ast.Constant):
                    codes |= {str(value.value)} if isinstance(value.value, int) else set()
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    told = set(re.findall(r"^\| (\w+(?: \+ s)?) \|", page, re.MULTILINE)) - {"Code", "Command"}
    assert told == codes


@pytest.mark.web
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs chromium")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:selenium")
def test_axe_finds_nothing_on_any_page_in_light_and_dark(site, tmp_path):
    from axe_core_python.selenium import Axe

    found = []
    with Browser(tmp_path) as browser:
        browser.driver.set_script_timeout(120)
        for page in sorted(DOCS.rglob("*.md")):
            browser.open((site / page.relative_to(DOCS).with_suffix(".html")).as_uri())
            browser.run("document.head.insertAdjacentHTML('beforeend', arguments[0])", STILL)
            for scheme, options in (("default", AXE), ("slate", {"runOnly": ["color-contrast"]})):
                browser.run("document.body.dataset.mdColorScheme = arguments[0]", scheme)
                violations = Axe().run(browser.driver, options=options)["violations"]
                nodes = [(one["id"], node["html"][:200]) for one in violations for node in one["nodes"][:4]]
                found += [f"{page.name}, {scheme}: {rule}: {html}" for rule, html in nodes]
        assert browser.outside() == []
    assert not found, "\n".join(found)


def test_every_picture_has_a_text_for_who_does_not_see_it():
    for page in pages:
        pictures = re.findall(r"!\[([^\]]*)\]\(|<img [^>]*alt=\"([^\"]*)\"", page.read_text())
        assert all(len(f"{one}{other}".split()) > 3 for one, other in pictures), page
        assert len(pictures) == len(re.findall(r"!\[|<img ", page.read_text())), page


@one_test("page", pages)
def test_every_block_is_of_a_language_and_read_by_a_test(page):
    name, outside = str(page.relative_to(ROOT)), page.read_text()
    for block in blocks(page):
        outside = outside.replace(block.text, "")
        assert block.language in LANGUAGES, f"{block.where}: {block.language!r} is none of {sorted(LANGUAGES)}"
        if block.language == "text":
            assert not COMMAND_LINE.search(block.text), f"{block.where}: a command in a block of what is printed"
        if block.language not in ("bash", "python", "yaml"):
            continue
        elsewhere = re.fullmatch(r"run by (tests/\S+\.py)", block.note)
        if elsewhere:
            assert (ROOT / elsewhere[1]).is_file(), f"{block.where}: there is no {elsewhere[1]}"
        elif not left_out(block.note):
            assert name in RUN_BY, f"{block.where}: no module of tests follows this page (tests/support/pages.py)"
    # No test would run a command that is only indented.
    assert not re.search(r"^ {4,}(?:roxxel-dist|python3?|import|from \w+ import) ", outside, re.MULTILINE), name


@one_test("module", sorted(set(RUN_BY.values())))
def test_the_modules_that_follow_pages_follow_them(module):
    source = Path(__file__).with_name(module).read_text()
    for page in (page for page, one in RUN_BY.items() if one == module):
        assert "pages_of(" in source or Path(page).name in source, f"tests/{module} does not follow {page}"
