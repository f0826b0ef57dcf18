"""The inputs of a build: the files, the checked settings, and the documents in order."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import xxhash

from roxxel_dist.corpus.find import Corpus, Judge, find_corpus, shown_names
from roxxel_dist.corpus.tally import Tally
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import BUILD_FILE, build_record, has_text, is_tokens
from roxxel_dist.data.files.format import MOST_SHARD_BYTES, MOST_WORKERS, check_range
from roxxel_dist.data.files.shard import WriteOptions
from roxxel_dist.data.tokenizer.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Kind, Tokenizer, check_vocabulary
from roxxel_dist.process.exit_codes import MissingFileError, UserError
from roxxel_dist.utils.display import ProgressBars
from roxxel_dist.utils.voice import argument

SPLITS = ("train", "val")
SHARD_NAME = "shard_{:05d}.rox".format
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class BuildInputs:
    """The inputs of a build, and the settings that decide its result."""

    corpus: Corpus | None = None
    tokens: Roxxel | None = None
    tokenizer: Tokenizer | None
    """None: to be trained, or not given for tokens."""
    kind: str = "none"
    vocab_size: int | None = None
    eos: bool = True
    val_fraction: float = 0.0
    text_key: str
    max_shard_bytes: int

    @property
    def splits(self) -> tuple[str, ...]:
        """The folders in `out` to fill; "" is `out` itself."""
        return SPLITS if self.val_fraction else ("",)

    @property
    def source(self) -> Roxxel:
        """The tokens, if the input is not a corpus."""
        assert self.tokens is not None
        return self.tokens

    @property
    def size(self) -> int:
        """Bytes to read."""
        return self.corpus.size if self.corpus else sum(shard.tokens.nbytes for shard in self.source.shards)

    def record(self, **more: str) -> bytes:
        """Everything that decides the result, as JSON; saved beside the result to recognize it later."""
        inputs = {"fingerprint": self.source.fingerprint} if self.corpus is None else {
            "bytes": self.corpus.size, "digest": self.corpus.digest, "files": len(self.corpus.files)
        }  # fmt: skip
        settings = self._settings(of_text=self.corpus is not None)
        return json.dumps({"inputs": inputs, "settings": settings} | more, indent=1, sort_keys=True).encode()

    def _settings(self, *, of_text: bool) -> dict[str, Any]:
        ready = self.tokenizer.fingerprint if self.tokenizer else self.kind
        # For a tokenizer that is not trained yet, its kind determines the end-of-text.
        ending = self.tokenizer.eos_id if self.tokenizer and self.eos and of_text else self.eos
        names = ("max_shard_bytes", "text_key", "val_fraction", "vocab_size")
        return {name: getattr(self, name) for name in names} | {"tokenizer": ready, "eos": ending}

    def may_have_made(self, record: bytes, sizes: Sequence[int]) -> bool:
        """Whether a `build.json` can be of this build, of text files of these sizes that are not read yet. A build
        leaves out what is not UTF-8: where there are more files than it read, those have the bytes it lacks."""
        known, sizes = build_record(record) or {}, sorted(sizes)
        try:
            others, lacking = len(sizes) - known["inputs"]["files"], sum(sizes) - known["inputs"]["bytes"]
        except (KeyError, TypeError):  # of tokens, or of another program
            return False
        is_possible = others >= 0 and sum(sizes[:others]) <= lacking <= sum(sizes[len(sizes) - others :])
        is_same = known.keys() - {"fingerprint"} == {"inputs", "settings"}  # nothing was appended
        return is_possible and is_same and known["settings"] == self._settings(of_text=True)

    def options(self, tokenizer: Tokenizer | None, separator: int | float | None) -> WriteOptions:
        """The options to write shards: with the vocabulary of the tokenizer, or else of the copied tokens."""
        known = tokenizer or self.source
        return WriteOptions(
            separator=separator,
            max_shard_bytes=self.max_shard_bytes,
            vocab_size=known.vocab_size if tokenizer else self.vocab_size or known.vocab_size,
            tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else self.source.tokenizer_fingerprint,
        )

    def in_split(self, split: str, number: int) -> bool:
        """Whether document `number` belongs to a split; only its number decides."""
        if not self.val_fraction:
            return True
        drawn = xxhash.xxh3_64_intdigest(number.to_bytes(8, "little")) / 2**64
        return (drawn < self.val_fraction) == (split == "val")

    def texts(self, split: str, skipped: int = 0, tally: Tally | None = None) -> Iterator[tuple[str, int]]:
        """The texts of a split without the first `skipped`, with the bytes read since the previous one.

        Those that are empty are left out; `tally` has their number when all texts have been read.
        """
        assert self.corpus is not None
        read, number, empty = 0, -1, 0
        for file in self.corpus.files:
            for text, size in file.documents(self.text_key):
                read = read + size
                if not text:
                    empty += 1
                    continue
                number += 1
                if self.in_split(split, number):
                    skipped -= 1
                    if skipped < 0:
                        yield text, read
                        read = 0
        if tally is not None:
            tally.empty = empty

    def arrays(self, split: str, skipped: int, advance: Callable[[int], None]) -> Iterator[np.ndarray]:
        """The documents of a split of tokens, without the first `skipped`; `advance` gets the bytes of each."""
        for number, document in enumerate(self.source.read_documents()):
            if self.in_split(split, number):
                skipped -= 1
                if skipped < 0:
                    yield document
                    advance(document.nbytes)


def check_settings(
    paths: PathLike | Sequence[PathLike],
    out: Path,
    *,
    workers: int | None,
    max_shard_bytes: int | None,
    val_fraction: float = 0.0,
    vocab_size: int | None = None,
    trains: str | None = None,
) -> list[Path]:
    """The input paths as a list; `trains` is the kind of the tokenizer, where it is to be trained. Raises ValueError
    for an invalid setting, or if a folder is both input and output."""
    if workers is not None:
        check_range("workers", workers, MOST_WORKERS, "processes")
    if max_shard_bytes is not None:
        check_range("max_shard_bytes", max_shard_bytes, MOST_SHARD_BYTES, "bytes of tokens in a shard")
    if not 0 <= val_fraction < 1:
        raise UserError(
            f"{argument('val_fraction', val_fraction)}: the share of documents to hold out, at least 0 and less than 1"
        )
    sources = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    if trains is not None and not is_tokens(sources):
        check_vocabulary(trains, vocab_size)
    filled = [out, *(out / split for split in SPLITS if val_fraction)]
    for path in sources:
        if path.is_dir() and path.resolve() in [folder.resolve() for folder in filled]:
            raise UserError(
                f"{path} would be read and filled by one build, and the next would take its files for text; choose "
                f"another folder for the shards, one in it if you like, such as {path / 'tokens'}"
            )
    return sources


def find_inputs(
    sources: list[Path],
    include: Sequence[str],
    exclude: Sequence[str],
    out: Path,
    dtype: Any,
    progress: ProgressBars,
    judge: Judge = lambda sizes: None,
) -> tuple[Roxxel | None, Corpus | None]:
    """The tokens or the texts at the paths, for a build into the folder `out`; one of the two is None."""
    kinds = [is_tokens(path) and not (path.is_dir() and has_text(path)) for path in sources]
    if all(kinds) and sources:
        tokens = Roxxel([str(path) for path in sources] if len(sources) > 1 else sources[0], dtype=dtype)
        progress.line(f"{tokens.num_tokens:,} tokens in {len(tokens.shards)} files, {tokens.documents:,} documents")
        if beside := _beside(sources, tokens, out):
            progress.line(f"left out: {len(beside)} files or folders beside these: {shown_names(beside)}")
        if tokens.guessed_dtype is not None:
            progress.line(f"{tokens.shards[0].path} has no header: its tokens are read as {tokens.dtype} (dtype)")
        return tokens, None
    if any(kinds):
        text, token = sources[kinds.index(False)], sources[kinds.index(True)]
        raise UserError(f"{token} holds tokens and {text} text: build two data sets, and blend them in a curriculum")
    corpus = find_corpus(sources, include, exclude, out, judge)
    progress.line(str(corpus))
    return None, corpus


def _beside(sources: Sequence[Path], tokens: Roxxel, out: Path) -> list[str]:
    """The names of other files and folders beside the tokens, but for those that belong there."""
    used = {path.name for shard in tokens.shards for path in (Path(str(shard.path)),)}
    known = {TOKENIZER_FILE, CONFIG_FILE, BUILD_FILE} | {Path(name).with_suffix(".idx").name for name in used}
    return [
        path.name
        for folder in sources
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".") and path.name not in used | known and path.resolve() != out.resolve()
    ]


def load_tokenizer(tokenizer: PathLike, vocab_size: int | None, eos_token: str | None) -> Tokenizer | None:
    """The tokenizer at a path, or None for a kind to train."""
    if str(tokenizer) in get_args(Kind):
        if eos_token is not None:
            raise UserError(f"{argument('eos_token', eos_token)}: a trained tokenizer has its own; leave eos_token out")
        return None
    path = Path(tokenizer)
    try:
        loaded = Tokenizer.load(path, eos_token)
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{argument('tokenizer', tokenizer)}: neither a kind ({', '.join(get_args(Kind))}) nor the path of "
            f"a {TOKENIZER_FILE}, "
            "of a folder with one, or of a SentencePiece .model"
        ) from error
    if vocab_size is not None and vocab_size != loaded.vocab_size:
        raise UserError(
            f"{argument('vocab_size', vocab_size)}: {path} has {loaded.vocab_size} ids; leave vocab_size out"
        )
    return loaded
