"""docs/troubleshooting.md: its messages are those of the sources, and a dozen of them are provoked."""

import ast
import re

import pytest
from commands import run
from hosts import ROOT
from howto import prepare

from roxxel_dist.cli import main
from roxxel_dist.utils.voice import argument, command_line

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGE = re.compile(r"^\| (`+)(.*?)\1 \|", re.MULTILINE)
ALL = [found[2] for found in MESSAGE.finditer(PAGE)]
THEIRS = {"RESOURCE_EXHAUSTED: Out of memory", "Host key verification failed.", "Permission denied (publickey)."}
"""Messages of other programs."""
OURS = [message for message in ALL if message not in THEIRS]
VARIES = "…"
PHASE = "[{{steps: 5, batch_size: {}, seq_len: {}}}]"
TRAIN = ("train", "--config", "run.yaml", "--data_path", "my_data", "--run_dir", "new")


def parts(message: str) -> list[str]:
    """The fixed parts of a message that say something."""
    found = (part.strip(" '\"`.,:;()[]") for part in message.split(VARIES))
    return [part for part in found if len(part) > 1]


def shown(part: ast.expr) -> str:
    """A part of a message as a terminal shows it; … where a value is put in."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    call = part.value if isinstance(part, ast.FormattedValue) else None
    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "argument":
        with command_line():
            return argument(*(one.value if isinstance(one, ast.Constant) else VARIES for one in call.args))
    return VARIES


def texts(source: str) -> str:
    """All texts of a module but its docstrings, a line each; … where a value is put in."""
    told: set[int] = set()
    found = []
    for node in ast.walk(ast.parse(source)):  # a statement before its expression
        if isinstance(node, ast.Expr):
            told.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(shown(one) for one in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            found.append(node.value)
    return "\n".join(found)


def holds(text: str, part: str) -> bool:
    """Whether a part of a message is in a module's texts, or is put together from two of them."""
    words = part.split(" ")
    cuts = ((" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words)))
    return part in text or any(left in text and right in text for left, right in cuts)


def beside(path):
    """The modules of the same room of the package that a module imports."""
    room = path.relative_to(ROOT / "roxxel_dist").parts[0]
    names = re.findall(rf"^from (roxxel_dist\.{room}\.[\w.]+) import", path.read_text(), re.MULTILINE)
    return [file for name in names if (file := (ROOT / name.replace(".", "/")).with_suffix(".py")).exists()]


@pytest.fixture(scope="module")
def sources():
    """The texts of each module with those of the modules of its room that it imports: both may make a message."""
    found = {path: texts(path.read_text()) for path in sorted((ROOT / "roxxel_dist").rglob("*.py"))}
    return ["\n".join([text, *(found[other] for other in beside(path))]) for path, text in found.items()]


def test_the_page_has_messages():
    assert len(OURS) >= 40
    assert len(set(ALL)) == len(ALL)
    rows = re.findall(r"^\| (?!Message).*$", PAGE, re.MULTILINE)
    assert len(rows) == len(ALL), "each row begins with a message"


def test_each_symptom_is_in_a_heading():
    headings = "\n".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    symptoms = ["hang", "OOM", "out of memory", "NaN", "preempt", "resume", "crash"]
    assert [one for one in symptoms if not re.search(rf"\b{one}", headings, re.IGNORECASE)] == []


def test_each_message_is_still_in_the_sources(sources):
    wrong = []
    for fixed in map(parts, OURS):
        if not any(len(part.split()) > 1 for part in fixed):
            wrong.append(f"too little of it is fixed: {fixed}")
        if not any(all(holds(text, part) for part in fixed) for text in sources):
            wrong.append(f"no module has all of {fixed}")
    assert not wrong


def test_a_renamed_message_is_noticed(sources):
    assert not any(holds(text, "kv_heads has to divide n_heads") for text in sources)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("desk")
    prepare(place / "desk")
    (place / "desk" / "old").mkdir()
    (place / "desk" / "old" / "config.yaml").write_text((place / "desk" / "run.yaml").read_text())
    (place / "desk" / "old" / "training_cursor.json").write_text('{"step": 1, "last_step": 5, "finished": false}')
    return place / "desk"


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ("n_heads x head_size", 2, [*TRAIN, "--dim", 33]),
        ("max_context + 1", 2, [*TRAIN, "--phases", PHASE.format(8, 999)]),
        ("does not fit in", 2, [*TRAIN, "--phases", PHASE.format(800000, 33)]),
        ("no job trains", 2, ["save", "old"]),
        ("is not a run directory", 2, ["generate", "my_data"]),
        ("there is no run", 2, ["logs", "nothing"]),
        ("failed first: exit code", 1, ["launch", "local", "--", "python", "-c", "raise KeyError"]),
        ("no restart is left", 75, ["launch", "local", "--max-restarts", 1, "--", "bash", "-c", "kill -9 $$"]),
    ],
)
def test_a_message_is_printed_as_the_page_has_it(message, code, words, folder, tmp_path, monkeypatch, capfd):
    (row,) = [one for one in ALL if message in one]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if words[0] == "launch" and code != 2:  # it takes the signals of its process
        result = run(*words, cwd=folder, XDG_STATE_HOME=str(tmp_path))
        ended, said = result.returncode, result.stdout + result.stderr
    else:
        try:
            ended = main([str(word) for word in words])
        except SystemExit as end:
            ended = end.code
        said = "".join(capfd.readouterr())
    pattern = ".*".join(re.escape(part) for part in row.split(VARIES))
    assert re.search(pattern, " ".join(said.split())), f"{row!r} is not in {said}"
    assert ended == code, said
