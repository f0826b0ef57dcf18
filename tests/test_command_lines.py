"""Every command line that a text shows is one that the program takes, and every option that it names is there."""

import pytest
from command_lines import OPTION, SPAN, command_lines, complaint, is_option, listed_commands, problem
from reader import ROOT

FOLDERS = ("docs", "examples", "launch", "docker", "sweeps", "configs")
TEXTS = [
    ROOT / "README.md",
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()),
]
TEXTS = [path for path in TEXTS if path.suffix not in (".png", ".svg", ".pyc")]


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_command_lines(path):
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
    assert not wrong, "\n".join(wrong)
