"""Every command line that a text shows is one that the program takes, and every option that it names is there."""

import ast
import functools
import gc
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from command_lines import OPTION, SPAN, command_lines, complaint, is_option, listed_commands, problem
from reader import ROOT
from tables import one_test

from roxxel_dist import Roxxel
from roxxel_dist.checkpoint.metadata import ResumeSpec
from roxxel_dist.corpus.build import build
from roxxel_dist.data.files.format import smallest_dtype
from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer
from roxxel_dist.settings.config import FIELD_TYPES
from roxxel_dist.utils.voice import argument, command_line

FOLDERS = ("docs", "examples", "launch", "docker", "sweeps", "configs")
TEXTS = [
    ROOT / "README.md",
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()),
]
TEXTS = [path for path in TEXTS if path.suffix not in (".png", ".svg", ".pyc")]


@one_test(
    ("words", "wrong"),
    [
        ("train --data_path x --lr 3e-4", ""),
        ("train --learning_rate 3", "--learning_rate"),
        ("tarin --lr 3", "tarin"),
        ("launch ray --hosts 2 -- train", "--address"),
        ("launch ray --address auto --hosts 2 -- train --foo 3", "--foo"),
        ("launch local --nprocs 2", "no command"),
        ("launch local --nprocs two -- true", "two"),
        ("data bild x --out y", "bild"),
        ("batch --step 3", "run directory"),
    ],
)
def test_what_is_wrong_is_found(words, wrong):
    found = complaint(words.split(), inline=False)
    assert (wrong.lower() in found.lower()) if wrong else not found, found


def wrong_lines(path):
    """What a text shows that the program does not take."""
    text = path.read_text()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {' '.join(words)}: {found}"
        for line, words, inline in command_lines(text, prose=path.suffix == ".md")
        if (found := complaint(words, inline=inline))
    ]
    if path.suffix == ".yaml":
        wrong += [
            f"{path.relative_to(ROOT)}: {words}: {found}"
            for words in listed_commands(text)
            if (found := problem(words))
        ]
    for match in SPAN.finditer(text) if path.suffix == ".md" and path.parent.name != "examples" else ():
        if (name := OPTION.match(match[1])) and not is_option(name[0]):
            wrong.append(f"{path.relative_to(ROOT)}: `{match[1]}`: no command has this option")
    return wrong


def test_command_lines():
    wrong = [one for path in TEXTS for one in wrong_lines(path)]
    assert not wrong, "\n".join(wrong)


PACKAGE = ROOT / "roxxel_dist"
COMMAND_LINE = (
    "cli",
    "__main__",
    "launcher",
    "sweep",
    "estimate",
    "evaluate",
    "export",
    "report",
    "exit_codes",
)
"""Modules, and folders of them, whose messages a terminal alone sees: the others serve Python programs too."""


KINDS = (ast.AnnAssign, ast.Call, ast.ClassDef, ast.Constant, ast.Expr, ast.FunctionDef, ast.JoinedStr)


@functools.cache
def parsed(path):
    """The nodes of a module, of the kinds that are asked for here."""
    gc.disable()  # there is no garbage in a tree: to look for it takes half as long as to make it
    try:
        tree = ast.parse(path.read_text())
    finally:
        gc.enable()
    return [node for node in ast.walk(tree) if isinstance(node, KINDS)]


@pytest.fixture(scope="module", autouse=True)
def no_trees_stay():
    """They are a million objects, through which each collection of garbage of this process would go."""
    yield
    parsed.cache_clear()


@functools.cache
def messages(path):
    """(line, text) of every sentence in a module that is no docstring; what is put in is a 1."""
    nodes, found = parsed(path), []
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    docs |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "1" for p in node.values)
            found.append((node.lineno, text))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append((node.lineno, node.value))
    return found


@functools.cache
def helps(path):
    """(line, text) of the docstrings of what a command takes: `--help` shows them."""
    shown = (node for node in parsed(path) if isinstance(node, ast.ClassDef))
    shown = (node for node in shown if node.name.endswith(("Args", "Options", "Config")))
    return [(one.lineno, one.value.value) for node in shown for one in ast.walk(node) if is_text(one)]


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def wrong_messages(path):
    """What the messages of a module name that is not there."""
    at_terminal = path.relative_to(PACKAGE).parts[0].removesuffix(".py").partition("_")[0] in COMMAND_LINE
    at_terminal |= path.stem in COMMAND_LINE
    wrong = []
    for line, text in [*messages(path), *helps(path)]:
        if " " not in text:
            continue
        found = [complaint(words, inline=True) for _, words, _ in command_lines(text, prose=True)]
        rest = SPAN.sub(lambda span: "" if " " in span[1] else span[1], text)
        options = OPTION.findall(rest)
        found += [f"no command has the option {name}" for name in options if not is_option(name)]
        if options and not at_terminal and (line, text) not in helps(path):
            found.append(f"{', '.join(options)} in a message that Python programs see too: write it as name=VALUE")
        wrong += [f"{path.relative_to(ROOT)}:{line}: {text}: {one}" for one in found if one]
    return wrong


def test_what_messages_name_is_there():
    wrong = [one for path in sorted(PACKAGE.rglob("*.py")) for one in wrong_messages(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("words", "python", "terminal"),
    [
        (("resume",), "resume=True", "--resume"),
        (("data_path", "PATH"), "data_path=PATH", "--data_path PATH"),
        (("vocab_size", 300), "vocab_size=300", "--vocab_size 300"),
        (("eos", False), "eos=False", "--eos False"),
    ],
)
def test_an_argument_is_named_as_its_reader_types_it(words, python, terminal):
    assert argument(*words) == python
    with command_line():
        assert argument(*words) == terminal
        with ThreadPoolExecutor() as pool, command_line():
            assert pool.submit(argument, *words).result() == terminal
        assert argument(*words) == terminal
    assert argument(*words) == python


def arguments_of(path):
    """(line, the name) of each argument that a message of a module tells to give."""
    for node in parsed(path):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "argument":
            (name, *_) = node.args
            if isinstance(name, ast.Constant):
                yield node.lineno, name.value


OF_METHODS = {"steps", "passes", "seq_len", "batch_size"}
"""Parameters of the methods of a `Roxxel`, which no command calls with what a user gives."""
BY_PROGRAMS = {"block_size", "max_shard_bytes"}
"""Parameters that no command has under this name."""


def test_the_arguments_in_messages_are_flags_and_parameters():
    found = [(path, *one) for path in PACKAGE.rglob("*.py") for one in arguments_of(path)]
    assert len(found) > 40
    for path, line, name in found:
        assert name in BY_PROGRAMS | OF_METHODS or is_option(f"--{name}"), f"{path}:{line}: no command has --{name}"


SPELLED = re.compile(r"(?<![\w.$(=-])([a-z_]+)=(?:True|[A-Z]{2,}|1\b)(?![^()]*\)\.)")
"""A keyword in a message beside code: one that `argument` would write for its reader."""


def test_no_message_spells_an_argument_for_one_kind_of_reader():
    """But for what Python alone has, and for settings of other programs."""
    flags = {name for name in FIELD_TYPES if is_option(f"--{name}")} | {"resume", "amend", "fork", "overwrite"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}: write it with `argument`"
        for path in PACKAGE.rglob("*.py")
        for line, text in messages(path)
        if " " in text
        for name in SPELLED.findall(text)
        if name in flags - OF_METHODS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_code_in_a_message_stays_code(is_terminal, tmp_path):
    """What is damaged is replaced by a command or by a program: each is written as it is."""
    (tmp_path / "a.rox").write_bytes(b"x" * 5000)
    with command_line() if is_terminal else nullcontext(), pytest.raises(ValueError, match="ROXXEL03") as error:
        Roxxel(tmp_path / "a.rox")
    assert "Roxxel(PATH, overwrite=True).write(DOCUMENTS)" in str(error.value)
    assert "`roxxel-dist data build TEXT --out DIR --overwrite`" in str(error.value)


@one_test(
    ("call", "python", "terminal"),
    [
        (lambda: smallest_dtype(0), "vocab_size=0: the", "--vocab_size 0: the"),
        (lambda: train_tokenizer("byte", [], 3), "vocab_size=3: a byte", "--vocab_size 3: a byte"),
        (lambda: ResumeSpec(fork=None, skip_steps=(1, 2)), "add fork=RUN@STEP", "add --fork RUN@STEP"),
        (lambda: build("x", "y", workers=0), "workers=0: processes", "--workers 0: processes"),
        (lambda: build("x", "y", val_fraction=2), "val_fraction=2: the", "--val_fraction 2: the"),
        (lambda: build("x", "y", tokenizer="z"), "tokenizer=z: neither", "--tokenizer z: neither"),
    ],
)
def test_messages_in_both_voices(call, python, terminal):
    for said, voice in ((python, nullcontext()), (terminal, command_line())):
        with voice, pytest.raises(ValueError, match=re.escape(said)):
            call()


KEYWORD = re.compile(r"(?<![\w.$-])([a-z_]+)=(?=True|False|None|[A-Z]{2,}|1\b)")
"""A parameter as a message names it; what a message puts in is a 1."""
OTHERS = {"slots", "wrt"}
"""Words of a hostfile, and parameters of other packages."""


def test_keywords_in_messages_are_parameters():
    parameters = set(FIELD_TYPES)
    for path in PACKAGE.rglob("*.py"):
        for node in parsed(path):
            if (isinstance(node, ast.FunctionDef) and not node.name.startswith("_")) or getattr(
                node, "name", ""
            ) == "__init__":
                parameters |= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                parameters.add(node.target.id)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}: no public function has the parameter {name}"
        for path in PACKAGE.rglob("*.py")
        for line, text in messages(path)
        if " " in text
        for name in KEYWORD.findall(text)
        if name not in parameters | OTHERS
    ]
    assert not wrong, "\n".join(wrong)


NAME = re.compile(r"(?<![\w./$<{\"'-])[a-z]+(?:_[a-z0-9]+)+(?![\w/.(])")
"""A name with an underscore as a message has it: a field of a config, of a file, or a parameter."""
CALL = re.compile(r"(?<![\w$\\])(?:\w+\.)*([A-Za-z_]\w*)\((?!e?s\))[\w)=\"'…]")
ROOMS = ("cli", "curriculum", "data", "model", "objects", "sweep", "train")
OF_OTHERS = {"bad_alloc", "flatten_indices", "int", "shutdown", "_roxxel_dist", "_roxxel_dist_launched"}


def test_names_in_messages_are_there():
    """What a message tells to set, to give or to call was not removed meanwhile."""
    names, functions = set(FIELD_TYPES), set()
    for path in PACKAGE.rglob("*.py"):
        for node in parsed(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                functions.add(node.name)
            if isinstance(node, ast.FunctionDef):
                names |= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                names.add(node.value)
    paths = [*PACKAGE.glob("*.py"), *(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}: there is no {name}"
        for path in paths
        for line, text in messages(path)
        if " " in text
        for name in [*({*NAME.findall(text)} - names), *({*CALL.findall(text)} - functions)]
        if name not in OF_OTHERS
    ]
    assert not wrong, "\n".join(wrong)
