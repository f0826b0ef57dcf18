"""A trained model for lm-evaluation-harness (the extra `lm-eval`), as the model "roxxel_dist".

`python -m roxxel_dist.weights.lm_eval run --model roxxel_dist --model_args run=runs/first --tasks hellaswag` is the
harness's own command, which has no way to be told of a model otherwise. In Python, import this module and then use
`lm_eval.simple_evaluate`.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.determinism import enable_compilation_cache
from roxxel_dist.data.tasks import ScoredRow, length_for, pad_scored, row_of, windows
from roxxel_dist.model.generate import mesh_of
from roxxel_dist.process.exit_codes import EXIT_USAGE, UserError, pip_install
from roxxel_dist.weights.generator import Generator

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
except ImportError as _error:
    MISSING = f"the package lm_eval is not installed: {pip_install('lm-eval')}"
    if __name__ == "__main__":
        print(f"roxxel-dist: {MISSING}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    raise ImportError(MISSING) from _error

NEW_TOKENS = 256
"""Of a continuation, where the task does not say how many; at most half of max_context."""


@register_model("roxxel_dist")
class _RoxxelDist(TemplateLM):
    """A run, an exported folder or a Hugging Face folder, on the first device.

    Args:
        run: as `Generator` takes it: RUN, RUN@STEP, or a folder.
        best: for a run, the checkpoint with the lowest val_loss instead of the newest.
        batch_size: rows at once; "auto" is 8.
        others: what the harness gives every model; of its `device`, jax decides here.
    """

    def __init__(self, run: str, best: bool = False, batch_size: int | str = 8, **others: Any) -> None:
        super().__init__()
        if unknown := others.keys() - {"device", "max_batch_size"}:
            raise UserError(f"model_args has {min(unknown)}: it must be run, best or batch_size")
        self.batch_size: int = int(batch_size) if str(batch_size).isdecimal() else 8
        enable_compilation_cache()
        self._made = Generator(run, best=bool(best))
        self.max_length: int = self._made.config.max_context
        graphdef, self._state = nnx.split(self._made.model)
        self._score: Callable[..., Any] = partial(jax.jit(_score, static_argnums=0), graphdef, self._state)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self._made.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: as its tokenizer begins a text, else end-of-text."""
        return self._made.start[-1] if self._made.start else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The fingerprint of the tokenizer: of the harness's cache."""
        return self._made.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, after those that begin a text unless `add_special_tokens` is False."""
        return [*([] if add_special_tokens is False else self._made.start), *self._made.tokenizer.encode(string)]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether each token is the likeliest) of (texts, context ids, continuation ids)."""
        return self._scores([row_of(context, continuation, self.max_length) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of max_context."""
        texts = [self.tok_encode(one.args[0], add_special_tokens=False) for one in requests]
        rows = [list(windows(ids, self.prefix_token_id, self.max_length)) for ids in texts]
        found = iter(self._scores(list(itertools.chain(*rows))))
        return [sum(score for score, _ in itertools.islice(found, len(of_text))) for of_text in rows]

    def _scores(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))  # so that batches have little padding
        for numbers in _batches(order, self.batch_size):
            chosen = [rows[i] for i in numbers]
            arrays = pad_scored(chosen, (self.batch_size, length_for(chosen, self.max_length) + 1))
            with mesh_of(self._state):
                sums, greedy = (array.tolist() for array in jax.device_get(self._score(*arrays)))
            found |= dict(zip(numbers, zip(sums, greedy, strict=True), strict=False))  # without the empty rows
        return [found[i] for i in range(len(rows))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each up to the first of the texts that end it, or to end-of-text."""
        found: dict[int, str] = {}
        asked = [one.args for one in requests]
        order = sorted(range(len(asked)), key=lambda i: (repr(asked[i][1]), -len(asked[i][0])))
        for _, numbers in itertools.groupby(order, key=lambda i: repr(asked[i][1])):
            for batch in _batches(list(numbers), self.batch_size):
                options = asked[batch[0]][1]
                texts = self._continued([asked[i][0] for i in batch], options)
                found |= dict(zip(batch, texts, strict=True))
        return [found[i] for i in range(len(asked))]

    def _continued(self, prompts: list[str], options: dict[str, Any]) -> list[str]:
        given = (options.get(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens"))
        count = next((int(number) for number in given if number is not None), NEW_TOKENS)
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        until = options.get("until") or []
        room = min(count, self.max_length // 2)  # the harness cuts a prompt that leaves too little
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        top_k, top_p = int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
        sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop}
        return list(self._made.generate(prompts, room, **sampling, truncate_prompt_tokens=self.max_length - room))


def _score(graphdef: Any, state: Any, tokens_BxL: jax.Array, scored_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[B], bool[B]: the log-likelihood of the scored tokens, and whether each of them is the likeliest."""
    logits_BxLxV = nnx.merge(graphdef, state, copy=True)(tokens_BxL[:, :-1]).astype(jnp.float32)
    targets_BxL, counted_BxL = tokens_BxL[:, 1:], scored_BxL[:, 1:] != 0
    losses_BxLxV = jax.nn.log_softmax(logits_BxLxV)
    found_BxL = jnp.take_along_axis(losses_BxLxV, targets_BxL[..., None], axis=-1)[..., 0]
    greedy_BxL = jnp.where(counted_BxL, logits_BxLxV.argmax(-1) == targets_BxL, True)
    return jnp.where(counted_BxL, found_BxL, 0).sum(1), greedy_BxL.all(1)


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for begin in range(0, len(numbers), size):
        yield numbers[begin : begin + size]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
