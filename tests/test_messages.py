"""The language of messages and help texts: short sentences, and words that everybody knows."""

import re

from messages import Message, messages
from test_plain_english import LONGEST, RIDDLES, sentences, words

PRIVATE = re.compile(r"\b(?:muster|crew|leash|told|whom|anew|thereof|in vain)\b", re.IGNORECASE)
MESSAGES = list(messages())


def complaints(message: Message) -> list[str]:
    """What is wrong with a message, a line each."""
    found = []
    for sentence in sentences(message.text):
        if (length := len(words(sentence))) > LONGEST:
            found.append(f"{message.where}: {length} words, at most {LONGEST}: {sentence}")
        if riddle := RIDDLES.search(sentence) or PRIVATE.search(sentence):
            found.append(f"{message.where}: {riddle[0]!r}: {sentence}")
    return found


def test_the_list_has_what_a_person_reads():
    kinds = [message.kind for message in MESSAGES]
    assert kinds.count("raise") > 600
    assert kinds.count("help") > 300
    assert kinds.count("said") > 100
    assert any("Peak learning rate" in message.text for message in MESSAGES)
    assert any("batch_size and seq_len must be given" in message.text for message in MESSAGES)


def test_messages_are_plain_english():
    found = [line for message in MESSAGES for line in complaints(message)]
    assert not found, "\n".join(found)
