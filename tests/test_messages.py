"""The language of messages and help texts: short sentences, and words that everybody knows."""

import re

from messages import Message, messages
from test_plain_english import LONGEST, RIDDLES, sentences, words

PRIVATE = re.compile(
    r"""\b(?:muster|crew|leash|told|heard?|whom|anew|thereof|in\ vain|shall|mend|for\ instance|once\ more|this\ very
    |knows\ its\ own|(?:saves?|saved)\ and\ (?:leave|left)|on\ both\ sides|audit\ them\ apart|taken?\ (?:\w+\ ){1,2}away
    |from\ none|no\ pattern\ takes|(?:shards|steps|one)\ behind|still\ ended|living
    |a\ host\ a\ line|logits\ a\ token)\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words of our own, and those at which people stopped who read the messages for the first time."""
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
