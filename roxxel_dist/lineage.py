"""What a run takes over from the one that it comes from: its config, its data, its tokenizer."""

from pathlib import Path
from typing import Any

from roxxel_dist.config import RECORD, load_yaml
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import is_tokens
from roxxel_dist.data.tokenizer import Tokenizer
from roxxel_dist.run_directory import CONFIG, DATA, TOKENIZER
from roxxel_dist.train.origin import RunStep, run_step


def saved_config(run: Path) -> dict[str, Any]:
    """The config that a run keeps, its record included; empty where there is no run."""
    return load_yaml(run / CONFIG) if (run / CONFIG).exists() else {}


def forked_from(fork: str | None, saved: dict[str, Any], run: Path) -> RunStep | None:
    """The checkpoint that a run is forked from: the one that is named, or the one that its config remembers.

    Args:
        fork: RUN@STEP.
        saved: the config of the run in `run`, where there is one.
        run: the new run's folder.

    Raises:
        ValueError: no run is named, or the run is there already and comes from elsewhere.
    """
    recorded = saved.get(RECORD, {}).get("forked_from")
    known = RunStep(Path(recorded["run"]), recorded["step"]) if recorded else None
    if fork is None:
        return known
    given = run_step(fork)
    if given.run.absolute() == run.absolute():
        raise ValueError(f"fork is {given}, and run_dir is the same run: a fork needs a run_dir of its own")
    if saved and (known is None or (given.run.absolute(), given.step) != known):
        came = f"was forked from {known}" if known else "is no fork"
        raise ValueError(f"fork is {given}, and the run in {run} {came}: leave fork out, or name another run_dir")
    if not (given.run / CONFIG).exists():
        raise ValueError(f"fork is {given}: {given.run} is not a run directory, it has no {CONFIG}")
    return given


def data_of(saved: dict[str, Any], run: Path | None) -> str | None:
    """Where the data of a run is: the shards in its folder `run`, made of text, or what its config remembers."""
    if run is not None and is_tokens(run / DATA):
        return str(run / DATA)
    return saved.get(RECORD, {}).get("data_path")


def tokenizer_of(init_from: str) -> Path:
    """The tokenizer of the run that a new one has its weights from.

    Raises:
        ValueError: it has none.
    """
    run = run_step(init_from).run
    if not (run / TOKENIZER).exists():
        raise ValueError(
            f"init_from is {init_from}: {run} has no {TOKENIZER}, so text cannot become the tokens that it knows; name "
            f"another run, or train on shards"
        )
    return run / TOKENIZER


def check_tokenizer(init_from: str, data: Roxxel) -> None:
    """Raises ValueError if the data was made with another tokenizer than the run that the weights come from."""
    path = run_step(init_from).run / TOKENIZER
    if not path.exists() or data.tokenizer_fingerprint is None:
        return
    known = Tokenizer.load(path).fingerprint
    if data.tokenizer_fingerprint != known:
        raise ValueError(
            f"init_from is {init_from}, whose tokenizer is {known}, and the data was made with "
            f"{data.tokenizer_fingerprint}: build the data with {path}"
        )
