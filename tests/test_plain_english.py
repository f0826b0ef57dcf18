"""The language of the README and of docs/: short sentences, easy words, and no riddles. In the code: no riddles."""

import ast
import io
import re
import tokenize
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from reader import FENCE, ROOT, blocks

DOCS = ROOT / "docs"
HOWTOS = sorted((DOCS / "howto").glob("*.md"))
WITH_PARTS = sorted((ROOT / "tests" / "reference_pages").glob("*.md"))
"""Pages of the reference before `reference.py` puts texts of the program in."""
GENERATED = [DOCS / "reference" / page.name for page in WITH_PARTS]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page not in GENERATED),
    *WITH_PARTS,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]
CODE = [path for folder in ("roxxel_dist", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]

LONGEST = 35
"""Words of a sentence, at most."""
LINES_OF_A_HOWTO = 80
"""At most: a goal, commands, and what can go wrong."""
EASIEST = 60
"""Flesch's reading ease of the README and of each how-to, at least. 60 is plain English, 30 a scientific paper."""
RIDDLES = re.compile(
    r"""\b(?:whom|whoever|that\ which|those\ which|nobody|nowhere|in\ vain|beforehand|thereof|hitherto|at\ hand
    |(?:is|are|was|were)\ (?:told|said)|begins?\ anew|takes?\ (?:the\ )?others\ with|all\ that\ (?:is|was|there)
    |goe?s?\ on\ from|has\ a\ say|comes?\ to\ (?:its|a|the)\ (?:next\ )?step|as\ one\ likes|of\ one's\ own
    |(?:of|than|for|by|with|as)\ what\ (?:is|was|has|had|comes|dies|follows|it|they|the))\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words that make a reader stop: rare pronouns, the narrating passive, and clauses in the place of a noun."""
NOUN_CLAUSE = re.compile(r"(?:What(?:ever)?|Who(?:ever)?)\b[^?]*[.:]?$")
"""A sentence that begins with "What dies ..." in the place of a noun."""


def paragraphs(markdown: str, tables: bool = True) -> list[str]:
    """The running text of a page: no code blocks, headings, pictures, link targets or table rules."""
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+", "\n", FENCE.sub("\n", markdown))
    text = re.sub(
        r"(`+).+?\1", "code", re.sub(r"<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.DOTALL), flags=re.DOTALL
    )
    text = re.sub(r"</?[a-z][^>]*>", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    found: list[str] = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)", text):
        if part.lstrip().startswith("|"):
            found += [cell.strip() for cell in part.split("|") if tables and re.search(r"\w", cell)]
        elif not part.lstrip().startswith("#"):
            found.append(re.sub(r"^\s*(?:[-*]|\d+\.) |[*_]{1,2}(?=\w)|(?<=[\w.])[*_]{1,2}", "", part.strip()))
    return [" ".join(one.split()) for one in found if re.search(r"[a-zA-Z]", one)]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; a colon or a semicolon ends none."""
    return [one for one in re.split(r"(?<=[.!?])[\"')]*\s+", paragraph) if one]


def words(sentence: str) -> list[str]:
    """The words of a sentence; numbers and signs are none."""
    return re.findall(r"[A-Za-z][A-Za-z'-]*", sentence)


def syllables(word: str) -> int:
    """About how many syllables an English word has: its groups of vowels, but for an `e` that is silent."""
    word = re.sub(r"[^a-z]", "", word.lower())
    silent = re.search(r"[^aeiouyl]e$|[^aeiouytd]ed$|(?:[^aeiouyscxz]|[^aeiouy]{2})es$|[aeiouy]le$", word)
    silent = silent and not re.search(r"(?:sh|ch|dg|rg|ng)es$", word)
    return max(
        1, len(re.findall(r"[aeiouy]+", word)) + bool(re.search(r"[aiou]a|io[^nu]|[^gqt]uo", word)) - bool(silent)
    )


def reading_ease(markdown: str) -> float:
    """Flesch's reading ease (1948) of the paragraphs and lists of a page; tables are no sentences."""
    said = [words(sentence) for part in paragraphs(markdown, tables=False) for sentence in sentences(part)]
    said = [sentence for sentence in said if sentence]
    spoken = [word for sentence in said for word in sentence]
    per_word = sum(map(syllables, spoken)) / len(spoken)
    return 206.835 - 1.015 * len(spoken) / len(said) - 84.6 * per_word


def complaints(page: Path) -> list[str]:
    """What is wrong with the language and the form of a page, a line each."""
    markdown, found = page.read_text(), []
    for paragraph in paragraphs(markdown):
        for sentence in sentences(paragraph):
            if (length := len(words(sentence))) > LONGEST:
                found.append(f"{length} words, at most {LONGEST}: {sentence}")
            if riddle := RIDDLES.search(sentence):
                found.append(f"{riddle[0]!r}: {sentence}")
            if NOUN_CLAUSE.fullmatch(sentence) and len(words(sentence)) > 3:
                found.append(f"a clause in the place of a noun: {sentence}")
    for block in blocks(page) if page.is_relative_to(ROOT) else ():
        if block.language == "text" and "…" in block.text:
            found.append(f"{block.where}: output that is not whole: a reader compares it with the screen")
    headings = re.findall(r"^## (.*)$", FENCE.sub("", markdown), re.MULTILINE)
    if page in HOWTOS and (headings[:1], headings[-1:]) != (["What you need"], ["What can go wrong"]):
        found.append("a how-to begins with 'What you need' and ends with 'What can go wrong'")
    if page in HOWTOS and (lines := markdown.count("\n")) > LINES_OF_A_HOWTO:
        found.append(
            f"{lines} lines, at most {LINES_OF_A_HOWTO}: theory belongs to docs/concepts, options to the reference"
        )
    if page in (*HOWTOS, ROOT / "README.md") and (ease := reading_ease(markdown)) < EASIEST:
        found.append(f"reading ease {ease:.1f}, at least {EASIEST}: shorter sentences, shorter words")
    return found


def prose(source: str) -> Iterator[tuple[int, list[str]]]:
    """The docstrings, also those of fields, and the comments of a module: (the first line, the text of its lines)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, [" ".join(line.split()) for line in node.value.value.split("\n")]
    begin, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, alone = token.start[0], token.line.lstrip().startswith("#")
            if block and not (alone and number == begin + len(block)):
                yield begin, block
                block = []
            begin, block = (begin if block else number), [*block, token.string.lstrip("# ")]
            if not alone:
                yield begin, block
                block = []
    if block:
        yield begin, block


def riddles(source: str) -> list[tuple[int, str]]:
    """(line, words) of each riddle in the docstrings and comments of a module, also of one that a line break parts."""
    if not RIDDLES.search(re.sub(r"\n[ #]*", " ", source)):  # most modules: their tokens need not be looked at
        return []
    found = []
    for begin, lines in prose(source):
        text, starts = " ".join(lines), [0, *accumulate(len(line) + 1 for line in lines)]
        for riddle in RIDDLES.finditer(text):
            around = text[max(riddle.start() - 40, 0) : riddle.end() + 40]
            found.append((begin + bisect(starts, riddle.start()) - 1, f"{riddle[0]!r}: {around}"))
    return sorted(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_plain_english(page: Path) -> None:
    found = complaints(page)
    assert not found, f"{page.relative_to(ROOT)}:\n" + "\n".join(found)


def test_docstrings_and_comments_have_no_riddles() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {words}" for path in CODE for line, words in riddles(path.read_text())]
    assert not found, "\n".join(found)


def test_riddles_of_code_are_found_where_they_are() -> None:
    source = '''"""Fine."""

x = 1  # nobody reads it
y = "nobody"
"""A field,
    and those
    which follow."""
# One line, and what is said
# by another. Made of what
# is here.
z = 2  # whoever
w = 3  # sees it
'''
    found = [(line, words.partition(":")[0]) for line, words in riddles(source)]
    assert found == [(3, "'nobody'"), (6, "'those which'"), (8, "'is said'"), (9, "'of what is'"), (11, "'whoever'")]


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("What dies is ended everywhere at once.", "in the place of a noun"),
        ("The message names the rank that the others wait for, and whom to ask.", "whom"),
        ("What a resume promises is told in another page.", "is told"),
        ("It saves " + "and saves " * 20, "42 words"),
        ("If a rank fails, the launcher restarts the job.", ""),
        ("What can go wrong?", ""),
    ],
)
def test_what_is_wrong_is_found(sentence: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# What\n\n{sentence}\n")
    found = "\n".join(complaints(tmp_path / "page.md"))
    assert (wrong in found) if wrong else not found


def test_hard_words_and_long_sentences_lower_the_reading_ease() -> None:
    easy = "The cat sat on the mat. The dog ran to the door."
    hard = "Organizational considerations necessitate comprehensive documentation of interdependencies."
    assert reading_ease(easy) > 90
    assert reading_ease(hard) < 0
    counted = {"job": 1, "make": 1, "makes": 1, "table": 2, "tables": 1, "created": 2, "launched": 1, "device": 2,
               "checkpoint": 2, "configuration": 5, "ratio": 2, "queue": 1, "changes": 2}  # fmt: skip
    assert {word: syllables(word) for word in counted} == counted
