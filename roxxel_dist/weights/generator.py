"""Text from a trained model, whatever kind of folder it is in."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.model.generate import Sampling, generate_rows, known_ids, stream
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import largest_divisor
from roxxel_dist.settings.config import Config
from roxxel_dist.weights.hf_folder import end_ids, is_hf_folder
from roxxel_dist.weights.load import first_device, model_of, weights_of

UNFINISHED = "\ufffd"
"""A tokenizer's output for bytes that are not a character, or not yet a whole one."""


Say = Callable[[str], None]


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=3)


class Generator:
    """A trained model and its tokenizer, on the first device or, divided as in its run, on the first ones.

    The first call compiles; later ones with prompts within the same multiple of 64 tokens, and as many of them, do not.

    Args:
        path: a run directory, or RUN@STEP; an exported folder; or a Hugging Face folder with a model of a family
            in docs/model.md, whose prompts begin with the token that its tokenizer puts before a text.
        best: for a run, the checkpoint with the lowest val_loss, or the newest if none was validated. False: the
            newest.
        step: the checkpoint of this step instead.
        say: called with a line about what its tokenizer loses of a text, tokens of a prompt that are not read, texts
            that end at max_context, and devices of the run that are not here; by default it is a UserWarning.
        expert_devices: devices of this process that share the experts of a mixture, and divide them. None: as many as
            in the run, or the largest part of them that is here. The tokens are those of one device, but where two are
            alike to the last bits.
        tensor_devices: devices that share each matrix, likewise.
        fsdp_devices: devices that share the other parameters, which are gathered for each token: for a model that
            fits no device.

    Attributes:
        model: the module, with dropout off.
        tokenizer: text to ids and back.
        config: the `Config` of the run.
        step: of the checkpoint.
        start: the ids before each text: those of a Hugging Face folder's tokenizer, such as `<s>`; of a run none.
        stop_ids: the ids that end a text: the tokenizer's end-of-text, and those that a Hugging Face folder names in
            its generation_config.json, or else its config.json, as eos_token_id.

    Raises:
        ValueError: there is no such model, it has no tokenizer, the user-defined model cannot continue a text, or
            the devices that are asked for are not here.
    """

    model: Any
    tokenizer: Tokenizer
    config: Any
    step: int
    start: list[int]
    stop_ids: list[int]

    def __init__(
        self,
        path: str | Path,
        best: bool = True,
        *,
        step: int | None = None,
        say: Say = _warn,
        expert_devices: int | None = None,
        tensor_devices: int | None = None,
        fsdp_devices: int | None = None,
    ) -> None:
        self._path, self._say = str(path), say
        weights = weights_of(path, step=step, best=best)
        if weights.tokenizer is None:
            raise UserError(
                f"{path} has no tokenizer.json: it was trained on tokens alone, so there is no text to generate"
            )
        asked = {"fsdp_devices": fsdp_devices, "expert_devices": expert_devices, "tensor_devices": tensor_devices}
        mesh, fewer = mesh_for_text(weights.config, asked)
        if fewer:
            say(fewer)
        self.model, self.tokenizer = model_of(weights, path, mesh), Tokenizer.load(weights.tokenizer)
        self.config, self.step = weights.config, weights.step
        check_continues(self.model, self.config)
        self._known_V = known_ids(self.tokenizer.ids, self.config.vocab_size)
        # A run trains without a first token, whatever its tokenizer, so its model has not learned it.
        is_theirs = is_hf_folder(Path(path))
        self.start = self.tokenizer.text_start if is_theirs else []
        if lost := self.tokenizer.losses:
            say(lost)
        self.stop_ids = sorted({self.tokenizer.eos_id, *(end_ids(Path(path)) if is_theirs else ())})

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
        stop: str | Sequence[str] = (),
        stop_at_eos: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> str | list[str]:
        """Continue a prompt, or each of several; the result does not include the prompt.

        A prompt and its continuation are the text that the tokenizer makes of all ids together, as far as it gives the
        prompt back unchanged. An id that the tokenizer has no text for, as where the model's vocabulary is larger, is
        never drawn.

        A text ends where it and its prompt are max_context tokens.

        Args:
            prompt: text; if it is empty, the start of a document. Each prompt of a list is continued as if it were
                alone.
            max_new_tokens: tokens to add at most.
            temperature: 0 takes the likeliest token each time, 1 draws from the model's distribution.
            top_k: draw from this many of the likeliest tokens; 0 for all.
            top_p: draw from the fewest of the likeliest tokens that have this probability together; 1 for all.
            seed: of the draws: one for all prompts, so that equal prompts give equal texts, or one for each.
            stop: a text ends before the first of these texts in it.
            stop_at_eos: end a text at the first of `stop_ids`.
            truncate_prompt_tokens: read only this many tokens of a longer prompt, its last ones and `start`; by
                default max_context - 1.

        Returns:
            A text for a text, a list for a list.

        Raises:
            ValueError: an argument breaks its rule, or a prompt has characters that a char tokenizer does not know.
        """
        prompts = _listed(prompt)
        seeds = _listed(seed) if isinstance(seed, Iterable) else [seed] * len(prompts)
        if len(seeds) != len(prompts):
            raise UserError(f"seed has {len(seeds)} numbers for {len(prompts)} prompts: give one each, or one for all")
        sampling, stops = Sampling(temperature=temperature, top_k=top_k, top_p=top_p), _stop_texts(stop)
        if not prompts:
            return []
        ids = [self._ids(one) for one in prompts]
        read, line = self._read(ids, truncate_prompt_tokens)
        if line:
            self._say(line)
        rows = generate_rows(
            self.model, read, max_new_tokens, sampling=sampling, seeds=seeds, **self._limits(stop_at_eos)
        )
        texts, ended = [], 0
        for row, text, whole, kept in zip(rows, prompts, ids, read, strict=True):
            added = "".join(pieces(self.tokenizer, row, text, whole))
            texts.append("".join(cut_at_stop([added], stops)))
            ended += texts[-1] == added and self._is_full(len(kept), len(row), max_new_tokens)
        if ended:
            self._say(self._ended(ended, len(rows), max_new_tokens))
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
        stop: str | Sequence[str] = (),
        stop_at_eos: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> Iterator[str]:
        """The text of `generate`, in pieces as they are generated; no piece ends within a character.

        Arguments and errors are those of `generate`, for one prompt. What may begin a stop text is held back until it
        is known not to.

        Returns:
            An iterator of pieces, which together are the text.
        """
        sampling, stops = Sampling(temperature=temperature, top_k=top_k, top_p=top_p), _stop_texts(stop)
        ids = self._ids(prompt)
        [read], line = self._read([ids], truncate_prompt_tokens)
        if line:
            self._say(line)
        new = stream(self.model, read, max_new_tokens, sampling=sampling, seed=seed, **self._limits(stop_at_eos))

        def counted() -> Iterator[int]:
            count = 0
            for number in new:
                count += 1
                yield number
            if self._is_full(len(read), count, max_new_tokens):
                self._say(self._ended(1, 1, max_new_tokens))

        return cut_at_stop(pieces(self.tokenizer, counted(), prompt, ids), stops)

    def _ids(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise UserError(f"prompt is {prompt!r}: it must be a text, or a list of texts to generate")
        return [*self.start, *(self.tokenizer.encode(prompt) if prompt else [])] or [self.tokenizer.eos_id]

    def _read(self, prompts: Sequence[list[int]], asked: int | None) -> tuple[list[list[int]], str]:
        """(the ids that are read of each prompt, a line about those that are not). The first id of a text is read."""
        limit = self.config.max_context - 1
        if asked is not None and (not isinstance(asked, Integral) or not len(self.start) < asked <= limit):
            raise UserError(
                f"truncate_prompt_tokens is {asked!r}: it must be above {len(self.start)} and at most {limit}, which "
                f"is max_context - 1; a whole number"
            )
        most, line = limit if asked is None else int(asked), ""
        if cut := [len(ids) - most for ids in prompts if len(ids) > most]:
            which = f"the prompt has {len(prompts[0]):,} tokens"
            if len(prompts) > 1:
                which = f"{len(cut):,} of {len(prompts):,} prompts have too many tokens"
            line = (
                f"{which}: {sum(cut):,} at the beginning are not read, only the last {most:,} (max_context is "
                f"{self.config.max_context:,})"
            )
        begin = min(len(self.start), most - 1)
        return [ids if len(ids) <= most else [*ids[:begin], *ids[begin - most :]] for ids in prompts], line

    def _is_full(self, prompt: int, new: int, asked: int) -> bool:
        """Whether a text ended because max_context has no place for another token."""
        return new < asked and prompt + new >= self.config.max_context

    def _ended(self, count: int, texts: int, asked: int) -> str:
        which = "the text" if texts == 1 else f"{count:,} of {texts:,} texts"
        return (
            f"{which} ended at max_context, {self.config.max_context:,} tokens with the prompt, before "
            f"max_new_tokens, {asked:,}"
        )

    def _limits(self, stop_at_eos: bool) -> dict[str, Any]:
        return {
            "max_context": self.config.max_context,
            "stop_ids": self.stop_ids if stop_at_eos else (),
            "known_V": self._known_V,
        }


def _stop_texts(stop: str | Sequence[str]) -> list[str]:
    stops = _listed(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UserError(f"stop has {text!r}: it must be a text that is not empty, or a list of such texts")
    return stops


def cut_at_stop(parts: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """The pieces of a text, up to the first of some stop texts in it, which may lie across several pieces.

    The first one begins before the others, whatever the pieces: where one may begin before another that is whole, it
    is waited for.
    """

    def first(text: str) -> int:
        return min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))

    held, longest = "", max(map(len, stops), default=1)
    for part in parts:
        held += part
        end = first(held)
        # Where a stop text may begin that is not whole yet.
        begins = range(max(0, len(held) - longest + 1), end)
        kept = next((place for place in begins if any(stop.startswith(held[place:]) for stop in stops)), end)
        if kept:
            yield held[:kept]
        if kept == end < len(held):
            return
        held = held[kept:]
    if held := held[: first(held)]:
        yield held


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
    Where `base` lacks spaces that end the prompt, and the text has them, they count as the prompt's."""
    is_whole = prompt.startswith(base) and whole.startswith(prompt)
    return whole[len(prompt if is_whole else base) :]


def mesh_for_text(config: Config, asked: Mapping[str, int | None]) -> tuple[Mesh, str]:
    """(the devices of this process that a model lies on to generate text, a line where they are fewer than in its run).

    `asked` has "fsdp_devices", "expert_devices" and "tensor_devices". None: of experts and tensor as many as in the
    run, or the largest part of them that is here; of fsdp 1, as a text gathers the parameters for each token. Raises
    UserError: fewer devices are here than are asked for, or they do not divide the experts.
    """
    here, cut = jax.local_devices(), list[str]()
    for name, value in asked.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: it must be at least 1")
    sizes = {name: asked.get(name) or 1 for name in ("fsdp_devices", "expert_devices", "tensor_devices")}
    if (given := math.prod(sizes.values())) > len(here):
        words = " x ".join(f"{name} ({size})" for name, size in sizes.items() if size > 1)
        raise UserError(
            f"{words} is {given} devices, and this process has {len(here)}: use fewer; a model that is not divided "
            f"takes one"
        )
    for name in ("tensor_devices", "expert_devices"):
        if asked.get(name) is None and (wanted := getattr(config, name)) > 1:
            sizes[name] = largest_divisor(wanted, len(here) // math.prod(sizes.values()))
            if sizes[name] < wanted:
                cut.append(
                    f"{name} is {sizes[name]}, and was {wanted} in the run: this process has {len(here)} device(s)"
                )
    experts = sizes["expert_devices"]
    if config.model is None and experts > 1 and (not config.use_moe or config.n_experts % experts):
        count = config.n_experts if config.use_moe else 0
        raise UserError(f"expert_devices is {experts}: it must divide the experts of the model, which has {count}")
    fsdp, expert, tensor = sizes.values()
    devices = here[: math.prod(sizes.values())]
    return make_mesh(fsdp=fsdp, expert=expert, tensor=tensor, devices=devices), "; ".join(cut)


def check_continues(model: Any, config: Any) -> None:
    """Raises ValueError if a user-defined model cannot continue a text: it must map tokens to logits."""
    if config.model is None:
        return
    graphdef, state = nnx.split(model)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)  # whatever devices have it
    rule = f"to generate, a model takes int32[1, L] tokens alone and returns [1, L, {config.vocab_size}] logits"
    tokens = np.zeros((1, config.max_context), np.int32)
    try:
        with jax.set_mesh(first_device()):
            logits = jax.eval_shape(lambda state, tokens: nnx.merge(graphdef, state)(tokens), state, tokens)
    except Exception as error:
        raise UserError(f"model is {config.model!r}: {rule}, and this one says {error!r}") from error
    shape = getattr(logits, "shape", type(logits).__name__)
    if shape != (1, config.max_context, config.vocab_size):
        raise UserError(f"model is {config.model!r}: {rule}, and for L = {config.max_context} it returns {shape}")
