"""The fix that a message names can be followed, and says enough."""

import json
import subprocess

import numpy as np
import pytest
import tokenizers

from roxxel_dist import Roxxel
from roxxel_dist.cli import main
from roxxel_dist.corpus.build import build
from roxxel_dist.corpus.encode import train_on
from roxxel_dist.data.tokenizer.tokenizer import LONGEST_WORD, cut_long_words, train_tokenizer
from roxxel_dist.process.exit_codes import UserError

DAMAGE = {
    "empty": lambda data: b"",
    "short": lambda data: data[:50],
    "cut": lambda data: data[:-7],
    "longer": lambda data: data + b"more",
    "another kind": lambda data: b"\x89PNG\r\n\x1a\n" + data,
    "footer": lambda data: data[:-20] + b"\xff" * 4 + data[-16:],
    "metadata": lambda data: data[:-120] + b"?" + data[-119:],
    "header": lambda data: b"x" + data[1:],
}


@pytest.mark.parametrize("place", ["a.rox", "set", "set/shard_*.rox", "set/shard_00000.rox"])
def test_a_damaged_file_is_replaced_as_its_message_says(tmp_path, place):
    for damage, change in DAMAGE.items():
        folder = tmp_path / damage.replace(" ", "-")
        (folder / "set").mkdir(parents=True)
        path = folder / (place if "*" not in place and place != "set" else "set/shard_00000.rox")
        target = folder / place
        Roxxel(target).write([np.arange(99, dtype="<u2")])
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(UserError) as refused:
            Roxxel(target)
        assert str(path) in str(refused.value)
        if damage != "another kind":
            assert "in a program Roxxel(PATH, overwrite=True).write(DOCUMENTS)" in str(refused.value), damage
        Roxxel(target, overwrite=True).write([b"new"])
        assert [document.tobytes() for document in Roxxel(target)] == [b"new"], damage


@pytest.mark.parametrize("coding", ["UTF-16", "UTF-16-LE", "UTF-32"])
def test_text_in_another_coding_is_converted_as_the_message_says(tmp_path, coding):
    text, path = "zwölf Kästchen\n" * 9, tmp_path / "text.txt"
    path.write_bytes(text.encode(coding) if coding != "UTF-16-LE" else b"\xff\xfe" + text.encode(coding))
    with pytest.raises(UserError, match=rf"text\.txt is {coding[:6]}: convert with `iconv") as refused:
        build(path, tmp_path / "set", tokenizer="byte", progress=False)
    command = str(refused.value).split("`")[1].replace("NEW.txt", str(tmp_path / "new.txt"))
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "new.txt").read_text() == text
    build(tmp_path / "new.txt", tmp_path / "set", tokenizer="byte", progress=False).close()


def test_what_a_folder_has_is_said(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert main(["data", "build", str(folder), "--out", str(tmp_path / "set")]) == 2
    assert "there is no file to read" in capsys.readouterr().err
    (folder / "table.csv").write_text("a,b,c\n1,2,3\n")
    (folder / "lib.so").write_text("x")
    assert main(["data", "build", str(folder), "--out", str(tmp_path / "set"), "--tokenizer", "byte"]) == 0
    printed = capsys.readouterr()
    assert "(left out: 1 of other kinds: .so); 1 .csv as plain text, not as a table" in printed.err


@pytest.mark.parametrize("place", ["", "train"])
def test_a_foreign_tokenizer_is_damage(tmp_path, place, capsys):
    share = 0.5 if place else 0.0
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "some text"}) + "\n" for i in range(20)))
    build(tmp_path / "text.jsonl", tmp_path / "set", tokenizer="char", val_fraction=share, progress=False).close()
    folder = tmp_path / "set" / place
    assert main(["data", "verify", str(folder)]) == 0
    train_tokenizer("char", ["another"]).save(folder / "tokenizer.json")
    capsys.readouterr()
    assert main(["data", "verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "complete" not in printed
    assert "tokenizer.json: its fingerprint is" in printed
    (folder / "tokenizer.json").write_text("{")
    assert main(["data", "verify", str(folder)]) == 1


def test_info_of_tokens_alone_is_plain(tmp_path, capsys):
    Roxxel(tmp_path / "a.rox").write([b"x"])
    assert main(["data", "info", str(tmp_path / "a.rox")]) == 0
    assert "tokenizer    no tokenizer.json beside the shards\n" in capsys.readouterr().out


RNG = np.random.default_rng(0)
LONG = {
    "letters": "".join(RNG.choice(list("abcdefgh"), 200_000)),
    "DNA": "".join(RNG.choice(list("ACGT"), 200_000)),
    "digits": "".join(RNG.choice(list("0123456789"), 200_000)),
    "base64": "".join(RNG.choice(list("ABCDEFabcdef0123+/"), 200_000)),
    "signs": "".join(RNG.choice(list("{}();=_"), 200_000)),
    "spaces": " " * 200_000,
    "CJK": "".join(RNG.choice(list("漢字仮名交文"), 60_000)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("DNA", "spaces", "CJK") else pytest.mark.long) for name in LONG]
)
def test_a_document_without_spaces_has_bounded_words(name):
    text = f"A first line.\n{LONG[name]}\nand a last one"
    parts = list(cut_long_words(text))
    assert "".join(parts) == text
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    assert max(end - start for part in parts for _, (start, end) in split(part)) <= LONGEST_WORD + 1  # and a space
    tokenizer = train_on("bpe", iter([text]), 300, 1)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_texts_with_spaces_give_the_same_tokenizer_as_before():
    text = "Words, numbers 1234 and 漢字。\n" * 400 + "x" * LONGEST_WORD
    assert list(cut_long_words(text)) == [text]
