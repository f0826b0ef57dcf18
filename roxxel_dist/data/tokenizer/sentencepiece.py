"""SentencePiece models, with the library of that name (the extra `sentencepiece`)."""

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.data.tokenizer.text_bytes import TextBytes, measure_text_bytes
from roxxel_dist.data.tokenizer.tokenizer import NAME_THE_END, Tokenizer
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError, pip_install

KEY = "sentencepiece"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with the ids of its library. It is saved whole, inside one JSON file. `eos_token` is the
    piece that ends a document, None for the model's default; `path` is for messages."""

    def __init__(self, model: bytes, eos_token: str | None, path: object) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError(f"{path}: a SentencePiece model needs a package: {pip_install('sentencepiece')}") from error
        self.kind: str = "sentencepiece"
        self._characters, self._model, self._eos_token = None, model, eos_token
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            pieces = self._processor.GetPieceSize()
        except Exception as error:  # the library raises RuntimeError, and others for some damage
            raise UserError(f"{path}: not a SentencePiece model ({error}). Put the right file there") from error
        if not pieces:
            raise UserError(f"{path}: not a SentencePiece model (it has no pieces). Put the right file there")

    @property
    def is_lossless(self) -> bool:
        """False: a normalizer is a part of most models."""
        return False

    @property
    def cuttable(self) -> bool:
        """False: a model may put something before every text."""
        return False

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, computed by one thread."""
        self._check(texts)
        return self._processor.Encode(list(texts), out_type=int, num_threads=1)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids."""
        return self._processor.Decode([int(number) for number in ids])

    def decode_batch(self, ids: Sequence[list[int]]) -> list[str]:
        """The text of each list of ids."""
        return self._processor.Decode([list(map(int, one)) for one in ids]) if ids else []

    @property
    def ids(self) -> list[int]:
        """The ids, sorted."""
        return list(range(self.vocab_size))

    @property
    def vocab_size(self) -> int:
        """The number of pieces."""
        return self._processor.GetPieceSize()

    @property
    def text_bytes(self) -> TextBytes:
        """The bytes of text that each id stands for; an unknown character has none."""
        model, size = self._processor, self.vocab_size
        known = {n: 0 for n in range(size) if model.IsControl(n) or model.IsUnknown(n) or model.IsUnused(n)}
        known |= {n: 1 for n in range(size) if model.IsByte(n)}
        end = self.end_id
        return measure_text_bytes(self.decode_batch, size, known | ({end: 0} if end >= 0 else {}), end)

    @property
    def text_start(self) -> list[int]:
        """No ids: a SentencePiece model has no post-processor."""
        return []

    @property
    def eos_id(self) -> int:
        """The id that ends a document. ValueError if the model has no such piece."""
        if self._eos_token is None and self._processor.eos_id() >= 0:
            return self._processor.eos_id()
        number = self._processor.PieceToId(self._eos_token or "")
        if not self._eos_token or self._processor.IdToPiece(number) != self._eos_token:
            shown = f"no piece {self._eos_token!r}" if self._eos_token else "no piece that ends a text"
            raise UserError(f"this SentencePiece model has {shown}. {NAME_THE_END}")
        return number

    @property
    def end_id(self) -> int:
        """The id that ends a document; -1 where there is none."""
        return self.eos_id if self._eos_token or self._processor.eos_id() >= 0 else -1

    @property
    def unknown_id(self) -> int:
        """The id of an unknown character."""
        return self._processor.unk_id()

    @property
    def eos_token(self) -> str:
        """The piece that ends a document. Errors as of `eos_id`."""
        return self._processor.IdToPiece(self.eos_id)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that depend only on the model."""
        return hashlib.blake2b(self._model, digest_size=16).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and the name of end-of-text atomically, as JSON that `Tokenizer.load` reads."""
        packed = {KEY: base64.b64encode(self._model).decode(), "eos_token": self._eos_token}
        write_file(Path(path), json.dumps(packed).encode())


def load(data: bytes, eos_token: str | None, path: object) -> SentencePieceTokenizer | None:
    """The tokenizer in a `.model` file, or in a file of `save`; None for other bytes."""
    if str(path).endswith(".model"):
        return SentencePieceTokenizer(data, eos_token, path)
    if not data.startswith(b'{"' + KEY.encode()):
        return None
    try:
        packed = json.loads(data)
        model, saved_eos = base64.b64decode(packed[KEY], validate=True), packed["eos_token"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: a damaged SentencePiece model ({error}). Build the data set again") from error
    return SentencePieceTokenizer(model, eos_token or saved_eos, path)
