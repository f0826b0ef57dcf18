"""Messages over a pipe, in any pieces, without waiting for the reader."""

import os

import pytest

from roxxel_dist.launcher.host.protocol import Decoder, Outbox, encode

MESSAGES = [{"type": "lines", "text": 'a\nb "é" \0'}, {"type": "x", "word": "\udcff"}, {"type": "done"}]


def test_messages_arrive_whole_in_any_pieces() -> None:
    data = b"".join(map(encode, MESSAGES))
    assert Decoder().feed(data) == MESSAGES
    decoder = Decoder()
    assert [message for byte in data for message in decoder.feed(bytes([byte]))] == MESSAGES


@pytest.mark.parametrize("line", [b"hello\n", b"[1]\n", b"\xff\n"])
def test_what_is_no_message_is_named(line: bytes) -> None:
    with pytest.raises(ValueError, match="no message"):
        Decoder().feed(line)


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


NOISE = [b"", b"Welcome\n", b"Welcome \x1b[1m", b"\n\n", b'{"a": 1}\n', b"[1]\nnull\n", b"\xff\xfe\r\n", b"{\n"]


@pytest.mark.parametrize("noise", NOISE)
def test_what_start_up_files_print_before_the_first_message_is_left_out(noise: bytes) -> None:
    line = encode({"id": 1, "text": "x"})
    for size in (1, 3, 1000):
        decoder, data, got = Decoder(after_noise=True), noise + line, []
        for start in range(0, len(data), size):
            got += decoder.feed(data[start : start + size])
        assert got == [{"id": 1, "text": "x"}]
    with pytest.raises(ValueError, match="no message"):
        decoder.feed(b"Welcome\n")
