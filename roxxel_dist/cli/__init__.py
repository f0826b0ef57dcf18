"""The command line: one small function a sub-command, nothing that computes.

What `--help` touches imports neither jax nor numpy, so that it answers at once.
"""

import contextlib
import dataclasses
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence

import tyro

from roxxel_dist.cli.arguments import Switch, as_flags, parse, parse_train, steps_to_skip
from roxxel_dist.cli.data import data_build, data_info, data_verify
from roxxel_dist.cli.doctor import doctor
from roxxel_dist.cli.eval import evaluate
from roxxel_dist.cli.export import export
from roxxel_dist.cli.find_lr import find_lr
from roxxel_dist.cli.generate import generate
from roxxel_dist.cli.jobs import attach, logs, ps, stop
from roxxel_dist.cli.kubernetes import launch_k8s
from roxxel_dist.cli.launch import command_of
from roxxel_dist.cli.member import launch_member
from roxxel_dist.cli.plan import plan
from roxxel_dist.cli.ray import launch_ray
from roxxel_dist.cli.report import report
from roxxel_dist.cli.slurm import launch_slurm
from roxxel_dist.cli.sweep import sweep
from roxxel_dist.cluster import interrupt
from roxxel_dist.cluster.exit_codes import EXIT_DRAINED, EXIT_FAILED, EXIT_FILES, EXIT_USAGE, FileSystemError
from roxxel_dist.config import UsageError, usage_errors

Command = Callable[[list[str]], int]


def main(argv: Sequence[str]) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    words = list(argv)
    if words[:1] == ["--version"]:
        from roxxel_dist import __version__

        print(f"roxxel-dist {__version__}")
        return 0
    if words[:1] and words[0] in HEAR_THEMSELVES:
        interrupt.end()
    # It warns where HOME cannot be written, and does without.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        _check_text(words)
        return _dispatch("", COMMANDS, words)
    except UsageError as error:
        print(f"roxxel-dist: {as_flags(str(error))}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except FileSystemError as error:
        print(f"roxxel-dist: {as_flags(str(error))}", file=sys.stderr, flush=True)
        return EXIT_FILES
    except KeyboardInterrupt:
        return 130


def _check_text(words: list[str]) -> None:
    """Raises UsageError for names that the locale makes no text of: they could not be written down in any file."""
    folder = ""
    with contextlib.suppress(FileNotFoundError):
        folder = os.getcwd()
    for text in (*words, folder):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{text!a} is no text in this locale ({sys.getfilesystemencoding()}), and a run is written in UTF-8: "
                f"set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
            ) from error


def _dispatch(group: str, table: dict[str, Command], words: list[str]) -> int:
    """Call the command that the first word names, or tell which there are."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(group, table))
        return 0 if words else EXIT_USAGE
    word, full = words[0], f"{group} {words[0]}".strip()
    if word in table:
        return table[word](words[1:])
    near = difflib.get_close_matches(word, table, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(table)}"
    raise UsageError(f"there is no command {full!r}: {hint}")


def _overview(group: str, table: dict[str, Command]) -> str:
    width = max(map(len, table))
    lines = [
        f"  {name:<{width}}  {(command.__doc__ or '').splitlines()[0].rstrip('.')}" for name, command in table.items()
    ]
    name = f"roxxel-dist {group}".strip()
    what = (ABOUT.get(group) or "") + "\n\n"
    return (
        f"usage: {name} COMMAND …\n\n{what}"
        + "\n".join(lines)
        + f"\n\n`{name} COMMAND --help` tells the options of a command."
    )


ABOUT = {
    "": "Launch, feed and train language models in JAX and Flax NNX on many hosts.",
    "data": "Tokens on disk.",
    "launch": "Start one program as many processes that know each other, and watch over them.",
}


def train(words: list[str]) -> int:
    """Train a model through a curriculum, on all the processes this one belongs to."""
    with usage_errors():
        args, config = parse_train(words)
        skipped = steps_to_skip(args.skip_steps)
    from roxxel_dist.data.verified import DamagedData
    from roxxel_dist.experiment import Experiment
    from roxxel_dist.train.badstep import BadStep
    from roxxel_dist.train.checkpoint import SaveError

    experiment = Experiment(config)
    try:
        experiment.fit(
            args.data_path, args.run_dir, args.resume, args.amend,
            fork=args.fork, from_step=args.from_step, skip_steps=skipped,
        )  # fmt: skip
    except (BadStep, DamagedData, SaveError) as problem:  # no fault of the program: its log has the traceback
        print(f"roxxel-dist: {as_flags(str(problem))}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_DRAINED if experiment.stopped else 0


def data(words: list[str]) -> int:
    """Make, describe and check shards of tokens: build, info, verify."""
    return _dispatch("data", {"build": data_build, "info": data_info, "verify": data_verify}, words)


def launch(words: list[str]) -> int:
    """Start a program as many processes and watch over them: local, ssh, slurm, ray, k8s, member."""
    from roxxel_dist.launcher.backends import options

    made = {name: command_of(name, kind) for name, kind in options().items()}
    own = {"slurm": launch_slurm, "ray": launch_ray, "k8s": launch_k8s, "member": launch_member}
    return _dispatch("launch", made | own, words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchArgs:
    """Print what one step reads."""

    source: tyro.conf.Positional[str]
    """A run directory, or a config file."""
    step: int
    """The step, counted from 1 as in the log."""
    data_path: str | None = None
    """The shards; a run remembers its own."""
    text: Switch = False
    """The whole rows, decoded, instead of how they begin."""


def batch(words: list[str]) -> int:
    """Print what one step reads: data set, shard, document, text."""
    args = parse(BatchArgs, words, "batch")
    with usage_errors():
        from roxxel_dist.reading import describe_batch

        print(describe_batch(args.source, args.step, args.data_path, text=args.text))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveArgs:
    """Ask a running job for a checkpoint at its next logged step, and wait until it is on disk; 1 if it is not."""

    run: tyro.conf.Positional[str]
    """The run directory that the job trains in."""
    timeout: float = 600.0
    """Seconds to wait."""


def save(words: list[str]) -> int:
    """Ask a running job for a checkpoint at its next logged step."""
    args = parse(SaveArgs, words, "save")
    with usage_errors():
        from roxxel_dist.save import NotSaved, ask_for_checkpoint

        try:
            step = ask_for_checkpoint(args.run, args.timeout)
        except NotSaved as problem:
            print(f"roxxel-dist: {problem}", file=sys.stderr)
            return EXIT_FAILED
    print(f"saved: step {step}")
    return 0


HEAR_THEMSELVES = frozenset({"sweep", "launch", "ps", "logs", "attach", "stop", "save", "doctor"})
"""Commands that wait for other processes, and tell or ask them something when they are interrupted."""
COMMANDS: dict[str, Command] = {
    "data": data,
    "batch": batch,
    "train": train,
    "find-lr": find_lr,
    "plan": plan,
    "save": save,
    "eval": evaluate,
    "generate": generate,
    "export": export,
    "report": report,
    "sweep": sweep,
    "launch": launch,
    "doctor": doctor,
    "ps": ps,
    "logs": logs,
    "attach": attach,
    "stop": stop,
}
