"""Files of evaluation tasks: their rows, their numbers, and what is refused."""

import json
import math

import pytest

from roxxel_dist.data.tasks import encode_pair, read_tasks
from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer
from roxxel_dist.process.exit_codes import UserError

BYTES = train_tokenizer("byte", [])
END = BYTES.eos_id
GOOD = {"context": "ab", "choices": ["c", "de"], "answer": 1}


def written(folder, name, *lines):
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(path, max_context=16, **more):
    return read_tasks([path], BYTES, max_context, **more)[0]


def test_rows_of_questions(tmp_path):
    task = read(written(tmp_path, "q.jsonl", GOOD, "", {"context": "", "choices": ["é", " x"], "answer": 0}))
    assert (task.name, task.truncated, task.truncation, task.text_bytes) == ("q", 0, "", 0)
    assert [(row.tokens, row.scored) for row in task.rows] == [
        (list(b"abc"), 1),
        (list(b"abde"), 2),
        ([END, *"é".encode()], 2),
        ([END, *b" x"], 2),
    ]
    assert [tuple(question) for question in task.questions] == [(1, (1, 2)), (0, (1, 1))]


def test_what_is_too_long_is_cut_on_the_left(tmp_path):
    long = {"context": "abcdefgh", "choices": ["i", "ijklmnop"], "answer": 0}
    task = read(written(tmp_path, "q.jsonl", GOOD, long), max_context=5)
    assert [(bytes(row.tokens), row.scored) for row in task.rows[2:]] == [(b"defghi", 1), (b"klmnop", 5)]
    assert task.truncated == 2
    assert task.truncation == (
        "task q: 2 of 4 choices are too long for max_context, and cut on the left; of 1 the choice itself is cut, and "
        "scored in part"
    )
    task = read(written(tmp_path, "r.jsonl", {**long, "choices": ["i", "j"]}), max_context=5)
    assert task.truncation == "task r: 2 of 2 choices are too long for max_context, and cut on the left"


def test_each_byte_of_a_text_is_scored_once(tmp_path):
    task = read(written(tmp_path, "t.jsonl", {"text": "0123456789"}, {"text": "é"}), max_context=4)
    assert task.text_bytes == 12
    assert [(row.tokens, row.scored) for row in task.rows] == [
        ([END, *b"0123"], 4),
        (list(b"34567"), 4),
        (list(b"56789"), 2),
        ([END, *"é".encode()], 2),
    ]
    assert task.scores([math.log(2)] * 4) == pytest.approx({"bits_per_byte": 4 / 12})


def test_acc_norm_divides_by_characters_as_that_of_the_harness_does(tmp_path):
    task = read(written(tmp_path, "q.jsonl", {"context": "a", "choices": [" éé", " bcd"], "answer": 1}))
    assert task.questions[0].lengths == (2, 3)
    # By byte (4 and 3) the first choice would win.
    assert task.scores([2.2, 3.0]) == {"acc": 0.0, "acc_norm": 1.0}


def test_scores(tmp_path):
    task = read(written(tmp_path, "q.jsonl", GOOD, {**GOOD, "answer": 0}, GOOD))
    # The second choice is better by character in the first two, and at all in the third; of equal ones the first.
    assert task.scores([2.0, 3.0, 2.0, 3.0, 2.0, 1.0]) == {"acc": 2 / 3, "acc_norm": 2 / 3}
    assert task.scores([1.0, 1.0, 1.0, 2.0, 0.0, 1.0]) == {"acc": 1 / 3, "acc_norm": 2 / 3}


def test_spaces_before_a_word_belong_to_the_continuation():
    bpe = train_tokenizer("bpe", ["the cat sat on the mat " * 50], 300)
    context, continuation = encode_pair(bpe, "the cat ", "sat")
    assert (bpe.decode(context), bpe.decode(continuation)) == ("the cat", " sat")
    assert encode_pair(bpe, "the cat", " sat") == (context, continuation)
    # One id for both: the continuation has it, after the start of a document.
    assert encode_pair(bpe, "t", "he") == ([bpe.eos_id], bpe.encode("the"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON in UTF-8"),
        ([1], "line 2 has list: a line is"),
        ({}, "line 2 has nothing: a line is"),
        ({**GOOD, "gold": 1}, "line 2 has 'context', 'choices', 'answer', 'gold': a line is"),
        ({**GOOD, "context": 3}, "line 2: context is 3: it must be a text"),
        ({**GOOD, "choices": ["a"]}, "line 2: choices is ['a']: it must be a list of two"),
        ({**GOOD, "choices": ["a", " "]}, "line 2: choices has ' ': each must be a text with more than spaces"),
        ({**GOOD, "answer": 2}, "line 2: answer is 2: it must be a whole number from 0 to 1"),
        ({**GOOD, "answer": True}, "line 2: answer is True: it must be"),
        ({"text": ""}, "line 2: text is '': it must be a text that is not empty"),
        ({"text": "a"}, "line 2: questions and texts are in one file"),
        ({**GOOD, "context": "\ud800"}, "line 2: the text is not valid Unicode"),
    ],
)
def test_a_line_that_breaks_the_rule(tmp_path, line, message):
    path = written(tmp_path, "q.jsonl", GOOD, line)
    with pytest.raises(UserError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}, {message}")


def test_files_that_are_refused(tmp_path):
    empty, first = written(tmp_path, "empty.jsonl", ""), written(tmp_path, "q.jsonl", GOOD)
    (tmp_path / "b").mkdir()
    second = written(tmp_path / "b", "q.jsonl", GOOD)
    with pytest.raises(UserError, match=r"empty\.jsonl has no line: a line is"):
        read(empty)
    with pytest.raises(UserError, match=r"--tasks has '.*none.*': there is no such file"):
        read(str(tmp_path / "none*.jsonl"), field="--tasks")
    with pytest.raises(UserError, match="a task has the name of its file, so rename one"):
        read_tasks([first, second], BYTES, 16)
    (tmp_path / "empty.jsonl").rename(tmp_path / "[q].json")
    with pytest.raises(UserError, match=r"\[q\]\.json has no line"):
        read(str(tmp_path / "[q].json"))
    assert [task.name for task in read_tasks([str(tmp_path / "*.jsonl"), first], BYTES, 16)] == ["q"]
