"""The curriculum of a Config, over the training part of the data, its named data sets, and the batch of one step of a
run: where each row comes from, and how it begins. No jax.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, META, CheckpointMetadata, MetaFile
from roxxel_dist.curriculum.phases import Curriculum, Phase, all_phases
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import check_batches
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import NoShardsError, is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.verify import check_sampled_ids
from roxxel_dist.input.stream import locate_token
from roxxel_dist.place.directory import CONFIG, DATA, has_config, is_run, no_run
from roxxel_dist.place.run_place import bucket_folder
from roxxel_dist.process.durable import FormatError
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import RECORD, Config, load_yaml
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.utils.voice import argument

SetField = Literal["datasets", "validation"]


def build_curriculum(config: Config, data: Roxxel) -> tuple[Curriculum, Roxxel]:
    """(phases over the training part of the data, the held-out part); raises ValueError for an impossible phase."""
    max_context = config.max_context
    phases: list[Any] = config.phases or [
        Phase(epochs=config.epochs, batch_size=config.batch_size, seq_len=max_context + 1)
    ]
    curriculum = Curriculum(data, phases, open_data_sets(config, "datasets", data), passes=config.passes)
    curriculum, held_out = curriculum.hold_out(0 if config.validation else config.val_fraction)
    for i, phase in enumerate(curriculum.phases):
        if (phase.seq_len or 0) > max_context + 1:
            raise UserError(
                f"phase {i + 1}: seq_len is {phase.seq_len}, and the model reads at most max_context + 1 = "
                f"{max_context + 1} tokens, target included: use a larger max_context or a smaller seq_len"
            )
    return curriculum, held_out


def check_data(config: Config, data_path: str | Path | None, *, trial: bool = False) -> None:
    """Raises what a training of `config` would raise of its data sets, blends and phases. Nothing is written.

    For what shows a training before it runs, without jax. Text is looked for and not read, so that neither its length
    nor its vocabulary is known. Phases on the weights of `init_from` are not compared with their context. In a `trial`
    of a sweep, which shortens its warm-up, that is not compared with the length of the run.
    """
    path = config.primary_path(data_path)
    for field in ("datasets", "validation"):
        shard_paths(config, field)
    phases = all_phases(config.phases or ())
    batches = phases or [Phase(epochs=config.epochs, batch_size=config.batch_size, seq_len=config.max_context + 1)]
    check_batches([phase.shape for phase in batches], config.grad_accum)
    if phases and all(phase.steps for phase in phases) and not trial:
        config.part(OptimizerConfig).settings(sum(phase.steps or 0 for phase in phases))
    if path is None or not is_tokens(path):
        if path is not None and not Path(path).exists():
            here = "" if os.path.isabs(path) else f" in {os.getcwd()}"
            raise UserError(f"data_path {path}: no such file or folder{here}: check the path")
        if path is not None and Path(path).is_dir() and not any(files for _, _, files in os.walk(path)):
            raise UserError(f"data_path {path}: there is no file in this folder: name text files, or a folder of them")
        return
    with ExitStack() as held:
        data = held.enter_context(Roxxel(path, dtype=config.data_dtype, remote=config.part(RemoteConfig)))
        sets = {"self": data, **open_data_sets(config, "validation", data)}
        if config.init_from is None:
            curriculum, _ = build_curriculum(config, data)
            curriculum.plan(config.seed)
            if not trial:
                config.part(OptimizerConfig).settings(curriculum.total_steps)
            sets |= curriculum.mix_streamers
        if config.init_from is None:
            check_vocabularies(sets, vocabulary_size(config, data))


def vocabulary_size(config: Config, data: Roxxel) -> int:
    """Token ids of the model. Raises UserError where nothing says them, or the data has more."""
    size = config.vocab_size or data.vocab_size
    if size is None:
        raise UserError("the shards do not say how large their vocabulary is: give vocab_size=N")
    if data.vocab_size is not None and size < data.vocab_size:
        raise UserError(
            f"vocab_size is {size}, but the data has {data.vocab_size} tokens: leave it out, or use at least "
            f"{data.vocab_size}"
        )
    return size


def check_vocabularies(sets: Mapping[str, Roxxel], vocab_size: int) -> None:
    """Raises ValueError for a data set with token ids of `vocab_size` or above."""
    for name, data_set in sets.items():
        if (data_set.vocab_size or 0) > vocab_size:
            raise UserError(
                f"the data {name!r} has {data_set.vocab_size} tokens, and vocab_size is {vocab_size}: build it with "
                f"the tokenizer of the data to train on, or use a larger vocab_size"
            )
        check_sampled_ids(data_set, vocab_size)


def open_data_sets(config: Config, field: SetField, data: Roxxel) -> dict[str, Roxxel]:
    """The data sets in `datasets` or `validation`, without "self", which is `data`. Raises ValueError if a path has no
    data set, or one made with another tokenizer than `data`."""
    remote = config.part(RemoteConfig)
    paths = shard_paths(config, field)
    sets = {name: Roxxel(path, dtype=config.data_dtype, remote=remote) for name, path in paths.items()}
    for name, data_set in sets.items():
        prints = data.tokenizer_fingerprint, data_set.tokenizer_fingerprint
        if None not in prints and prints[0] != prints[1]:
            raise UserError(
                f"{field} {name!r} was made with tokenizer {prints[1]}, the data to train on with {prints[0]}: "
                f"build both with the same one: `roxxel-dist data build … --tokenizer PATH/tokenizer.json`"
            )
    return sets


def shard_paths(config: Config, field: SetField) -> dict[str, str]:
    """The paths in `datasets` or `validation`, without "self"; raises ValueError if one has no shards."""
    paths = {
        name: path for name, path in (getattr(config, field) or {}).items() if (field, name) != ("datasets", "self")
    }
    for name, path in paths.items():
        if not is_tokens(path):
            raise NoShardsError(
                f"{field} {name!r} is {path}: there are no shards. Check the path; text becomes shards with "
                f"`roxxel-dist data build {path} --out DIR`, and the tokenizer.json of the data to train on"
            )
    return paths


SHOWN = 60


def saved_metadata(run: Path) -> CheckpointMetadata | None:
    """The metadata of the newest checkpoint of a run; None without a checkpoint."""
    return _metadata_of(_newest(run))


def _newest(run: Path) -> Path | None:
    files = [path for path in run.glob(f"{CHECKPOINTS}/*/{META}") if path.parent.name.isdigit()]
    return max((path.parent for path in files), key=lambda checkpoint: int(checkpoint.name), default=None)


def _metadata_of(checkpoint: Path | None) -> CheckpointMetadata | None:
    if checkpoint is None:
        return None
    try:
        metadata = CheckpointMetadata.from_dict(MetaFile.read(checkpoint).meta)
        Plan.from_state(metadata.plan)  # one that a program's `Checkpointer` saved has none
        return metadata
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint / META} has no plan of a run, or is damaged: `roxxel-dist verify {checkpoint.parents[1]}` "
            f"checks all checkpoints; without the folder {checkpoint} the one before it is used"
        ) from error


def _local(source: str | Path) -> tuple[Path, Path | None]:
    """(A run or a config file on this host, the run's newest checkpoint); a run in a bucket is copied to a local
    folder."""
    bucket = bucket_folder(source)
    if bucket is None:
        folder = Path(source)
        if folder.is_dir() and not has_config(folder):
            raise UserError(no_run(folder))
        return folder, _newest(folder)
    folder = bucket.pull()
    if not is_run(folder):
        raise UserError(no_run(folder, str(bucket)))
    return folder, bucket.pull_newest_meta()


def describe_batch(source: str | Path, step: int, data_path: str | Path | None = None, *, text: bool = False) -> str:
    """The rows that a step reads, a line each: data set, token, shard, document, and how the row begins.

    Steps count from 1, as in the log. The source is a config file, or a run directory, which records its shards and may
    be in a bucket. With `text`, whole rows are decoded.
    """
    named, (source, newest) = source, _local(source)
    path = source / CONFIG if source.is_dir() else source
    recorded = load_yaml(path).get(RECORD, {})
    config = Config.from_yaml(path)
    config.validate()
    if data_path is None and is_tokens(source / DATA):
        data_path = source / DATA
    elif data_path is None:
        data_path = config.primary_path(None) or recorded.get("data_path")
    if data_path is None or not is_tokens(data_path):
        raise UserError(f"{named} does not say which shards it reads: name them with {argument('data_path', 'PATH')}")
    with Roxxel(data_path, dtype=config.data_dtype, remote=config.part(RemoteConfig)) as data:
        saved = _metadata_of(newest)
        plan = build_curriculum(config, data)[0].plan(config.seed) if saved is None else Plan.from_state(saved.plan)
        if not 1 <= step <= plan.total_steps:
            raise UserError(f"step {step}: the plan has steps 1 to {plan.total_steps}")
        rows = plan.rows(step - 1)
        sets = {"self": data, **open_data_sets(config, "datasets", data)}
        lines = [
            f"step {step} of {plan.total_steps}, phase {plan.phase(step - 1) + 1} of {len(plan.shapes)}: "
            f"{len(rows.offset)} rows x {rows.seq_len} tokens"
        ]
        for row, offset in enumerate(rows.offset.tolist()):
            name = plan.datasets[rows.dataset[row]]
            if name not in sets:
                raise UserError(f"step {step} reads the data set {name!r}, and datasets in {path} does not name it")
            place = locate_token(sets[name], offset)
            ids = sets[name].read(rows.offset[row : row + 1], rows.seq_len)[0].tolist()
            text_of_row = data.tokenizer.decode(ids) if data.tokenizer else " ".join(map(str, ids))
            where = f"{name} token {offset:,} ({place.path.name}, document {place.document}, +{place.position:,})"
            lines.append(f"row {row}: {where}" + (f"\n{text_of_row}" if text else f": {text_of_row[:SHOWN]!r}"))
    return "\n".join(lines)
