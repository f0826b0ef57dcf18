"""Messages over a pipe, in any pieces, without waiting for the reader."""

import os
from contextlib import nullcontext

import pytest
from tables import one_test

from roxxel_dist.launcher.host.process_tree import GONE
from roxxel_dist.launcher.host.protocol import Decoder, Outbox, encode, mark
from roxxel_dist.process.exit_codes import UserError

MESSAGES = [{"type": "lines", "text": 'a\nb "é" \0'}, {"type": "x", "word": "\udcff"}, {"type": "done"}]


def test_messages_arrive_whole_in_any_pieces() -> None:
    data = b"".join(map(encode, MESSAGES))
    assert list(Decoder().feed(data)) == MESSAGES
    decoder = Decoder()
    assert [message for byte in data for message in decoder.feed(bytes([byte]))] == MESSAGES


@pytest.mark.parametrize("line", [b"hello\n", b"[1]\n", b"\xff\n"])
def test_what_is_no_message_is_named(line: bytes) -> None:
    with pytest.raises(ValueError, match="no message"):
        list(Decoder().feed(line))


def test_an_outbox_never_waits_and_loses_nothing() -> None:
    reads, writes = os.pipe()
    outbox = Outbox(writes)
    message = {"type": "lines", "text": "x" * 300_000}
    outbox.send(message)
    outbox.send(MESSAGES[0])
    outbox.flush()  # the pipe holds 64 KiB: returning at all is the point
    assert len(outbox) > 0
    decoder, got = Decoder(), []
    while len(got) < 2:
        got += decoder.feed(os.read(reads, 1 << 16))
        outbox.flush()
    assert got == [message, MESSAGES[0]]
    assert len(outbox) == 0
    os.close(reads)
    outbox.send(message)
    outbox.flush()  # the reader is gone
    assert len(outbox) == 0
    os.close(writes)


NOISE = [
    b"Welcome\n", b"Welcome \x1b[1m", b"\n\n", b'{"a": 1}\n', b"[1]\nnull\n", b"\xff\xfe\r\n", b"{\n",
    b'{"code":401,"message":"token expired"}\n', b'{"id":1,"type":"error","entry":null}\n',
    b'{"type":"gone","code":0}\n', b'{"n":"","type":"done"}\n', b"h1: ", b"[1] 05:48:24 [SUCCESS] ",
]  # fmt: skip


@one_test("noise", NOISE)
def test_what_others_print_before_between_and_beside_messages_is_no_message(noise: bytes) -> None:
    """Start-up files of a shell, their background processes, and clients: JSON with everyday keys too."""
    sent = [{"id": 1, "text": "x"}, {"type": "progress", "records": []}]
    data = b"".join(noise + encode(message, "5e7") for message in sent) + noise
    for size in (1, 3, 1000):
        decoder, got = Decoder("5e7"), []
        for start in range(0, len(data), size):
            got += decoder.feed(data[start : start + size])
        assert got == sent


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            b'{"n":"5e7.2","type":"lines","text":"cut o\n',
            "is no message",
        ),  # another process printed in the middle of it
        (b'{"nonce":"5e7","ask":"facts","id":1}\n', "it sends back what it is sent"),
        (b'{"n":"5e7.2","id":1}\r\n', "a terminal is in between"),
        (b'{"n":"5e7","id":1}\n', "there is of another version .its messages are not of protocol 2.: install the same"),
        (b'{"n":"5e7.1","id":1}\n', "is of another version"),
    ],
)
def test_a_damaged_channel_is_named(line: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(Decoder("5e7").feed(line))


CUT = encode({"type": "lines", "rank": 0, "text": "x" * 50}, "5e7")[:40]
LAST = GONE % (mark("5e7").encode(), 137)
BEHIND = {
    # what comes behind a message without its end: what is taken of it, and what is said
    "the last word of a guard": (LAST, [{"type": "gone", "code": 137}], ""),
    "the same, and words of a client": (b"Terminated" + LAST, [{"type": "gone", "code": 137}], ""),
    "a message: another process printed in the middle": (b"\n" + encode({"type": "done"}, "5e7"), [], "is no message"),
    "the end of its line": (b"\n", [], "is no message"),
    "another such piece": (b"\n" + CUT + LAST, [], "is no message"),
}


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("case", BEHIND)
def test_a_program_that_is_killed_within_a_message_loses_no_other_one(case: str, size: int) -> None:
    behind, taken, said = BEHIND[case]
    whole = [{"type": "exit", "rank": 0, "code": 7}, {"type": "lines", "rank": 0, "text": "y"}]
    data = b"".join(encode(message, "5e7") for message in whole) + CUT + behind
    decoder, got = Decoder("5e7"), []
    with pytest.raises(UserError, match=said) if said else nullcontext():
        for start in range(0, len(data), size):
            got.extend(decoder.feed(data[start : start + size]))
    assert got == whole + taken
