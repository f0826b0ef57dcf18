"""Text from a trained model, whatever kind of folder it is in."""

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.model.generate import Sampling, generate_rows, known_ids, stream
from roxxel_dist.weights.hf_folder import is_hf_folder
from roxxel_dist.weights.load import check_continues, load_run

UNFINISHED = "\ufffd"
"""A tokenizer's output for bytes that are not a character, or not yet a whole one."""


class Generator:
    """A trained model and its tokenizer, on the first device.

    The first call compiles; later ones with prompts within the same multiple of 64 tokens, and as many of them, do not.

    Args:
        path: a run directory, or RUN@STEP; an exported folder; or a Hugging Face folder with a model of a family
            in docs/model.md, whose prompts begin with the token that its tokenizer puts before a text.
        best: for a run, the checkpoint with the lowest val_loss, or the newest if none was validated. False: the
            newest.
        step: the checkpoint of this step instead.

    Attributes:
        model: the module, with dropout off.
        tokenizer: text to ids and back.
        config: the `Config` of the run.
        step: of the checkpoint.
        start: the ids before each text: those of a Hugging Face folder's tokenizer, such as `<s>`; of a run none.

    Raises:
        ValueError: there is no such model, it has no tokenizer, or the user-defined model cannot continue a text.
    """

    model: Any
    tokenizer: Tokenizer
    config: Any
    step: int
    start: list[int]

    def __init__(self, path: str | Path, best: bool = True, *, step: int | None = None) -> None:
        self._path = str(path)
        self.model, self.tokenizer, self.config, self.step = load_run(path, step, best=best)
        check_continues(self.model, self.config)
        self._known_V = known_ids(self.tokenizer.ids, self.config.vocab_size)
        # A run trains without such a token, whatever its tokenizer, so its model has not learned it.
        self.start = self.tokenizer.text_start if is_hf_folder(Path(path)) else []

    def __repr__(self) -> str:
        """The model's place, step and sizes."""
        kind, ids = type(self.model).__name__, self.tokenizer.vocab_size
        return (
            f"Generator({self._path!r}, step={self.step}): {kind} of {ids:,} ids, max_context {self.config.max_context}"
        )

    def generate(
        self,
        prompt: str | Sequence[str] = "",
        max_new_tokens: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop_at_eos: bool = True,
    ) -> str | list[str]:
        """Continue a prompt, or each of several; the result does not include the prompt.

        A prompt and its continuation are the text that the tokenizer makes of all ids together, as far as it gives the
        prompt back unchanged. An id that the tokenizer has no text for, as where the model's vocabulary is larger, is
        never drawn.

        Args:
            prompt: text; if it is empty, the start of a document. Each prompt of a list is continued as if it were
                alone.
            max_new_tokens: tokens to add at most; values above max_context - 1 count as that. If a prompt is too long
                to leave room for them, only its last tokens are read.
            temperature: 0 takes the likeliest token each time, 1 draws from the model's distribution.
            top_k: draw from this many of the likeliest tokens; 0 for all.
            top_p: draw from the fewest of the likeliest tokens that have this probability together; 1 for all.
            seed: of the draws: one for all prompts, so that equal prompts give equal texts, or one for each.
            stop_at_eos: end a text at the model's end-of-text token.

        Returns:
            A text for a text, a list for a list.

        Raises:
            ValueError: an argument breaks its rule, or a prompt has characters that a char tokenizer does not know.
        """
        prompts = _listed(prompt)
        seeds = _listed(seed) if isinstance(seed, Iterable) else [seed] * len(prompts)
        if len(seeds) != len(prompts):
            raise UserError(f"seed has {len(seeds)} numbers for {len(prompts)} prompts: give one each, or one for all")
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        if not prompts:
            return []
        read = [self._ids(one) for one in prompts]
        room, limits = self._room(max_new_tokens), self._limits(stop_at_eos)
        rows = generate_rows(self.model, read, room, sampling=sampling, seeds=seeds, **limits)
        texts = [
            "".join(pieces(self.tokenizer, row, text, ids)) for row, text, ids in zip(rows, prompts, read, strict=True)
        ]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self,
        prompt: str = "",
        max_new_tokens: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_at_eos: bool = True,
    ) -> Iterator[str]:
        """The text of `generate`, in pieces as they are generated; no piece ends within a character.

        Arguments and errors are those of `generate`, for one prompt.

        Returns:
            An iterator of pieces, which together are the text.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        read, room = self._ids(prompt), self._room(max_new_tokens)
        ids = stream(self.model, read, room, sampling=sampling, seed=seed, **self._limits(stop_at_eos))
        return pieces(self.tokenizer, ids, prompt, read)

    def _ids(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise UserError(f"prompt is {prompt!r}: it must be a text, or a list of texts to generate")
        return [*self.start, *(self.tokenizer.encode(prompt) if prompt else [])] or [self.tokenizer.eos_id]

    def _room(self, max_new_tokens: int) -> int:
        # A value that is not a number is refused later, where it is used.
        most = self.config.max_context - 1
        return min(max_new_tokens, most) if isinstance(max_new_tokens, Integral) else max_new_tokens

    def _limits(self, stop_at_eos: bool) -> dict[str, Any]:
        return {
            "max_context": self.config.max_context,
            "eos_id": self.tokenizer.eos_id if stop_at_eos else None,
            "known_V": self._known_V,
        }


def _listed(value: Any) -> list[Any]:
    """The items of an iterable as a list; a text or a single value as a list of one."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def pieces(tokenizer: Tokenizer, ids: Iterable[int], prompt: str = "", prompt_ids: Sequence[int] = ()) -> Iterator[str]:
    """The text that some ids add to a prompt, piece by piece; no piece ends within a character.

    Joined, the pieces equal what `tokenizer.decode` gives for the prompt's ids and these, without the prompt.
    """
    known = list(prompt_ids)
    begin, shown = 0, len(known)

    def added() -> str:
        # Decode with the piece before it, and the first one with the prompt: some tokenizers remove a leading space.
        old, new = tokenizer.decode(known[begin:shown]), tokenizer.decode(known[begin:])
        if begin == 0 and shown == len(prompt_ids):
            return _without_prompt(new, prompt, old) if new.startswith(old) else tokenizer.decode(known[shown:])
        return new[len(old) :]

    for number in ids:
        known.append(number)
        if tokenizer.is_open(number):
            continue
        text = added()
        if text and not text.endswith(UNFINISHED):
            yield text
            begin, shown = shown, len(known)
    if shown < len(known) and (text := added()):
        yield text


def _without_prompt(whole: str, prompt: str, base: str) -> str:
    """A text that begins with `base`, what the tokenizer makes of the prompt's ids, from the end of the prompt on.

    Where `base` lacks spaces that end the prompt, and the text has them, they count as the prompt's.
    """
    is_whole = prompt.startswith(base) and whole.startswith(prompt)
    return whole[len(prompt if is_whole else base) :]
