"""Evaluation tasks: JSON-lines files of questions with choices, or of texts, as rows of tokens to be scored.

The rules are those of lm-evaluation-harness: how a context and its continuation become tokens, what is cut where they
are too long, and what the numbers are called.
"""

import glob
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.process.exit_codes import MissingFileError, UserError

LENGTH_STEP = 64
"""Rows are padded to a multiple of so many tokens, so that few programs serve all."""
RULE = 'a line is {"context": text, "choices": [texts], "answer": number of the right choice, from 0} or {"text": text}'


class ScoredRow(NamedTuple):
    """Tokens of which the last ones are predicted, each from all tokens before it."""

    tokens: list[int]
    """At most max_context + 1."""
    scored: int
    """How many of the last ones."""


class Question(NamedTuple):
    """A question, without the rows of its choices."""

    answer: int
    """The right choice, from 0."""
    lengths: tuple[int, ...]
    """The characters of each choice, without spaces at its start."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A file of questions, or of texts."""

    name: str
    """Of the file, without its ending."""
    max_context: int
    """Tokens that the model reads at most."""
    rows: tuple[ScoredRow, ...]
    """Of all questions, one for each of their choices, or of all texts."""
    questions: tuple[Question, ...]
    """Empty for texts."""
    text_bytes: int
    """Of all texts in UTF-8; 0 for questions."""
    truncated: int
    """Choices that were cut on the left, so that they fit into max_context."""
    unscored: int = 0
    """Those of them whose first tokens are not scored: the choice alone is too long."""

    @property
    def truncation(self) -> str:
        """A line about the choices that were cut; empty if there are none."""
        if not self.truncated:
            return ""
        count = f"{self.truncated:,} of {len(self.rows):,}"
        line = f"task {self.name}: {count} choices are too long for max_context, and cut on the left"
        return line + (f"; of {self.unscored:,} the choice itself is cut, and scored in part" if self.unscored else "")

    def scores(self, losses: Sequence[float]) -> dict[str, float]:
        """The numbers of the task, from the loss of each row in nats: the sum over its scored tokens.

        "acc": the share of questions whose right choice has the highest likelihood; "acc_norm": that of a likelihood
        by character of the choice, exp(log-likelihood / characters), as in lm-evaluation-harness. Of equal choices the
        first one counts. "bits_per_byte": the losses of all texts in bits, by byte.
        """
        if not self.questions:
            return {"bits_per_byte": math.fsum(losses) / (math.log(2) * self.text_bytes)}
        begin, right, right_by_length = 0, 0, 0
        for answer, lengths in self.questions:
            of_choices = np.asarray(losses[begin : begin + len(lengths)], np.float64)
            begin += len(lengths)
            right += int(of_choices.argmin()) == answer
            right_by_length += int((of_choices / lengths).argmin()) == answer
        count = len(self.questions)
        return {"acc": right / count, "acc_norm": right_by_length / count}


def read_tasks(
    patterns: Sequence[str], tokenizer: Tokenizer, max_context: int, *, field: str = "eval_tasks"
) -> tuple[Task, ...]:
    """The tasks in some files, in the order of the patterns and of the names within each.

    The patterns are paths of JSON-lines files, with * and ** if you like, from a `field` that messages name. A model
    with the tokenizer reads `max_context` tokens at most. Raises ValueError: no file, a file that has nothing or is
    named twice, or a line that breaks the rule.
    """
    paths = find_tasks(patterns, field=field)
    return tuple(_read(name, path, tokenizer, max_context) for name, path in paths.items())


def find_tasks(patterns: Sequence[str], *, field: str = "eval_tasks") -> dict[str, Path]:
    """The files of `read_tasks` by the names of their tasks; none is opened. Raises ValueError as it does."""
    paths: dict[str, Path] = {}
    for pattern in patterns:
        is_file = Path(pattern).is_file()  # whatever is in its name
        found = [Path(pattern)] if is_file else sorted(map(Path, glob.glob(pattern, recursive=True)))
        if not found:
            raise MissingFileError(
                f"{field} has {pattern!r}: there is no such file: check the path (`eval` takes others as tasks=...)"
            )
        for path in found:
            if paths.setdefault(path.stem, path) != path:
                raise UserError(
                    f"{field} has {paths[path.stem]} and {path}: a task has the name of its file, so rename one"
                )
    return paths


def _read(name: str, path: Path, tokenizer: Tokenizer, max_context: int) -> Task:
    rows: list[ScoredRow] = []
    questions: list[Question] = []
    text_bytes = truncated = unscored = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = _fields(where, line)
        try:
            if "text" in fields:
                rows += windows(tokenizer.encode(fields["text"]), tokenizer.eos_id, max_context)
                text_bytes += len(fields["text"].encode())
            else:
                pairs = [encode_pair(tokenizer, fields["context"], choice) for choice in fields["choices"]]
                cut = [row_of(context, continuation, max_context) for context, continuation in pairs]
                truncated += sum(len(row.tokens) < len(a) + len(b) for row, (a, b) in zip(cut, pairs, strict=True))
                unscored += sum(row.scored < len(b) for row, (_, b) in zip(cut, pairs, strict=True))
                rows += cut
                lengths = tuple(len(choice.lstrip()) for choice in fields["choices"])
                questions.append(Question(fields["answer"], lengths))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        if questions and text_bytes:
            raise UserError(f"{where}: questions and texts are in one file: put them into a file each")
    if not rows:
        raise UserError(f"{path} has no line: {RULE}")
    return Task(
        name=name, max_context=max_context, rows=tuple(rows), questions=tuple(questions), text_bytes=text_bytes,
        truncated=truncated, unscored=unscored,
    )  # fmt: skip


def _fields(where: str, line: bytes) -> dict[str, Any]:
    """The object of a line. Raises UserError where it breaks the rule."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: it is not JSON in UTF-8 ({error}): {RULE}") from error
    if not isinstance(fields, dict) or fields.keys() not in ({"text"}, {"context", "choices", "answer"}):
        what = ", ".join(map(repr, fields)) or "nothing" if isinstance(fields, dict) else type(fields).__name__
        raise UserError(f"{where} has {what}: {RULE}")
    if "text" in fields:
        if not isinstance(fields["text"], str) or not fields["text"]:
            raise UserError(f"{where}: text is {fields['text']!r}: it must be a text that is not empty")
        return fields
    context, choices, answer = fields["context"], fields["choices"], fields["answer"]
    if not isinstance(context, str):
        raise UserError(f"{where}: context is {context!r}: it must be a text, which may be empty")
    if not isinstance(choices, list) or len(choices) < 2:
        raise UserError(f"{where}: choices is {choices!r}: it must be a list of two texts at least")
    for choice in choices:
        if not isinstance(choice, str) or not choice.strip():
            raise UserError(f"{where}: choices has {choice!r}: each must be a text with more than spaces")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UserError(
            f"{where}: answer is {answer!r}: it must be a whole number from 0 to {len(choices) - 1}, the place of the "
            f"right choice"
        )
    return fields


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The ids of a context, and those that the continuation adds to it; both have one at least.

    Spaces that end the context count as the continuation's, because tokenizers join them to a word. An empty context is
    the start of a document: end-of-text. Raises ValueError: the tokenizer does not know a character, or has no
    end-of-text.
    """
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    if not context:
        return [tokenizer.eos_id], tokenizer.encode(continuation)
    ids, whole = tokenizer.encode_batch([context, context + continuation])
    begin = min(len(ids), len(whole) - 1)
    return whole[:begin] or [tokenizer.eos_id], whole[begin:]


def row_of(context: Sequence[int], continuation: Sequence[int], max_context: int) -> ScoredRow:
    """The row of a continuation, cut on the left to the last max_context + 1 tokens."""
    tokens = [*context, *continuation][-(max_context + 1) :]
    return ScoredRow(tokens, min(len(continuation), len(tokens) - 1))


def windows(ids: Sequence[int], start: int, max_context: int) -> Iterator[ScoredRow]:
    """Rows that together score each id once: windows of max_context, each after the last id of the one before.

    The first id follows `start`; the last window has the tokens before it as a longer context.
    """
    tokens = [start, *ids]
    for begin in range(1, len(tokens), max_context):
        end = min(begin + max_context, len(tokens))
        yield ScoredRow(tokens[max(0, end - max_context - 1) : end], end - begin)


def length_for(rows: Sequence[ScoredRow], max_context: int) -> int:
    """The tokens that a model reads of the longest of some rows, padded."""
    longest = max(len(row.tokens) for row in rows) - 1
    return min(max_context, -(-longest // LENGTH_STEP) * LENGTH_STEP)


def pad_scored(rows: Sequence[ScoredRow], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, 1 where a token is scored), int32 of this shape each; padding is on the right, and is 0."""
    tokens, scored = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for i, row in enumerate(rows):
        end = len(row.tokens)
        tokens[i, :end], scored[i, end - row.scored : end] = row.tokens, 1
    return tokens, scored
