"""From words to typed arguments, and from the fields of a Config to flags and back."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from roxxel_dist.cli.help import POSITIONAL, help_text
from roxxel_dist.cluster.exit_codes import UserError, attempt_number
from roxxel_dist.component import field_docs
from roxxel_dist.config import FIELD_TYPES, Config, as_choice, nearest, parse_yaml
from roxxel_dist.config_effect import check_effect, chosen, without_effect
from roxxel_dist.launcher.spec import split_flags
from roxxel_dist.objects.url import is_url
from roxxel_dist.run_directory import CONFIG, check_still_there, default_run_dir
from roxxel_dist.train.checkpoint.metadata import CheckpointRef

T = TypeVar("T")
DURATION = re.compile(r"(\d+(?:\.\d*)?)(s|sec|m|min|h|d)")
UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
BOOLEANS = {"true": True, "false": False}
YAML_FIELDS = ("phases", "datasets", "validation", "model_args")
"""Fields that are one word of YAML on the command line."""
REMOVED = {
    "launch": {"replace_slow": "leave it out: it compared CPU times, which say nothing about an accelerator"},
    "plan": {"coordinates": "run examples/coordinate_check.py with the config"},
    "sweep": {"keep_gb": "leave it out: paused trials keep their checkpoints, which max_to_keep and --count limit"},
    "train": {
        "from_step": "begin a new run with --fork RUN@STEP and another --run_dir; RUN stays as it is",
    },
    "verify": {"deep": "leave it out: all arrays are compared always"},
}
"""Options that a command had, with what to do instead."""
RULES = tyro.constructors.ConstructorRegistry()


@RULES.primitive_rule
def _yaml_word(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if info.type not in [FIELD_TYPES[name] for name in YAML_FIELDS]:
        return None
    import yaml

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda words: parse_yaml(words[0], "the flag"),  # checked before, with its name
        is_instance=lambda _: True,
        str_from_instance=lambda value: [yaml.safe_dump(value, default_flow_style=True).strip() if value else "None"],
    )


@RULES.struct_rule
def _plain_fields(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """A dataclass, whose field docstrings tyro itself would look for in the sources, which takes a while."""
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = get_type_hints(info.type, include_extras=True)
    names = FIELD_TYPES if info.type is Config else {field.name for field in dataclasses.fields(info.type)}
    values = {field.name: _default_of(field) for field in dataclasses.fields(info.type) if field.name in names}
    if isinstance(info.default, info.type):
        values = {name: getattr(info.default, name) for name in values}
    specs = [
        tyro.constructors.StructFieldSpec(
            name=name,
            type=hints[name],
            default=value,
        )
        for name, value in values.items()
    ]
    return tyro.constructors.StructConstructorSpec(instantiate=info.type, fields=tuple(specs))


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArgs:
    """The arguments of a command that takes every field of a `Config` as a flag."""

    config: str | None = None
    """A YAML file of the fields below. Flags override it."""
    fields: Annotated[
        Config, tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff, tyro.conf.arg(name="config field")
    ] = dataclasses.field(default_factory=Config)
    """Every field of a config file."""


ConfigArgsT = TypeVar("ConfigArgsT", bound=ConfigArgs)


def parse(
    kind: type[T],
    words: list[str],
    name: str,
    *,
    underscores: bool = True,
    marks: tuple[Any, ...] = (),
    default: Any = None,
) -> T:
    """The words as an object; exits with 2 and a message that names the nearest flag where they are wrong.

    With `--help` among them it prints the command's help and exits with 0.

    `marks` are more of tyro's marks, for all fields; `default` holds where a flag is not given.
    """  # fmt: skip
    if {"-h", "--help"} & set(words):
        print(help_text(kind, name, default=default, underscores=underscores))
        raise SystemExit(0)
    words = in_seconds(normalise_switches(words, kind), kind)
    _check_words(kind, words, name)
    return tyro.cli(
        kind, args=words, prog=f"roxxel-dist {name}", use_underscores=underscores, default=default,
        config=(tyro.conf.FlagCreatePairsOff, *marks), registry=RULES,
    )  # fmt: skip


def flags_in(words: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) of every flag, guessed without knowing which flags take one; "" if none follows."""
    return [(name, value or "") for name, value, _ in split_flags(words) if name]


def normalise_switches(words: list[str], kind: Any) -> list[str]:
    """The words with `--switch True` as `--switch` and False as `--no-switch`, without those that change nothing.

    A field of a config that is true or false gets its value: `--fsdp` alone is `--fsdp True`.
    """
    switches = switches_of(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.name in switches}
    has_config = any(field.name == "fields" for field in dataclasses.fields(kind))
    fields = {name for name, held in FIELD_TYPES.items() if held is bool} if has_config else set()
    result: list[str] = []
    switch, takes_words = "", POSITIONAL in {mark for hint in flag_types(kind).values() for mark in get_args(hint)[1:]}
    for name, value, own in split_flags(words, defaults.keys() | fields):
        flag = own[0].partition("=")[0]
        if not name and switch and not takes_words and own[0].isalnum():  # a path has another message
            raise UserError(f"{switch} {own[0]}: must be True or False")
        is_switch = name in fields or name.removeprefix("no_") in defaults
        if is_switch and value is not None and value.lower() not in BOOLEANS:
            raise UserError(f"{flag} {value}: must be True or False")
        switch = flag if is_switch and value is None else ""
        given = BOOLEANS.get((value or "").lower(), True)
        if name in fields:
            result += [flag, str(given)]
        elif has_config and value is not None and (choice := as_choice(FIELD_TYPES.get(name), value)) != value:
            result += [flag, choice]
        elif name not in defaults:
            result += own
        elif given != defaults[name]:
            result.append(flag if given else f"--no-{flag[2:]}")
    return result


def in_seconds(words: list[str], kind: Any) -> list[str]:
    """The words with times such as 5m or 1.5h as numbers, for flags whose docstring says that they are seconds."""
    result: list[str] = []
    for name, value, own in split_flags(words):
        match, hint = DURATION.fullmatch(value or ""), flag_types(kind).get(name)
        if match and float in (hint, *get_args(hint)) and "econds" in field_docs(kind).get(name, ""):
            result += [own[0].partition("=")[0], f"{float(match[1]) * UNITS_S[match[2]]:g}"]
        else:
            result += own
    return result


def switches_of(kind: Any) -> set[str]:
    """The names of a command's own options that are true or false, those with a short form too."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name for name, hint in hints.items() if bool in (hint, *get_args(hint)[:1]) and get_origin(hint) is not dict
    }


def flag_types(kind: Any) -> dict[str, Any]:
    """The type of each flag of a command by its name, those of a config's fields among them."""
    hints = get_type_hints(kind, include_extras=True)
    return hints if hints.pop("fields", None) is None else hints | FIELD_TYPES


def _check_words(kind: Any, words: list[str], command: str) -> None:
    """Raises UserError where tyro's own message would be long: an option that is not there, a number that is none, a
    word that belongs to no option where a command takes options alone, and something without a default not given."""
    hints = flag_types(kind)
    switches = switches_of(kind)
    positional = {name for name, hint in hints.items() if POSITIONAL in get_args(hint)[1:]}
    all_options = f"`roxxel-dist {command} --help` lists all"

    def flag(name: str) -> str:  # as the command's help writes it
        return f"--{name.replace('_', '-') if command.startswith(('launch', 'doctor')) else name}"

    lists = {name for name, hint in hints.items() if {tuple, list} & set(map(get_origin, (hint, *get_args(hint))))}
    sizes = [get_args(get_args(hints[name])[0]) if name in lists else (str,) for name in positional]
    places = room = None if any(Ellipsis in each for each in sizes) else sum(map(len, sizes))
    short = {alias: name for name, hint in hints.items() for mark in get_args(hint)[1:]
             for alias in getattr(mark, "aliases", None) or ()}  # fmt: skip
    given, takes_more = set(), False
    for name, value, (word, *_) in split_flags(words, switches):
        if word in short:  # its value is the next word
            takes_more = short[word] not in {name for name, hint in hints.items() if bool in (hint, *get_args(hint))}
            continue
        if not name and not takes_more:
            _check_word(word, hints, f"`{command}`", sorted(positional), room, flag)
            _check_choice(" or ".join(sorted(positional)).upper(), word, [hints[name] for name in positional])
            given |= positional
            room = None if room is None else room - 1
        takes_more = name in lists or (not name and takes_more and bool(lists))
        if not name:
            continue
        given.add(name)
        if name not in hints and name.removeprefix("no_") not in switches:
            if instead := REMOVED.get(command.split(maxsplit=1)[0], {}).get(name):
                raise UserError(f"the option {flag(name)} was removed: {instead}")
            near = nearest(name, list(hints))
            hint = f"did you mean {flag(near)}?" if near else "the command does not have it;"
            raise UserError(f"there is no option {flag(name)}: {hint} {all_options}")
        in_seconds = "econds" in field_docs(kind).get(name, "")
        _check_value(flag(name), value, hints.get(name), in_seconds=in_seconds, is_list=name in lists)
    required = {field.name for field in dataclasses.fields(kind) if _default_of(field) is tyro.MISSING}
    if places and room and given & positional & required:
        names = " and ".join(name.upper() for name in sorted(positional))
        raise UserError(f"`{command}` needs {names}, {places} words, and has {places - room}. {all_options}")
    _check_missing(kind, command, required - given, positional, flag)


def _check_value(flag: str, value: str | None, hint: Any, *, in_seconds: bool, is_list: bool) -> None:
    """Raises UserError where a flag has no value, or one that is no number, or no choice, of its type."""
    kinds = {hint} | set(get_args(hint))
    kinds |= {part for each in kinds for part in get_args(each)}
    shown = f"{flag} {value}" if value else f"{flag} has no value"
    choices = [choice for choice in kinds if isinstance(choice, str)]
    if value is None and str in kinds and not is_list:
        raise UserError(f"{shown}: write {flag} {flag.strip('-').replace('-', '_').upper()}")
    if value == "None" or kinds & {str, bool}:
        return  # the parser knows
    if choices and value not in choices:
        raise UserError(f"{shown}: must be one of {', '.join(sorted(choices))}")
    number, what = (float, "a number") if float in kinds else (int, "a whole number")
    if number is float and in_seconds:
        what = "a number of seconds, or a time such as 5m"
    try:
        if kinds & {int, float}:
            number(value or "")
    except ValueError:
        raise UserError(f"{shown}: must be {what}") from None


def _check_missing(kind: Any, command: str, absent: set[str], positional: set[str], flag: Callable[[str], str]) -> None:
    """Raises UserError that names what has no default and was not given."""
    hints, docs, missing = flag_types(kind), field_docs(kind), {}
    for name in (field.name for field in dataclasses.fields(kind) if field.name in absent):
        kinds = get_args(hints.get(name))
        choices = "|".join(kinds) if all(isinstance(each, str) for each in kinds) else ""
        missing[name] = name.upper() if name in positional else f"{flag(name)} {choices or name.upper()}"
    if missing:
        needs = "; ".join(f"{shown} ({docs[name].partition('. ')[0].rstrip('.')})" for name, shown in missing.items())
        raise UserError(f"`{command}` needs {needs}. `roxxel-dist {command} --help` lists all")


def _check_choice(name: str, word: str, hints: list[Any]) -> None:
    """Raises UserError where only some words are allowed, and this one is not among them."""
    choices = [
        each for hint in hints for part in get_args(hint)[:1] for each in get_args(part) if isinstance(each, str)
    ]
    if choices and word not in choices:
        raise UserError(f"{name} {word}: must be one of {', '.join(sorted(choices))}")


def _check_word(
    word: str,
    hints: dict[str, Any],
    command: str,
    positional: list[str],
    room: int | None,
    flag: Callable[[str], str],
) -> None:
    """Raises UserError for a word that is neither a flag nor its value, where the command has no place for it.

    `room` is the number of such words that the command still takes; None for any.
    """
    name, equals, value = word.lstrip("-").partition("=")
    near = nearest(name.replace("-", "_"), list(hints))
    if word.startswith("-") and word != "-":
        hint = f"did you mean {flag(near)}?" if near else f"`roxxel-dist {command[1:-1]} --help` lists all"
        raise UserError(f"there is no option {word}: options begin with two dashes: {hint}")
    if room is None or room > 0:
        return
    if positional:
        names = " and ".join(name.upper() for name in positional)
        raise UserError(
            f"{command} takes one {names}, and {word!r} is one more: leave it out, or write --OPTION {word}"
        )
    hint = ""
    if equals and near:
        hint = f": write {flag(near)} {value}"
    elif word.endswith((".yaml", ".yml")) and "config" in hints:
        hint = f": write --{'sweep_config' if 'sweep_config' in hints else 'config'} {word}"
    elif "data_path" in hints:
        hint = f": write --data_path {word}"
    elif "hosts" in hints:
        hint = f": hosts are separated by commas, as in --hosts a,{word.strip(',')}"
    raise UserError(f"{command} takes only options, and {word!r} is not one{hint}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArgs(ConfigArgs):
    """Train a model through a curriculum."""

    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`. A resumed run knows its own."""
    run_dir: str | None = None
    """The run directory: a folder, or an address in a bucket (s3://, gs://, az://). Default: a new folder
    runs/run_YYYYMMDD_HHMMSS."""
    local_dir: str | None = None
    """For a run in a bucket: the local folder on each host in which files are written before they are sent. Default:
    ~/.cache/roxxel-dist/runs."""
    resume: bool = False
    """Continue the run in --run_dir from its newest checkpoint. Without a checkpoint the run starts from step 1."""
    amend: bool = False
    """With --resume: accept changed phases or shards from this step on. Tokens that were read are not read again."""
    fork: str | None = None
    """RUN@STEP: start a new run from a kept checkpoint of RUN, with its parameters, moments, random streams and data
    position. Fields that --config and flags do not give are those of RUN. Other phases and schedules apply after that
    step. RUN does not change."""
    skip_steps: str | None = None
    """With --fork: A:B, leave out the data of the steps A to B."""


def parse_train(words: list[str]) -> tuple[TrainArgs, Any]:
    """(arguments, Config) of a `train` command line; raises as `parse_config` does."""
    words = normalise_switches(words, TrainArgs)
    given = dict(flags_in(words))
    if given.get("run_dir") == "":
        raise UserError("--run_dir is empty: name a folder, or leave it out for a new one")
    if "amend" in given and "resume" not in given:
        raise UserError("--amend changes a run that is resumed: add --resume and --run_dir")
    if "resume" in given and "run_dir" not in given:
        raise UserError("--resume does not say which run: name its folder with --run_dir")
    if "skip_steps" in given and "fork" not in given:
        raise UserError("--skip_steps leaves rows out in a new run that begins at a checkpoint: add --fork RUN@STEP")
    run = Path(given.get("run_dir") or default_run_dir())
    if is_url(run) and ("resume" in given or attempt_number()):
        from roxxel_dist.train.bucket_folder import BucketFolder

        run = BucketFolder(run, given.get("local_dir")).pull()
    if attempt_number():  # a job that its launcher starts again is resumed, as `fit` has it
        check_still_there(run)
    runs = [run] if "resume" in given or attempt_number() else []
    if "fork" in given:
        from roxxel_dist.train.bucket_folder import local_run

        runs.append(local_run(CheckpointRef.parse(given["fork"]).run))
    saved = (str(folder / CONFIG) for folder in runs if (folder / CONFIG).exists())
    return parse_config(TrainArgs, words, "train", next(saved, None))


def parse_config(
    kind: type[ConfigArgsT], words: list[str], command: str, path: str | None = None
) -> tuple[ConfigArgsT, Config]:
    """(arguments, Config) of a command that takes every field of a Config beside its own flags.

    `path` is the config of the run that is resumed or forked: the fields that neither `--config` nor a flag gives.
    Raises ValueError for a value or a file that cannot be used; a word that is no flag exits with 2 and a message.
    """
    words, model_args = _without_model_args(normalise_switches(words, kind))
    flags = dict(flags_in(words))
    base = Config.from_yaml(flags["config"]) if flags.get("config") else Config()
    if path:
        saved = Config.from_yaml(path)
        values = saved.to_dict()
        if flags.get("config"):
            del values["max_steps"]  # a config without one trains to the end of its phases
        base = base.with_defaults(values)
        base.of_run = base.of_run if flags.get("config") else saved.of_run
    for name in flags.keys() & set(YAML_FIELDS):
        parse_yaml(flags[name], f"--{name}")
    args = parse(kind, words, command, default=kind(fields=base))
    values = args.fields.to_dict()
    defaults = Config().to_dict()
    if model_args:
        values["model_args"] = _merged(values["model_args"] or {}, model_args)
    config = Config.from_dict(values)
    config.defaults = base.defaults
    config.given = base.given | (flags.keys() & values.keys()) | ({"model_args"} if model_args else frozenset())
    if "init_from" not in flags:
        config.of_run = base.of_run
    config.validate()
    if command != "sweep":  # its parameters may turn on what a field of the base sets
        from_flags = {name for name in flags.keys() & values.keys() if values[name] != defaults[name]}
        from_flags |= {"epochs", "batch_size"} & flags.keys()
        from_flags |= {"model_args"} if model_args else set()
        # A flag may turn off what the file turns on: the fields that go with it may stay in the file.
        from_file = chosen(base) & without_effect(base.to_dict()).keys()
        check_effect(config, from_file | from_flags, from_flags)
    return args, config


def _without_model_args(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """(the other words, {name: value} of every `--model_args.NAME VALUE`, whose value is typed as in YAML)."""
    others: list[str] = []
    values: dict[str, Any] = {}
    for name, value, own in split_flags(words):
        flag = own[0].partition("=")[0]
        if not name.startswith("model_args."):
            others += own
        elif value is None:
            raise UserError(f"{flag} has no value: write {flag} VALUE")
        else:
            values[flag.partition(".")[2]] = parse_yaml(value, flag)
    return others, values


def _merged(values: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """A mapping with some of its values changed; a dot in a name goes into a mapping within."""
    result = dict(values) if isinstance(values, dict) else {}
    for name, value in changes.items():
        outer, dot, inner = name.partition(".")
        result[outer] = _merged(result.get(outer), {inner: value}) if dot else value
    return result


def as_flags(message: str) -> str:
    """A message of the package for a user of the command line: `resume=True` in it is --resume, `data_path=PATH` is
    --data_path PATH, `steps=1:9` is --steps 1:9."""
    names = {field.name for field in dataclasses.fields(TrainArgs)} | {*FIELD_TYPES, "overwrite", "steps"}

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        return match[0] if name not in names else f"--{name}" if value == "True" else f"--{name} {value}"

    return re.sub(r"(?<![\w.-])([a-z_]+)=(True|[A-Z][A-Z_]*|\d+:\d+|[a-z]+(?=[ ,;)]|$))(?!\w)", flag, message)


def steps_to_skip(text: str | None) -> tuple[int, int] | None:
    """The first and the last step of A:B, or None. Raises ValueError for any other text."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise UserError(f"--skip_steps is {text!r}: write the first and the last step to leave out, such as 120:128")
    return int(match[1]), int(match[2])
