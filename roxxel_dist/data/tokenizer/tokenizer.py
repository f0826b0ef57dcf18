"""Text to token ids and back. Every kind is one `tokenizer.json` of the Hugging Face `tokenizers` library.

- `bpe`: byte-level byte-pair encoding, trained on the corpus. Any text comes back from its ids unchanged.
- `byte`: the same without merges; an id is a byte of the text in UTF-8.
- `char`: an id is a character of the corpus; other characters are refused.

The last id of each is `<|endoftext|>`, which ends a document. The same letters in a text never become that id.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from roxxel_dist.data.tokenizer.text_bytes import TextBytes, measure_text_bytes
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument

Kind = Literal["char", "byte", "bpe"]
EOS = "<|endoftext|>"
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>")
"""The names of end-of-text in ready-made tokenizers."""
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_NAMES = (TOKENIZER_FILE, "tokenizer.model")
NAME_THE_END = "Name one that it has: `roxxel-dist data build PATH --out DIR --tokenizer FILE --eos_token TOKEN`"
SMALLEST_BPE = 257
BYTE_LEVEL = '"ByteLevel"'
BYTE_FALLBACK, BYTE = '"ByteFallback"', re.compile("<0x[0-9A-F]{2}>")
DEFAULT_BPE = 8192
LARGEST_VOCABULARY = 1 << 22
EVERY_CHARACTER = r"[\s\S]"


SAMPLES = {
    "line ends": "a\nb", "tabs": "a\tb", "several spaces": "a  b", "spaces at the end": "a ", "capital letters": "aB",
    "accents": "\u00e9", "separate accents": "e\u0301", "ligatures": "\ufb01", "wide letters": "\uff21",
    "signs": "a-b, (c)!", "letters of other alphabets": "\u0436\u6f22", "emoji": "\U0001f642",
}  # fmt: skip
"""Texts that some tokenizers change, by the name of the loss."""
LONGEST_WORD = 128
"""Characters of a word when a tokenizer is trained; longer ones are cut."""
_LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD + 1},}}|\s{{{LONGEST_WORD + 1},}}")
_LONG_WORD = re.compile(
    "|".join(f"{kind}{{{LONGEST_WORD + 1},}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s"))
)
"""What byte-level BPE takes for one word: letters, digits, other characters, or spaces."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library that treats special tokens in a text as text."""

    _open: frozenset[int] = frozenset()
    """Ids of single bytes that become characters together, and of special tokens, which do not end a run of them."""

    def __init__(self, inner: tokenizers.Tokenizer, eos_token: str | None = None) -> None:
        self._inner = inner
        self._eos_token = eos_token
        inner.no_truncation()
        inner.no_padding()
        # The library does not save this setting in the file.
        inner.encode_special_tokens = True
        self._described: dict[str, Any] = json.loads(inner.to_str())
        added, end = self._described["added_tokens"], self._end_token
        if plain := [one for one in added if one["content"] == end and not one["special"]]:
            # Else its letters in a text would become the id, and end a document in its middle.
            plain[0]["special"] = True
            self._inner = inner = tokenizers.Tokenizer.from_str(json.dumps(self._described))
            inner.encode_special_tokens = True
        self.kind: str = _kind(self._described)
        self._characters = frozenset(self._described["model"]["vocab"]) if self.kind == "char" else None
        if BYTE_FALLBACK in json.dumps(self._described["decoder"]):
            names = inner.get_vocab(with_added_tokens=True)
            special = {token["content"] for token in self._described["added_tokens"] if token["special"]}
            self._open = frozenset(id for name, id in names.items() if BYTE.fullmatch(name) or name in special)

    @property
    def cuttable(self) -> bool:
        """Whether the ids of a text equal the concatenated ids of its pieces (`documents.pieces`)."""
        splitter = self._described["pre_tokenizer"] or {}
        plain = splitter.get("type") == "ByteLevel" and not splitter["add_prefix_space"] and splitter["use_regex"]
        ours = plain and self._described["model"]["type"] == "BPE" and not self._described["added_tokens"][1:]
        return self._described["normalizer"] is None and (ours or self.kind == "char")

    @property
    def is_lossless(self) -> bool:
        """Whether its parts prove that every text comes back from its ids, and that `text_bytes` are those of the text.
        So of own kinds, and of byte-level BPE without a normalizer, as GPT-2's and Llama 3's."""
        if self.kind == "char":
            splitter = self._described["pre_tokenizer"] or {}
            return self._described["normalizer"] is None and splitter.get("pattern") == {"Regex": EVERY_CHARACTER}
        model = self._described["model"]
        plain = self._described["normalizer"] is None and (self._described["decoder"] or {}).get("type") == "ByteLevel"
        if not plain or model["type"] != "BPE" or not _keeps_text(self._described["pre_tokenizer"]):
            return False
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or model.get("byte_fallback"):
            return False
        added = [one for one in self._described["added_tokens"] if not one["special"]]
        strips = any(one["lstrip"] or one["rstrip"] or one["normalized"] for one in added)
        return not strips and set(_byte_letters()) <= model["vocab"].keys()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without end-of-text. Raises ValueError: the text has characters that a `char` tokenizer
        does not know, or is not valid Unicode."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, computed by as many threads as there are cores."""
        self._check(texts)
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def _check(self, texts: Sequence[str]) -> None:
        for text in texts:
            if self._characters is not None and not self._characters.issuperset(text):
                unknown = sorted(set(text) - self._characters)
                shown = ", ".join(f"{character!r}" for character in unknown[:10])
                raise UserError(
                    f"{len(unknown)} characters are not in the vocabulary of this char tokenizer: {shown}. "
                    "Use tokenizer 'byte' or 'bpe', which know every text"
                )
            if not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise UserError(f"the text is not valid Unicode: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; end-of-text is left out. Bytes that are not UTF-8 become U+FFFD."""
        return self._inner.decode([int(number) for number in ids], skip_special_tokens=True)

    def is_open(self, number: int) -> bool:
        """Whether the ids behind an id decide what its text is: it is in a run of single bytes."""
        return number in self._open

    @property
    def ids(self) -> list[int]:
        """The ids, sorted."""
        return sorted(set(self._inner.get_vocab(with_added_tokens=True).values()))

    @property
    def vocab_size(self) -> int:
        """The highest id plus one, end-of-text included."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def text_start(self) -> list[int]:
        """The ids that the post-processor of a ready-made tokenizer puts before a text, such as `<s>`; ours have none.
        `encode` leaves them out: they are for the prompt of a model that was trained with them."""
        if not self._inner.num_special_tokens_to_add(is_pair=False):
            return []
        encoding = self._inner.encode("a")
        count = next((i for i, special in enumerate(encoding.special_tokens_mask) if not special), 0)
        return encoding.ids[:count]

    @property
    def eos_token(self) -> str:
        """Name of the token that ends a document. ValueError if it has no token of the given or the usual names."""
        if (name := self._end_token) is not None:
            return name
        names = EOS_NAMES if self._eos_token is None else (self._eos_token,)
        raise UserError(f"this tokenizer has no end-of-text token: none of {', '.join(names)} is in it. {NAME_THE_END}")

    @property
    def eos_id(self) -> int:
        """The id that ends a document. Errors as of `eos_token`."""
        number = self._inner.token_to_id(self.eos_token)
        assert number is not None
        return number

    @property
    def _end_token(self) -> str | None:
        """As `eos_token`; None where there is none."""
        names = EOS_NAMES if self._eos_token is None else (self._eos_token,)
        return next((name for name in names if self._inner.token_to_id(name) is not None), None)

    @property
    def end_id(self) -> int:
        """The id that ends a document; -1 where there is none."""
        name = self._end_token
        return -1 if name is None else self._inner.token_to_id(name) or 0

    @property
    def unknown_id(self) -> int:
        """The id of an unknown character or word; -1 where there is none."""
        model = self._described["model"]
        if model["type"] == "Unigram":
            return -1 if model["unk_id"] is None else model["unk_id"]
        number = self._inner.token_to_id(model["unk_token"]) if model.get("unk_token") else None
        return -1 if number is None else number

    @property
    def text_bytes(self) -> TextBytes:
        """The bytes of text that each id stands for."""
        names, size = self._inner.get_vocab(with_added_tokens=True), self.vocab_size
        added = {token["content"]: token["special"] for token in self._described["added_tokens"]}
        known = {names[name]: 0 for name, is_special in added.items() if is_special}
        end = self.end_id
        if BYTE_LEVEL not in json.dumps(self._described["decoder"]):
            known |= dict.fromkeys(self._open - known.keys(), 1)
            return measure_text_bytes(self.decode_batch, size, known, end)
        lengths = np.zeros(size, np.int32)
        for name, number in names.items():  # a letter of a name is a byte; an added token is a text as it is
            lengths[number] = known.get(number, len(name.encode()) if name in added else len(name))
        return TextBytes(lengths, lengths, end)

    @property
    def losses(self) -> str:
        """A line about what a text lacks when it comes back from its ids, measured on some texts; empty for nothing.

        A normalizer, such as one that lowercases or that SentencePiece has by default, changes a text before it becomes
        ids. A `char` tokenizer refuses what it does not know.
        """
        if self.kind == "char" or self.is_lossless:
            return ""
        lost = [what for what, text in SAMPLES.items() if not self._gives_back(text)]
        return f"the tokenizer changes texts, which do not come back from its ids: {', '.join(lost)}" if lost else ""

    def _gives_back(self, text: str) -> bool:
        try:
            return self.decode(self.encode(text)) == text
        except Exception:  # the library raises bare Exception for what some models do not know
            return False

    def decode_batch(self, ids: Sequence[list[int]]) -> list[str]:
        """The text of each list of ids, as `decode` gives it."""
        return self._inner.decode_batch(list(ids), skip_special_tokens=True)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that depend only on the tokenizer's file."""
        return hashlib.blake2b(self._inner.to_str().encode(), digest_size=16).hexdigest()

    def to_json(self) -> bytes:
        """The contents of a `tokenizer.json`."""
        return self._inner.to_str(pretty=True).encode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json`; if end-of-text has an unusual name, also `tokenizer_config.json`."""
        path = Path(path)
        if self._eos_token not in (None, *EOS_NAMES[:1]):
            write_file(path.with_name(CONFIG_FILE), json.dumps({"eos_token": self._eos_token}).encode())
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str], eos_token: str | None = None) -> "Tokenizer":
        """Read a tokenizer without a network.

        Args:
            path: a `tokenizer.json` of the `tokenizers` library or from `save`; a SentencePiece `.model`; or a Hugging
                Face folder with one of them (`tokenizer.json`, else `tokenizer.model`).
            eos_token: the name of end-of-text. None: the name in `tokenizer_config.json` or `special_tokens_map.json`
                beside it, or else the first of the usual names that it has.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not such a file. The message names it.
        """
        path = Path(path)
        if path.is_dir():
            path = next((path / name for name in TOKENIZER_NAMES if (path / name).is_file()), path / TOKENIZER_FILE)
        return cls.parse(path, path.read_bytes(), eos_token or _named_eos(path))

    @classmethod
    def parse(cls, where: object, data: bytes, eos_token: str | None = None) -> "Tokenizer":
        """The tokenizer in the bytes of a file, as `load` reads it. Raises ValueError, naming `where`."""
        from roxxel_dist.data.tokenizer import sentencepiece

        model = sentencepiece.load(data, eos_token, where)
        if model is not None:
            return model
        try:
            return cls(tokenizers.Tokenizer.from_buffer(data), eos_token)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{where}: not a tokenizer.json of the `tokenizers` library ({error})") from error


def _keeps_text(splitter: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer is byte-level and removes and adds nothing."""
    steps = [] if splitter is None else splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    kinds = [step["type"] for step in steps]
    safe = all(
        not step["add_prefix_space"] if step["type"] == "ByteLevel"
        else step["behavior"] != "Removed" if step["type"] == "Split"
        else step["type"] in ("Digits", "UnicodeScripts")
        for step in steps
    )  # fmt: skip
    return safe and kinds.count("ByteLevel") == 1


def _named_eos(path: Path) -> str | None:
    """The name of end-of-text in the files beside a tokenizer."""
    for name in (CONFIG_FILE, "special_tokens_map.json"):
        beside = path.with_name(name)
        if not beside.is_file():
            continue
        try:
            token = json.loads(beside.read_bytes()).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{beside}: not a JSON object ({error}). Put the right file back, or remove it") from error
        if isinstance(token, str):
            return token
    return None


def train_tokenizer(kind: Kind, texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Make a tokenizer for a corpus. The same texts give the same tokenizer for any number of threads.

    Args:
        kind: "char", "byte" or "bpe".
        texts: the corpus; not read for "byte".
        vocab_size: number of ids, end-of-text included. For "bpe" the maximum (None: 8192; a small corpus has fewer);
            for the others it is only checked: ValueError if it is too small.
    """
    if kind not in get_args(Kind):
        raise UserError(f"tokenizer={kind!r}: one of {', '.join(get_args(Kind))}")
    check_vocabulary(kind, vocab_size)
    if kind == "char":
        inner = _char(texts, vocab_size)
    else:
        inner = tokenizers.Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(_byte_letters())}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    if kind == "bpe":
        trainer = trainers.BpeTrainer(
            vocab_size=(vocab_size or DEFAULT_BPE) - 1,  # end-of-text is added after training
            min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,  # bars of 0 / 0, full from the start
        )
        inner.train_from_iterator((piece for text in texts for piece in cut_long_words(text)), trainer)
    inner.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return Tokenizer(inner)


def check_vocabulary(kind: str, vocab_size: int | None) -> None:
    """Raises UserError for fewer ids than a tokenizer of the kind has on any text, and for more than it is trained for:
    its trainer takes memory for all of them at once, and would end the process."""
    if kind != "char" and vocab_size is not None and vocab_size < SMALLEST_BPE:
        raise UserError(
            f"{argument('vocab_size', vocab_size)}: a {kind} tokenizer has at least {SMALLEST_BPE} ids, 256 "
            f"bytes and end-of-text"
        )
    if vocab_size is not None and vocab_size > LARGEST_VOCABULARY:
        raise UserError(
            f"{argument('vocab_size', vocab_size)}: a tokenizer to train has at most {LARGEST_VOCABULARY:,} ids; "
            "32,000 to 256,000 are usual"
        )


def cut_long_words(text: str) -> Iterator[str]:
    """A text for training, in pieces without words above `LONGEST_WORD` characters.

    The time of a training grows with the square of the length of its words, and base64 or DNA is one word. The pieces
    cut nothing but such words, so all other texts give the same tokenizer as before, and every tokenizer encodes and
    decodes every text as it did.
    """
    start = 0
    for run in _LONG_RUN.finditer(text):  # a first, cheap look: most texts have none
        for word in _LONG_WORD.finditer(text, *run.span()):
            for cut in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                yield text[start:cut]
                start = cut
    yield text[start:]


def _char(texts: Iterable[str], vocab_size: int | None) -> tokenizers.Tokenizer:
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if vocab_size is not None and vocab_size <= len(characters):
        raise UserError(
            f"{argument('vocab_size', vocab_size)}: the corpus has {len(characters)} characters, so a char "
            f"tokenizer has "
            f"{len(characters) + 1} ids with end-of-text. Leave vocab_size out, or use tokenizer 'bpe'"
        )
    inner = tokenizers.Tokenizer(models.WordLevel({name: number for number, name in enumerate(sorted(characters))}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(EVERY_CHARACTER), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _byte_letters() -> list[str]:
    """The letters of byte-level BPE for the bytes 0 to 255 (as in GPT-2): printable characters stay the same."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _kind(described: dict[str, Any]) -> str:
    """char, byte or bpe, or the library's name of the model in lower case."""
    model, splitter = described["model"], described["pre_tokenizer"] or {}
    if model["type"] == "BPE" and splitter.get("type") == "ByteLevel":
        return "bpe" if model["merges"] else "byte"
    if model["type"] == "WordLevel" and (described["decoder"] or {}).get("type") == "Fuse":
        return "char"
    return str(model["type"]).lower()
