"""The command line: one small function a sub-command, nothing that computes.

What `--help` touches imports neither jax nor numpy, so that it answers at once.
"""

import dataclasses
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from roxxel_dist.cluster.contract import EXIT_DRAINED, EXIT_FAILED, EXIT_USAGE
from roxxel_dist.config import UsageError, usage_errors
from roxxel_dist.flags import Switch, parse, parse_train

NOT_BUILT = {
    "find-lr": "find a learning rate",
    "eval": "repeat a validation",
    "sweep": "search for the best configuration",
    "report": "pictures and tables of runs and studies",
    "plan": "phases, memory and time of a run before it starts",
    "doctor": "check the hosts",
    "save": "ask a running job for a checkpoint",
    "export": "weights for other programs",
    "launch ssh": "start ranks on hosts reached by ssh",
    "launch slurm": "start ranks in a SLURM job",
    "launch k8s": "start ranks in Kubernetes",
    "launch ray": "start ranks on a Ray cluster",
}

Command = Callable[[list[str]], int]


def main(argv: Sequence[str]) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    words = list(argv)
    if words[:1] == ["--version"]:
        from roxxel_dist import __version__

        print(f"roxxel-dist {__version__}")
        return 0
    try:
        return _dispatch("", COMMANDS, words)
    except UsageError as error:
        print(f"roxxel-dist: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


def _dispatch(group: str, table: dict[str, Command], words: list[str]) -> int:
    """Call the command that the first word names, or tell which there are."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(group, table))
        return 0 if words else EXIT_USAGE
    word, full = words[0], f"{group} {words[0]}".strip()
    if word in table:
        return table[word](words[1:])
    if full in NOT_BUILT:
        raise UsageError(f"{full} ({NOT_BUILT[full]}) is not built yet")
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildArgs:
    """Make shards of tokens from text, or from the tokens of another system."""

    paths: tyro.conf.Positional[tuple[str, ...]]
    """Text files and folders of them (a file is a document), .jsonl, .jsonl.gz and .parquet files, folders saved by
    Hugging Face datasets; or token files: .npy, .bin, .bin with .idx, .rox."""
    out: str
    """The folder to make: shards, tokenizer.json and build.json."""
    tokenizer: str = "bpe"
    """bpe, byte, char; or the path of a tokenizer.json, of a Hugging Face tokenizer's folder, or of a SentencePiece
    .model."""
    vocab_size: int | None = None
    """Tokens that a bpe tokenizer learns, 8192 where not given; with token files: ids are below it."""
    eos: bool = True
    """End every document of text with the tokenizer's end-of-text."""
    eos_token: str | None = None
    """What a ready-made tokenizer calls end-of-text, where its files do not say it."""
    text_key: str = "text"
    """The key or column of the text in JSON lines, Parquet and saved data sets."""
    val_fraction: float = 0.0
    """Share of the documents to hold out; then OUT/train and OUT/val are made."""
    dtype: str | None = None
    """Of the tokens in headerless .bin files; uint16 where not given."""
    workers: int | None = None
    """Processes; one a core where not given. The result is always the same."""
    max_shard_mb: int = 256
    """MiB of tokens a shard."""
    include: tuple[str, ...] | None = None
    """Names of files to take from folders, such as '*.py'; the usual ones where not given."""
    exclude: tuple[str, ...] = ()
    """Names of files and folders to leave out, such as test 'build/*'."""
    overwrite: Switch = False
    """Replace what is in the folder."""


def data_build(words: list[str]) -> int:
    """Make shards of tokens from text."""
    args = parse(BuildArgs, words, "data build")
    with usage_errors():
        from roxxel_dist.data.build import build, info

        options: dict[str, Any] = dataclasses.asdict(args)
        options["max_shard_bytes"] = options.pop("max_shard_mb") << 20
        if args.include is None:
            del options["include"]
        with build(options.pop("paths"), options.pop("out"), **options) as made:
            print(info(made))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoArgs:
    """Describe shards of tokens."""

    path: tyro.conf.Positional[str]
    """A folder, a file, or a pattern."""


def data_info(words: list[str]) -> int:
    """Describe shards."""
    args = parse(InfoArgs, words, "data info")
    with usage_errors():
        from roxxel_dist.data.build import info
        from roxxel_dist.data.dataset import Roxxel

        with Roxxel(args.path) as dataset:
            print(info(dataset))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyArgs:
    """Compare every block of every shard with its checksum; exits with 1 where one differs."""

    path: tyro.conf.Positional[str]
    """A folder, a file, or a pattern."""
    workers: int | None = None
    """Processes; as many as there are cores where there is much to read, if not given."""


def data_verify(words: list[str]) -> int:
    """Check every block of every shard."""
    args = parse(VerifyArgs, words, "data verify")
    with usage_errors():
        from roxxel_dist.data.dataset import Roxxel
        from roxxel_dist.data.report import Report
        from roxxel_dist.data.verify import find_damage

        try:
            opened = Roxxel(args.path)
        except ValueError as error:  # the files are there, and what opening checks is wrong already
            print(error)
            return EXIT_FAILED
        with opened as dataset:
            damage = list(find_damage(dataset.shards, Report(True), args.workers))
            print(*damage or [f"{len(dataset.shards)} shards, {dataset.num_tokens:,} tokens: whole"], sep="\n")
    return EXIT_FAILED if damage else 0


def train(words: list[str]) -> int:
    """Train a model through a curriculum, on all the processes this one belongs to."""
    with usage_errors():
        args, config = parse_train(words)
    from roxxel_dist.experiment import Experiment

    experiment = Experiment(config)
    experiment.fit(args.data_path, args.run_dir, args.resume)
    return EXIT_DRAINED if experiment.stopped else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Continue a text with a trained model."""

    run_dir: tyro.conf.Positional[str]
    """The run directory of the model."""
    prompt: str = ""
    """The text to continue; the beginning of a document where empty."""
    max_new_tokens: int = 200
    """Tokens to add at most."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 draws from the model's distribution."""
    seed: int = 0
    """Of the draws."""
    step: int | None = None
    """The checkpoint to use; the newest where not given."""


def generate(words: list[str]) -> int:
    """Continue a text with a trained model."""
    args = parse(GenerateArgs, words, "generate")
    with usage_errors():
        from roxxel_dist.load import write_text

        print(args.prompt + write_text(**dataclasses.asdict(args)))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalArgs:
    """Start a program as many processes on this machine: `launch local [options] -- CMD…`.

    CMD is `train …` (which stands for `roxxel-dist train …`), a Python script, or any program.
    """

    nprocs: int = 1
    """Processes to start."""
    devices_per_proc: int | None = None
    """Simulated CPU devices of each process; what jax finds where not given."""
    port: int | None = None
    """Port on which the processes find each other; a free one where not given."""
    max_restarts: int = 0
    """How often to start again after a failure; only 0 is built yet."""
    grace: float = 30.0
    """Seconds that the processes have to save and leave after Ctrl-C."""
    exit_timeout: float = 60.0
    """Seconds that the others have after the first process ended well."""
    all_ranks: Switch = False
    """Show the lines of every rank, not of rank 0 alone."""


def launch_local(words: list[str]) -> int:
    """Start ranks on this machine."""
    if "--" not in words and not {"-h", "--help"} & set(words):
        raise UsageError("no command: write it after `--`, as in `launch local --nprocs 2 -- train --data_path DIR`")
    cut = words.index("--") if "--" in words else len(words)
    args, command = parse(LocalArgs, words[:cut], "launch local", underscores=False), words[cut + 1 :]
    with usage_errors():
        if command[:1] == ["train"]:
            parse_train(command[1:])  # a slip is told at once, before any process starts
        from roxxel_dist.launcher.backends.local import LocalBackend
        from roxxel_dist.launcher.job import JobSpec, log_dir_for, new_run_id
        from roxxel_dist.launcher.supervisor import run

        run_id = new_run_id()
        job = JobSpec(
            command=tuple(command),
            run_id=run_id,
            log_dir=log_dir_for(tuple(command), run_id),
            **dataclasses.asdict(args),
        )
        return run(job, LocalBackend())


def data(words: list[str]) -> int:
    """Make, describe and check shards of tokens: build, info, verify."""
    return _dispatch("data", {"build": data_build, "info": data_info, "verify": data_verify}, words)


def launch(words: list[str]) -> int:
    """Start a program as many processes and watch over them: local."""
    return _dispatch("launch", {"local": launch_local}, words)


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


COMMANDS: dict[str, Command] = {"data": data, "batch": batch, "train": train, "generate": generate, "launch": launch}
