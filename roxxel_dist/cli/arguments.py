"""From words to typed arguments, and from the fields of a Config to flags and back."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from roxxel_dist.cluster.exit_codes import attempt_number
from roxxel_dist.config import Config, UsageError, nearest, yaml_problem
from roxxel_dist.config_fields import PARTS, field_docs, field_types
from roxxel_dist.launcher.spec import split_flags
from roxxel_dist.run_directory import CONFIG, check_still_there, default_run_dir
from roxxel_dist.train.checkpoint.metadata import run_step

T = TypeVar("T")
POSITIONAL = get_args(tyro.conf.Positional[str])[1]
BOOLEANS = {"true": True, "false": False}
NESTED = ("phases", "datasets", "validation", "model_args")
"""Fields that are one word of YAML on the command line."""


def parse(kind: type[T], words: list[str], name: str, *, underscores: bool = True, marks: tuple[Any, ...] = ()) -> T:
    """The words as an object; exits with 2 and a message that names the nearest flag where they are wrong.

    Args:
        marks: more of tyro's marks, for all fields.
    """
    words = normalise_switches(words, kind)
    if not {"-h", "--help"} & set(words):
        _check_words(kind, words, name)
    config = (tyro.conf.FlagCreatePairsOff, *marks)
    return tyro.cli(kind, args=words, prog=f"roxxel-dist {name}", use_underscores=underscores, config=config)


def flags_in(words: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) of every flag, as far as that can be told without knowing which take one; "" where none follows."""
    return [(name, value or "") for name, value, _ in split_flags(words) if name]


def normalise_switches(words: list[str], kind: Any) -> list[str]:
    """The words with `--switch True` as `--switch` and False as `--no-switch`, without those that change nothing."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.type is bool}
    result: list[str] = []
    for name, value, own in split_flags(words, defaults):
        given = BOOLEANS.get((value or "").lower(), True)
        flag = own[0].partition("=")[0]
        if name not in defaults:
            result += own
        elif given != defaults[name]:
            result.append(flag if given else f"--no-{flag[2:]}")
    return result


def _check_words(kind: Any, words: list[str], command: str) -> None:
    """Raises UsageError where tyro's own message would be long: an option that is not there, a number that is none, a
    word that belongs to no option where a command takes options alone, and something without a default not given."""
    hints = get_type_hints(kind, include_extras=True)
    switches = {name for name, hint in hints.items() if hint is bool}
    positional = {name for name, hint in hints.items() if POSITIONAL in get_args(hint)[1:]}
    all_options = f"`roxxel-dist {command} --help` tells all"
    if words and not words[0].startswith("-") and not positional:
        data = f": write --data_path {words[0]}" if "data_path" in hints else ""
        raise UsageError(f"`{command}` takes options alone, and {words[0]!r} is none{data}")

    def flag(name: str) -> str:  # as the command's help writes it
        return f"--{name.replace('_', '-') if command.startswith(('launch', 'doctor')) else name}"

    given = set()
    for name, value, (word, *_) in split_flags(words, switches):
        if not name:
            given |= positional if not word.startswith("-") else set()
            continue
        given.add(name)
        if name not in hints and name.removeprefix("no_") not in switches:
            near = nearest(name, list(hints))
            hint = f"did you mean {flag(near)}?" if near else "it is none of the command's;"
            raise UsageError(f"there is no option {flag(name)}: {hint} {all_options}")
        kinds = {hints.get(name)} | set(get_args(hints.get(name)))
        kinds |= {part for each in kinds for part in get_args(each)}
        if value == "None" or kinds & {str, bool}:
            continue  # the parser knows
        choices = [choice for choice in kinds if isinstance(choice, str)]
        if choices and value and value not in choices:
            raise UsageError(f"--{name} {value}: must be one of {', '.join(sorted(choices))}")
        number, what = (float, "a number") if float in kinds else (int, "a whole number")
        try:
            if kinds & {int, float}:
                number(value or "")
        except ValueError:
            raise UsageError(f"--{name} {value or 'has no value'}: must be {what}") from None
    missing = {}
    for field in dataclasses.fields(kind):
        name, kinds = field.name, get_args(hints[field.name])
        if name not in given and {field.default, field.default_factory} == {dataclasses.MISSING}:
            choices = "|".join(kinds) if all(isinstance(each, str) for each in kinds) else ""
            missing[name] = name.upper() if name in positional else f"{flag(name)} {choices or name.upper()}"
    if missing:
        docs = field_docs(kind)
        needs = "; ".join(f"{shown} ({docs[name].rstrip('.')})" for name, shown in missing.items())
        raise UsageError(f"`{command}` needs {needs}. {all_options}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Train a model through a curriculum."""

    config: str | None = None
    """A YAML file of the fields below; flags win over it."""
    data_path: str | None = None
    """A text file, a folder of text, or shards made by `data build`; a resumed run remembers its own."""
    run_dir: str | None = None
    """Where to keep the run; a new folder runs/run_YYYYMMDD_HHMMSS where not given."""
    resume: bool = False
    """Continue the run in --run_dir from its newest checkpoint; begin where there is none."""
    amend: bool = False
    """With --resume: the phases, or the shards, are other ones from here on. What was read is not read again."""
    fork: str | None = None
    """RUN@STEP: a new run that begins with the parameters, moments, random streams and position in the data of a kept
    checkpoint of RUN, and its config where --config and flags give no other. Other phases and another schedule hold
    behind that step; RUN is only read."""
    from_step: int | None = None
    """With --resume: go back to this kept checkpoint of the run. Later checkpoints and rows of the log are deleted."""
    skip_steps: str | None = None
    """With --from_step: A:B, leave out what the steps A to B would have read."""


def parse_train(words: list[str]) -> tuple[TrainArgs, Any]:
    """(arguments, Config) of a `train` command line.

    Raises:
        ValueError: a value or a file that cannot be used. A word that is no flag exits with 2 and a message.
    """
    words = normalise_switches(words, TrainArgs)
    given = dict(flags_in(words))
    if given.get("run_dir") == "":
        raise ValueError("--run_dir is empty: name a folder, or leave it out for a new one")
    if "amend" in given and "resume" not in given:
        raise ValueError("--amend changes a run that is resumed: add --resume and --run_dir")
    if "resume" in given and "run_dir" not in given:
        raise ValueError("--resume does not say which run: name its folder with --run_dir")
    if "from_step" in given and "resume" not in given:
        raise ValueError("--from_step goes back in a run that is resumed: add --resume and --run_dir")
    if "from_step" in given and "fork" in given:
        raise ValueError("--fork begins a new run and --from_step goes back in an old one: use one of the two")
    run = Path(given.get("run_dir") or default_run_dir())
    if attempt_number():  # a job that its launcher starts again is resumed, as `fit` has it
        check_still_there(run)
    runs = [run] if "resume" in given or attempt_number() else []
    runs += [run_step(given["fork"]).run] if "fork" in given else []
    saved = (str(folder / CONFIG) for folder in runs if (folder / CONFIG).exists())
    return parse_config(TrainArgs, words, "train", next(saved, None))


def parse_config(kind: type[T], words: list[str], command: str, path: str | None = None) -> tuple[T, Any]:
    """(arguments, Config) of a command that takes every field of a Config beside its own flags.

    Args:
        kind: the command's own flags, `config` among them.
        words: the command line.
        command: its name.
        path: the config of the run that is resumed or forked: the fields that neither `--config` nor a flag gives.

    Raises:
        ValueError: a value or a file that cannot be used. A word that is no flag exits with 2 and a message.
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
    args: Any = parse(_with_fields(base, kind), words, command)
    values = {name: getattr(args, name) for name in field_types()}
    values |= {name: _from_yaml(f"--{name}", values[name] or "null") for name in NESTED}
    if model_args:
        values["model_args"] = _merged(values["model_args"] or {}, model_args)
    config = Config.from_dict(values)
    config.given = base.given | (flags.keys() & values.keys()) | ({"model_args"} if model_args else frozenset())
    if "init_from" not in flags:
        config.of_run = base.of_run
    config.validate()
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
            raise ValueError(f"{flag} has no value: write {flag} VALUE")
        else:
            values[flag.partition(".")[2]] = _from_yaml(flag, value)
    return others, values


def _from_yaml(flag: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{flag} is not valid YAML: {yaml_problem(error)}") from error


def _merged(values: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """A mapping with some of its values changed; a dot in a name goes into a mapping within."""
    result = dict(values) if isinstance(values, dict) else {}
    for name, value in changes.items():
        outer, dot, inner = name.partition(".")
        result[outer] = _merged(result.get(outer), {inner: value}) if dot else value
    return result


def as_flags(message: str) -> str:
    """A message of the package for somebody at a terminal: `resume=True` in it is --resume, `data_path=PATH` is
    --data_path PATH."""
    names = {field.name for field in dataclasses.fields(TrainArgs)} | {*field_types(), "overwrite"}

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        return found[0] if name not in names else f"--{name}" if value == "True" else f"--{name} {value}"

    return re.sub(r"(?<![\w.-])([a-z_]+)=(True|[A-Z][A-Z_]*)(?!\w)", flag, message)


def steps_to_skip(text: str | None) -> tuple[int, int] | None:
    """The first and the last step of A:B, or None. Raises ValueError for what is written otherwise."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise ValueError(f"--skip_steps is {text!r}: write the first and the last step to leave out, such as 120:128")
    return int(match[1]), int(match[2])


def _with_fields(base: Any, kind: type) -> type:
    """The flags of a command and every field of a Config, with `base`'s values as defaults."""
    import yaml

    docs = {name: text for part in PARTS for name, text in field_docs(part).items()}
    fields: list[Any] = []
    for name, held in field_types().items():
        default, shown = getattr(base, name), held
        if name in NESTED:
            shown, default = str | None, yaml.safe_dump(default, default_flow_style=True).strip() if default else None
        marks = [tyro.conf.arg(help=docs[name]), *([tyro.conf.FlagConversionOff] if held is bool else [])]
        field = dataclasses.field(default_factory=lambda kept=default: kept)  # a list is no default, but may be kept
        fields.append((name, Annotated[(shown, *marks)], field))
    return dataclasses.make_dataclass(
        kind.__name__, fields, bases=(kind,), kw_only=True, frozen=True, namespace={"__doc__": kind.__doc__}
    )
