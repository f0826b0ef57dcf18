"""The command that says which of two configurations is better."""

import contextlib
import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from roxxel_dist.cli.arguments import check_new_run
from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.launcher.output import info
from roxxel_dist.place.directory import CONFIG, has_config, is_study
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.effect import check_effect, chosen
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.settings.values import with_numbers
from roxxel_dist.sweep.driver.options import TrialOptions
from roxxel_dist.sweep.space.extras import Versus
from roxxel_dist.utils.voice import argument

DATA = ("datasets", "validation", "val_fraction", "eval_iters", "tokenizer_type", "data_dtype", "passes")
"""Fields that say what is read, and on what is measured."""
LENGTH = ("max_steps", "patience")
OF_LENGTH = ("steps", "epochs", "batch_size")
"""The keys of a phase that say how long it is; its others say what is read."""
OF_PEOPLE = ("seed", "name", "notes", "tags", "wandb", "wandb_project", "cache_dir", "cache_gb", "store_timeout")
"""Fields that no configuration is compared by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersusArgs(TrialOptions):
    """Say which of two configurations is better, A or B: versus A.yaml B.yaml, or versus A.yaml --set lr=0.002.

    Both are trained in pairs that share seed, data order and validation rows, as trials of a study. After each pair
    there is an interval for the mean difference that holds its level however often you look. It ends when that
    excludes 0, when it lies within --smallest, or after --max_pairs. Each training has its whole length: a look at a
    shorter one is not used. The same command again continues.
    """

    own_first: ClassVar[bool] = True

    configs: Positional[tuple[str, ...]] = ()
    """A config file or a run directory for A, and one for B. An existing study needs none."""
    config: str | None = None
    """The config file of A, instead of the first argument."""
    set: tuple[str, ...] = ()
    """FIELD=VALUE …: B is A with these changes."""
    study: str | None = None
    """Folder of the study, or an address (s3://…, gs://…, az://…). An existing one continues. Default:
    studies/versus."""
    data_path: str | None = None
    """As of `train`, for both. Default: that of the run, if A is one."""
    metric: str = "val_loss"
    """What is compared: the last value that each training logs. An existing study has its own."""
    maximize: bool = False
    """More of the metric is better."""
    level: float = 0.9
    """The probability that the interval holds, at all looks together."""
    smallest: float | None = None
    """The smallest difference that matters: it ends with `same` when the interval lies within plus and minus this."""
    max_pairs: int = 20
    """Number of pairs after which it ends undecided, those of earlier starts included."""
    different_data: bool = False
    """Allow that A and B read, or are measured on, different data."""
    different_length: bool = False
    """Allow that A and B train for different lengths."""
    json: bool = False
    """Print JSON: difference (A less B), low, high, level, pairs, verdict (A, B, same or undecided), needed …"""

    def __post_init__(self) -> None:
        """Raises UserError for numbers that cannot be."""
        Versus(changes={}, names={}, level=self.level, smallest=self.smallest)
        if self.max_pairs < 1:
            raise UserError(f"--max_pairs {self.max_pairs}: must be at least 1")


def versus(words: list[str]) -> int:
    """Say which of two configurations is better, with an interval that holds its level whenever it ends."""
    args = parse(VersusArgs, words, "versus")
    with ExitStack() as held:
        if args.json:  # standard output is JSON alone
            held.enter_context(contextlib.redirect_stdout(sys.stderr))
        study, code = _run(args, held)
    if args.json:
        from roxxel_dist.sweep.report.versus import versus_json
        from roxxel_dist.utils.display import plain

        print(json.dumps(plain(versus_json(study)), indent=2))
    return code


def _run(args: VersusArgs, held: ExitStack) -> tuple[Any, int]:
    """(the study, the exit code), once no more pairs are trained. `held` keeps the study."""
    from roxxel_dist.cli.sweep import study_bucket
    from roxxel_dist.sweep.driver import run
    from roxxel_dist.sweep.driver.options import SweepOptions
    from roxxel_dist.sweep.study.folder import DATA_PATH, StudyDir, read_study
    from roxxel_dist.view.web.page import write_study

    with usage_errors():
        given = {field.name: getattr(args, field.name) for field in dataclasses.fields(TrialOptions)}
        options = SweepOptions(**given, study=args.study, count=2 * args.max_pairs, data_path=args.data_path)
        sides = _sides(args)
        of_host = {} if sides is None else {name: getattr(sides.a, name) for name in ("cache_dir", "store_timeout")}
        bucket = study_bucket({"study": args.study, **of_host}, held)
        files = StudyDir(Path(args.study or "studies/versus")) if bucket is None else bucket.files
        if sides is None and not files.is_there:
            raise UserError(
                f"nothing to compare, and {files.place} is no study yet: name two configs, as in versus A.yaml B.yaml, "
                "or one and a change, as in versus A.yaml --set lr=0.002"
            )
        if sides is not None:
            sides.check(sides.data_path or files.metadata(DATA_PATH))
        if bucket is None:
            held.enter_context(files.hold(info))
        options = dataclasses.replace(options, study=files.place)
        if files.is_there:
            _check_same(args, files, sides)
            if is_study(files.path) and (ended := _ended(files, args.max_pairs)) is not None:
                return ended
            search = run.open_sweep(options, None, Config.from_yaml(str(files.base_file)), None, bucket)
        else:
            assert sides is not None
            folder = held.enter_context(TemporaryDirectory())
            definition, extras = _write(Path(folder), args, sides)
            options = dataclasses.replace(options, extras=extras, data_path=sides.data_path)
            search = run.open_sweep(options, definition, sides.a, None, bucket)
        search = run.create_study(search, None)
    code = run.search(search, write_study)
    return read_study(files.path, files.url, is_searched=False), code


def _ended(files: Any, max_pairs: int) -> tuple[Any, int] | None:
    """Print what a study says that needs no more pairs; None where it does."""
    from roxxel_dist.sweep.report.versus import versus_text
    from roxxel_dist.sweep.samplers.pairs import outcome
    from roxxel_dist.sweep.study.folder import read_study

    study = read_study(files.path, files.url, is_searched=False)
    assert study.sweep.versus is not None
    found = outcome(study.history, study.sweep.versus)
    if found.ending is None and found.pairs + found.dropped < max_pairs:
        return None
    print(versus_text(study))
    return study, 1 if found.is_vain else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sides:
    """Two configurations to be compared."""

    a: Config
    b: Config
    data_path: str | None
    """What is named, or the data of a run; None: that of the study."""
    names: dict[str, str]

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that B changes."""
        before, after = self.a.to_dict(), self.b.to_dict()
        return {name: value for name, value in after.items() if name not in OF_PEOPLE and value != before[name]}

    def check(self, data_path: str | None) -> None:
        """Raises UserError for a config that no training of a comparison can have."""
        for name, config in zip(self.names.values(), (self.a, self.b), strict=True):
            try:
                config.validate()
                if config.wandb == "online":
                    raise UserError("wandb is online, and the trials of a comparison write offline: make it offline")
                check_effect(config, chosen(config))
                check_new_run(config, data_path)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error


def _sides(args: VersusArgs) -> _Sides | None:
    """The two configurations; None where nothing is named. Raises UserError where they are not two configurations that
    can be compared."""
    places = [*([] if args.config is None else [args.config]), *args.configs]
    if not places:
        if args.set:
            raise UserError(f"--set {args.set[0]} changes a config: name it, as in versus A.yaml --set {args.set[0]}")
        return None
    if len(places) > 2 or (len(places) == 2 and args.set):
        more = places[2] if len(places) > 2 else f"--set {args.set[0]}"
        raise UserError(f"{' and '.join(places[:2])} are A and B: leave {more} out")
    if len(places) == 1 and not args.set:
        raise UserError(f"{places[0]} is A, and there is no B: name a second config, or --set FIELD=VALUE")
    config, data = _read(places[0])
    other, other_data = (_changed(config, args.set), data) if args.set else _read(places[1])
    if args.data_path is None and other_data != data:
        raise UserError(f"data: {places[0]} reads {data}, and {places[1]} {other_data}: name it with --data_path")
    second = places[1] if len(places) == 2 else " ".join(args.set)
    sides = _Sides(a=config, b=other, data_path=args.data_path or data, names={"A": places[0], "B": second})
    if not sides.changes:
        raise UserError(f"{places[0]} and {second} are the same configuration but for the seed: nothing to compare")
    _check_alike(args, config, other)
    return sides


def _read(place: str) -> tuple[Config, str | None]:
    """(the config of a file or of a run, the data of the run)."""
    from roxxel_dist.run.metadata import data_of, saved_config

    if Path(place).suffix in (".yaml", ".yml", ".json"):
        return Config.from_yaml(place).with_absolute_paths(), None
    run = local_run(place)
    if not has_config(run):
        raise UserError(
            f"{place}: neither a config file (.yaml) nor a run directory, which has a {CONFIG} that is not empty"
        )
    return Config.from_yaml(str(run / CONFIG)).with_absolute_paths(), data_of(saved_config(run), run)


def _changed(config: Config, words: tuple[str, ...]) -> Config:
    """The config with the changes of --set."""
    import yaml

    changes = dict[str, Any]()
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise UserError(f"--set {word}: write FIELD=VALUE, such as lr=0.002")
        try:
            changes[name] = with_numbers(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise UserError(f"--set {word}: the value is not valid YAML") from error
    given = Config.from_dict(changes, "--set")  # other names of fields are known here
    values = {name: getattr(given, name) for name in given.given}
    return Config.from_dict({**config.to_dict(), **values}, "--set").with_absolute_paths()


def _check_alike(args: VersusArgs, config: Config, other: Config) -> None:
    """Raises UserError where both read other data, or train for other lengths, and no flag allows it."""
    fields = [one.to_dict() for one in (config, other)]
    phases = [_phases(one) for one in fields]
    data = [name for name in DATA if fields[0][name] != fields[1][name]]
    length = [name for name in LENGTH if fields[0][name] != fields[1][name]]
    shapes = [[{key: one.get(key) for key in OF_LENGTH} for one in rows] for rows in phases]
    rest = [[{key: one[key] for key in one if key not in OF_LENGTH} for one in rows] for rows in phases]
    length += ["phases"] * (shapes[0] != shapes[1])
    data += ["phases"] * (rest[0] != rest[1] and shapes[0] == shapes[1])
    for names, what, allowed, flag in (
        (data, "data", args.different_data, "--different_data"),
        (length, "length", args.different_length, "--different_length"),
    ):
        if names and not allowed:
            raise UserError(
                f"A and B differ in {what} ({', '.join(names)}), so that a difference may come from that: give both "
                f"the same, or allow it with {flag}"
            )


def _phases(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The phases of a config; without any the one that it means."""
    whole = {name: fields[name] for name in ("epochs", "batch_size")} | {"seq_len": fields["max_context"] + 1}
    return fields["phases"] or [whole]


def _write(folder: Path, args: VersusArgs, sides: _Sides) -> tuple[str, str]:
    """(the file of the sweep that trains the pairs, its second file), written into a folder."""
    from roxxel_dist.cli.sweep import write_yaml

    found = Versus(changes=sides.changes, names=sides.names, level=args.level, smallest=args.smallest)
    metric = {"name": args.metric, "goal": "maximize" if args.maximize else "minimize"}
    sweep = {"method": "grid", "metric": metric, "parameters": Versus.parameters(sides.a.seed)}
    extras = {"versus": dataclasses.asdict(found)}
    return write_yaml(folder, "versus.yaml", sweep), write_yaml(folder, "extras.yaml", extras)


def _check_same(args: VersusArgs, files: Any, sides: _Sides | None) -> None:
    """Raises UserError where a study that is there compares something else, or in another way."""
    sweep = files.sweep()
    found = sweep.versus
    if found is None:
        raise UserError(f"--study {files.place} is a search, and no comparison: name another folder")
    if sides is not None:
        before = Config.from_yaml(str(files.base_file)).to_dict()
        is_same = all(before[name] == value for name, value in sides.a.to_dict().items() if name not in OF_PEOPLE)
        if not is_same or dict(found.changes) != sides.changes:
            raise UserError(f"--study {files.place} compares other configurations: name another folder")
    begun = {"level": found.level, "smallest": found.smallest, "metric": sweep.metric}
    begun["maximize"] = sweep.goal == "maximize"
    for name, known in begun.items():
        given = getattr(args, name)
        if given != known and given != getattr(VersusArgs, name):
            begun_with = "without it" if known is None else f"with {known}"
            raise UserError(
                f"{argument(name, given)}: {files.place} was begun {begun_with}, and a verdict must not depend on what "
                f"was seen: leave it out, or name another --study"
            )
