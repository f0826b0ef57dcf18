"""The batch of one step of a run: where each row comes from, and how it begins. No jax."""

from pathlib import Path

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, META, CheckpointMetadata, MetaFile
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.input.stream import locate_token
from roxxel_dist.place.directory import CONFIG, DATA, has_config, is_run, no_run
from roxxel_dist.place.run_place import bucket_folder
from roxxel_dist.process.durable import FormatError
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.curriculum import build_curriculum, open_data_sets
from roxxel_dist.settings.config import RECORD, Config, load_yaml
from roxxel_dist.utils.voice import argument

SHOWN = 60


def saved_metadata(run: Path) -> CheckpointMetadata | None:
    """What the newest checkpoint of a run says; None without a checkpoint."""
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
