"""The curriculum of a Config, over the part of the data that is trained on, and its named data sets. No jax."""

from collections.abc import Mapping
from typing import Any

from roxxel_dist.config import Config
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import NoShardsError, is_tokens


def build_curriculum(config: Config, data: Roxxel) -> tuple[Curriculum, Roxxel]:
    """(phases over the training part of the data, the held-out part).

    Raises:
        ValueError: a phase breaks its rules, or reads more tokens than the model does.
    """
    max_context = config.max_context
    phases: list[Any] = config.phases or [
        Phase(epochs=config.epochs, batch_size=config.batch_size * config.grad_accum, seq_len=max_context + 1)
    ]
    curriculum = Curriculum(data, phases, blended_sets(config, data))
    curriculum, held_out = curriculum.hold_out(0 if config.validation else config.val_fraction)
    for i, phase in enumerate(curriculum.phases):
        if (phase.seq_len or 0) > max_context + 1:
            raise ValueError(
                f"phase {i + 1}: seq_len is {phase.seq_len}, and the model reads at most max_context + 1 = "
                f"{max_context + 1} tokens, target included: use a larger max_context or a smaller seq_len"
            )
    return curriculum, held_out


def blended_sets(config: Config, data: Roxxel) -> dict[str, Roxxel]:
    """The data sets of the config's `datasets` by name, without "self", which is `data`.

    Raises:
        ValueError: one is no data set, or was made with another tokenizer than `data`.
    """
    others = {name: path for name, path in (config.datasets or {}).items() if name != "self"}
    return _opened("datasets", others, data)


def validation_sets(config: Config, data: Roxxel) -> dict[str, Roxxel]:
    """The data sets of the config's `validation` by name; none where it names none.

    Raises:
        ValueError: one is no data set, or was made with another tokenizer than `data`.
    """
    return _opened("validation", config.validation or {}, data)


def check_named_sets(config: Config) -> None:
    """Raises ValueError where `datasets`, but for "self", or `validation` names what are no shards."""
    for field, paths in (("datasets", config.datasets), ("validation", config.validation)):
        for name, path in (paths or {}).items():
            if field == "validation" or name != "self":
                _check_shards(field, name, path)


def _check_shards(field: str, name: str, path: str) -> None:
    if not is_tokens(path):
        raise NoShardsError(
            f"{field} {name!r} is {path}: there are no shards. Check the path; text becomes shards with "
            f"`roxxel-dist data build {path} --out DIR`, and the tokenizer.json of the data to train on"
        )


def _opened(field: str, paths: Mapping[str, str], data: Roxxel) -> dict[str, Roxxel]:
    sets = {}
    for name, path in paths.items():
        _check_shards(field, name, path)
        sets[name] = one = Roxxel(path)
        prints = data.tokenizer_fingerprint, one.tokenizer_fingerprint
        if None not in prints and prints[0] != prints[1]:
            raise ValueError(
                f"{field} {name!r} was made with tokenizer {prints[1]}, the data to train on with {prints[0]}: "
                f"build both with the same tokenizer.json"
            )
    return sets
