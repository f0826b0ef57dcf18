"""The metadata of a run: the section `record` of its config.yaml. It is read without jax."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from roxxel_dist.data.files.discovery import absolute, is_tokens
from roxxel_dist.model.config import AttentionKernel
from roxxel_dist.place.directory import CONFIG, DATA
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import RECORD, load_yaml

PACKAGES = ("roxxel-dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """The environment and the origin of a run: the section `record` of its config.yaml."""

    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    """The commit of the working folder, with "+changes" if files differ from it."""
    processes: int = 1
    devices: int = 1
    platform: str = ""
    pjrt_nproc: int | None = None
    """Threads of XLA's pool, which decide bits."""
    data_path: str | None = None
    corpus: str | None = None
    """The fingerprint of the data."""
    program: str | None = None
    """The Python program whose `Trainer` of parts trains the run; None for a run of `train`."""
    forked_from: dict[str, Any] | None = None
    """"run" and "step" of the checkpoint whose whole state the run starts with."""
    initialized_from: dict[str, Any] | None = None
    """"run" and "step" of the checkpoint with the initial weights, or with the base of the adapters."""
    merged_from: dict[str, Any] | None = None
    """"run", "steps", "weights" and "shares" of the checkpoints whose mean this is; it was not trained."""
    bits: dict[str, Any] = field(default_factory=dict)
    """Settings that change results in the last bits, see `determinism.numerics_fingerprint`."""
    resumes: list[dict[str, Any]] = field(default_factory=list)
    """For each resume: "step", "commit", "bits", "changed_from" (old values by field), and the step that it went back
    from."""

    @classmethod
    def from_config(cls, saved: Mapping[str, Any]) -> Self:
        """The metadata in the saved config of a run; the defaults if it has none."""
        record = saved.get(RECORD, {})
        return cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})

    @classmethod
    def now(cls, kernel: AttentionKernel, **values: Any) -> Self:
        """The metadata of this process and its environment; `kernel` is the attention kernel."""
        import jax

        from roxxel_dist.cluster import determinism

        return cls(
            versions={name: version(name) for name in PACKAGES}, git_commit=git_commit(Path.cwd()),
            processes=jax.process_count(), devices=jax.device_count(), platform=jax.devices()[0].platform,
            pjrt_nproc=int(os.environ["PJRT_NPROC"]) if "PJRT_NPROC" in os.environ else None,
            bits=determinism.numerics_fingerprint() | {"attention": kernel}, **values,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, without those that are not set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, []) or name == "git_commit"}


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with "+changes" if files differ from it; None outside of git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def saved_config(run: Path) -> dict[str, Any]:
    """The saved config of a run with its record, and with an absolute `init_from`; empty if there is no run.

    Raises UserError for a part of a config: fields that it lacks would have other values than those of the run.
    """
    if not (run / CONFIG).exists():
        return {}
    saved = load_yaml(run / CONFIG)
    if RECORD not in saved:  # it is the last key
        what = "does not end with the record of a run" if saved else "is empty"
        raise UserError(f"{run / CONFIG} {what}: copy it again")
    init_from = saved.get("init_from")
    return {**saved, "init_from": absolute(init_from)} if isinstance(init_from, str) else saved


def data_of(saved: Mapping[str, Any], run: Path | None) -> str | None:
    """The path of a run's data: the shards made of text in its folder `run`, or the path in its config."""
    if run is not None and is_tokens(local_run(run) / DATA):
        return str(local_run(run) / DATA)
    return RunMetadata.from_config(saved).data_path
