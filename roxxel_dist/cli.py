"""The command line: one small function a sub-command, nothing that computes.

What `--help` touches imports neither jax nor numpy, so that it answers at once.
"""

import dataclasses
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from roxxel_dist.config import PARTS, Config, UsageError, field_docs, field_types, usage_errors

EXIT_USAGE, EXIT_STOPPED = 2, 42

NOT_BUILT = {
    "batch": "print the rows of a step",
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
    "data verify": "check every block of every shard",
}

T = TypeVar("T")
Command = Callable[[list[str]], int]
Switch = tyro.conf.FlagCreatePairsOff[bool]


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
    what = (_dispatch_docs.get(group) or "") + "\n\n"
    return (
        f"usage: {name} COMMAND …\n\n{what}"
        + "\n".join(lines)
        + f"\n\n`{name} COMMAND --help` tells the options of a command."
    )


_dispatch_docs = {
    "": "Launch, feed and train language models in JAX and Flax NNX on many hosts.",
    "data": "Tokens on disk.",
    "launch": "Start one program as many processes that know each other, and watch over them.",
}


def _parse(kind: type[T], words: list[str], name: str) -> T:
    """The words as an object; exits with 2 and a message that names the nearest flag where they are wrong."""
    return tyro.cli(
        kind,
        args=words,
        prog=f"roxxel-dist {name}",
        config=(tyro.conf.ConsolidateSubcommandArgs,),
        use_underscores=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildArgs:
    """Make shards of tokens from text files."""

    paths: tyro.conf.Positional[tuple[str, ...]]
    """Text files, and folders of them; a file is a document."""
    out: str
    """The folder to make: shards and tokenizer.json."""
    tokenizer: str = "bpe"
    """bpe, byte, char, or the path of a tokenizer.json."""
    vocab_size: int | None = None
    """Tokens that a bpe tokenizer learns; 4096 where not given."""
    include: tuple[str, ...] | None = None
    """Names of files that are text, such as '*.py'; the usual ones where not given."""
    exclude: tuple[str, ...] = ()
    """Names of files and folders to leave out, such as test 'build/*'."""
    overwrite: Switch = False
    """Replace what is in the folder."""


def data_build(words: list[str]) -> int:
    """Make shards of tokens from text."""
    args = _parse(BuildArgs, words, "data build")
    with usage_errors():
        from roxxel_dist.data.build import build, info

        options: dict[str, Any] = {"include": args.include} if args.include else {}
        options |= {"tokenizer": args.tokenizer, "vocab_size": args.vocab_size, "exclude": args.exclude}
        with build(args.paths, args.out, overwrite=args.overwrite, **options) as made:
            print(info(made))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoArgs:
    """Describe shards of tokens."""

    path: tyro.conf.Positional[str]
    """A folder, a file, or a pattern."""


def data_info(words: list[str]) -> int:
    """Describe shards."""
    args = _parse(InfoArgs, words, "data info")
    with usage_errors():
        from roxxel_dist.data.build import info
        from roxxel_dist.data.dataset import Roxxel

        with Roxxel(args.path) as dataset:
            print(info(dataset))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Train a model through a curriculum."""

    config: str | None = None
    """A YAML file of the fields below; flags win over it."""
    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`; a resumed run remembers its own."""
    run_dir: str | None = None
    """Where to keep the run; a new folder runs/run_YYYYMMDD_HHMMSS where not given."""
    resume: Switch = False
    """Continue the run in --run_dir from its newest checkpoint; begin where there is none."""


def parse_train(words: list[str]) -> tuple[TrainArgs, Any]:
    """(arguments, Config) of a `train` command line.

    Raises:
        ValueError: a value or a file that cannot be used. A word that is no flag exits with 2 and a message.
    """
    import yaml

    peeked = {name: value for name, value in _flags(words) if name in ("config", "run_dir", "resume")}
    saved = Path(peeked.get("run_dir", "")) / "config.yaml"
    path = peeked.get("config") or (saved if "resume" in peeked and "run_dir" in peeked and saved.exists() else None)
    base = Config.from_yaml(path) if path else Config()
    args = _parse(_with_fields(base), words, "train")
    values = {name: getattr(args, name) for name in field_types()}
    try:
        values["phases"] = yaml.safe_load(values["phases"]) if values["phases"] else None
    except yaml.YAMLError as error:
        raise ValueError(f"--phases is not valid YAML: {' '.join(str(error).split())}") from error
    config = Config.from_dict(values)
    config.validate()
    return args, config


def _flags(words: list[str]) -> list[tuple[str, str]]:
    """(name, value) of every flag, as far as that can be told without knowing which take one."""
    pairs = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            pairs.append((name.replace("-", "_"), value if equals else following))
    return pairs


def _with_fields(base: Any) -> type[TrainArgs]:
    """`TrainArgs` and every field of a Config, with `base`'s values as defaults."""
    import yaml

    docs = {name: text for part in PARTS for name, text in field_docs(part).items()}
    fields: list[Any] = []
    for name, kind in field_types().items():
        default, shown = getattr(base, name), kind
        if name == "phases":  # a list of mappings is one word of YAML on the command line
            shown, default = str | None, yaml.safe_dump(default, default_flow_style=True).strip() if default else None
        marks = [tyro.conf.arg(help=docs[name]), *([tyro.conf.FlagConversionOff] if kind is bool else [])]
        fields.append((name, Annotated[(shown, *marks)], dataclasses.field(default=default)))
    return dataclasses.make_dataclass(
        "Train", fields, bases=(TrainArgs,), kw_only=True, frozen=True, namespace={"__doc__": TrainArgs.__doc__}
    )


def train(words: list[str]) -> int:
    """Train a model through a curriculum, on all the processes this one belongs to."""
    with usage_errors():
        args, config = parse_train(words)
    from roxxel_dist.experiment import Experiment

    experiment = Experiment(config)
    experiment.fit(args.data_path, args.run_dir, args.resume)
    return EXIT_STOPPED if experiment.stopped else 0


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
    args = _parse(GenerateArgs, words, "generate")
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
    cut = words.index("--") if "--" in words else len(words)
    args, command = _parse(LocalArgs, words[:cut], "launch local"), words[cut + 1 :]
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
    """Make and describe shards of tokens: build, info."""
    return _dispatch("data", {"build": data_build, "info": data_info}, words)


def launch(words: list[str]) -> int:
    """Start a program as many processes and watch over them: local."""
    return _dispatch("launch", {"local": launch_local}, words)


COMMANDS: dict[str, Command] = {"data": data, "train": train, "generate": generate, "launch": launch}
