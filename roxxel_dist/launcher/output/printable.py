"""Text of programs, hosts and people, as a terminal may get it: nothing in it can command the terminal."""

import re

COLOUR = r"\x1b\[[0-9;:]*m"
COMMANDS = re.compile(
    # Control characters but for tab and line end, marks that reorder a line, invisible ones, parts of no character.
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
COLOUR_OR_COMMAND = re.compile(f"({COLOUR})|{COMMANDS.pattern}")


def printable(text: str, *, colours: bool = False) -> str:
    """A text in which what could command a terminal is escaped as Python writes it, but for line ends and tabs.

    With `colours`, sequences that only set colours and weights (`ESC[…m`) stay; a text that has one ends plain.
    """
    if not colours:
        return COMMANDS.sub(lambda match: _escaped(match[0]), text)
    shown, count = COLOUR_OR_COMMAND.subn(lambda match: match[1] or _escaped(match[0]), text)
    return f"{shown}\x1b[0m" if count and re.search(COLOUR, shown) and not shown.endswith("\x1b[0m") else shown


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
