"""The settings of a run in one flat object, from and to YAML.

Each component declares its own fields, in a dataclass beside it; `Config` is their union. A `Config` may be changed
freely: the components check the values when they are taken out of it with `part`. Decision 30.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_type_hints

from roxxel_dist.data.config import DataConfig
from roxxel_dist.data.files.discovery import absolute as absolute_path
from roxxel_dist.data.files.discovery import check_local, names_objects
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.model.config import ModelConfig, check_sizes
from roxxel_dist.model.user_code import UserCodeConfig
from roxxel_dist.process.durable import FORMAT, check_format, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import DeviceNeeds
from roxxel_dist.settings.training import ExperimentConfig, LoopOptions, OptimizerConfig
from roxxel_dist.settings.values import as_choice, fits, is_text, type_name, with_numbers
from roxxel_dist.utils.component import EXPONENT, MOST_WHOLE, DocWithFields, component, number_of
from roxxel_dist.utils.voice import argument

SECTIONS = ("model", "attention", "moe", "mla", "lora", "data", "train", "loop", "optimizer")
"""Keys of a config file whose value may be a mapping of fields."""
MOST_YAML_BYTES = 64 << 20
"""A device, or data, that was named by mistake is not read whole."""
RECORD = "record"
"""The section of a saved config with the run's environment and versions; loading skips it."""

ALIASES = {
    "learning_rate": "lr", "absolute_pos": "pos_encoding",
    "hidden_size": "dim", "d_model": "dim", "n_layers": "num_blocks", "num_layers": "num_blocks",
    "context_length": "max_context", "seq_len": "max_context", "data": "data_path", "data_dir": "data_path",
    "output_dir": "run_dir", "out_dir": "run_dir",
    "gradient_accumulation_steps": "grad_accum",
}  # fmt: skip
"""Names of some fields in other programs."""
BESIDE_CONFIG = {
    "data_path": "PATH", "run_dir": "FOLDER", "local_dir": "FOLDER", "resume": True, "amend": True,
    "fork": "RUN@STEP", "anneal": "RUN@STEP", "skip_steps": "A:B",
}  # fmt: skip
"""What a training is given beside its config, which many trainings share; with a word for the value."""

T = TypeVar("T")


@component
class Fields(OptimizerConfig, ExperimentConfig, LoopOptions, RemoteConfig, DataConfig, UserCodeConfig, ModelConfig):
    """Every setting of a run: those of the last class first."""

    def __post_init__(self) -> None:
        """No check: a `Config` may hold anything until it is used."""


COMPONENTS: tuple[type[Any], ...] = Fields.__bases__[::-1]
FIELD_TYPES: dict[str, Any] = get_type_hints(Fields)
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Fields)}  # pyright: ignore[reportArgumentType]


@component
class _Copied(Fields):
    """What a copy of a `Config`, by `dataclasses.replace` too, has beside the settings."""

    of_run: tuple[str, str | None, bool] | None = dataclasses.field(default=None, compare=False)
    """If the config was read from a run's config.yaml: the run, its init_from, and whether it has adapters."""
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """The fields that were set, in the constructor, in a file or later; the others have their defaults."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """The values that `with_defaults` has put in the place of defaults."""


COPIED = tuple(field.name for field in dataclasses.fields(_Copied) if field.name not in FIELD_TYPES)


class Config(_Copied):
    """Every setting of a run, each with a default; all are given by keyword.

    It may be changed freely. Values are checked by `validate`, and when they are used.
    """

    __hash__ = None

    if not TYPE_CHECKING:  # type checkers know the fields from the base class

        def __init__(self, *unnamed: Any, **fields: Any) -> None:
            if unnamed:
                raise TypeError(f"Config({unnamed[0]!r}): give fields by name, as in Config(dim=256)")
            for name in fields:
                if name not in FIELD_TYPES and name not in COPIED:
                    raise TypeError(f"Config: {unknown(name)}")
            super().__init__(**fields)
            settings = fields.keys() & FIELD_TYPES.keys()
            if "given" in fields:  # `dataclasses.replace` passes every field: those with another value are given too
                before = {name: self.defaults.get(name, DEFAULTS[name]) for name in settings}
                settings = fields["given"] | {name for name in settings if fields[name] != before[name]}
            self.given = frozenset(settings)

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in FIELD_TYPES and name not in COPIED:
                raise AttributeError(f"Config: {unknown(name)}")
            object.__setattr__(self, name, value)
            if name in FIELD_TYPES:
                object.__setattr__(self, "given", self.given | {name})

    def __repr__(self) -> str:
        """The fields that differ from their defaults."""
        values = self.to_dict().items()
        return f"Config({', '.join(f'{name}={value!r}' for name, value in values if value != DEFAULTS[name])})"

    def with_defaults(self, values: Mapping[str, Any]) -> Self:
        """The same settings, and the same fields given, with `values` instead of the defaults of the other fields. Of
        `values` with a wsd, another lr_schedule that is given does not take decay_steps."""
        defaults = {name: value for name, value in values.items() if name in FIELD_TYPES and name not in self.given}
        if "lr_schedule" in self.given and self.lr_schedule != "wsd":
            defaults.pop("decay_steps", None)
        return dataclasses.replace(self, defaults={**self.defaults, **defaults}, **defaults)

    def with_absolute_paths(self) -> Self:
        """The same settings with absolute paths, so that a run may be resumed from another folder. Raises ValueError: a
        path that must be local is in a bucket."""

        def absolute(name: str, path: Any) -> Any:
            if not names_objects(path):
                check_local(name, path)
            return absolute_path(path) if isinstance(path, str) else path

        sets: dict[str, Any] = {"datasets": self.datasets, "validation": self.validation}
        for field, paths in sets.items():
            if isinstance(paths, dict):
                sets[field] = {name: absolute(f"{field} {name!r}", path) for name, path in paths.items()}
        if isinstance(self.eval_tasks, list):
            for path in self.eval_tasks:
                check_local("eval_tasks", path)
            sets["eval_tasks"] = [absolute_path(path) for path in self.eval_tasks]
        check_local("cache_dir", self.cache_dir)
        init_from, cache_dir = absolute("init_from", self.init_from), absolute("cache_dir", self.cache_dir)
        config = dataclasses.replace(self, init_from=init_from, cache_dir=cache_dir, **sets)
        config.given = self.given
        return config

    def primary_path(self, data_path: str | Path | None) -> str | Path | None:
        """The path of the data set "self": `data_path`, or "self" in `datasets`; None if neither is given."""
        return data_path or (self.datasets or {}).get("self")

    def part(self, component: type[T]) -> T:
        """The fields of one component, such as `ModelConfig`, as its frozen dataclass.

        Raises ValueError: a value breaks its rule.
        """
        return component(**{f.name: getattr(self, f.name) for f in dataclasses.fields(component)})  # pyright: ignore

    @property
    def device_needs(self) -> DeviceNeeds:
        """The needs of a run of this config as to the number of its devices, in all processes together."""
        return DeviceNeeds(
            n_devices=self.n_devices,
            fsdp=self.fsdp_devices if self.fsdp else 1,
            expert=self.expert_devices,
            tensor=self.tensor_devices,
            virtual_shards=self.virtual_shards,
        )

    def validate(self) -> None:
        """Check every field. Raises ValueError: names the first field that breaks its rule."""
        self.check_types()
        values = self.to_dict()
        check_sizes({name: values[name] for name in ("vocab_size", "max_context")})
        for part in COMPONENTS:
            if part is not ModelConfig or values["model"] is None:  # ModelConfig does not describe a user-defined model
                self.part(part)
        if values["model"] is None and self.use_moe and self.n_experts % self.expert_devices:
            best = max(n for n in range(1, self.expert_devices) if self.n_experts % n == 0)
            raise UserError(
                f"expert_devices is {self.expert_devices}: it must divide n_experts, which is {self.n_experts}, as "
                f"{best} does"
            )
        if values["phases"]:
            from roxxel_dist.curriculum.phases import all_phases  # numpy: not for --help

            all_phases(values["phases"])
        for name, value in values.items():
            if isinstance(value, int) and abs(value) > MOST_WHOLE and not takes_fractions(name):
                raise UserError(f"{name} is {value}: it must be at most {MOST_WHOLE:,}")

    def check_types(self, source: str = "") -> None:
        """Raises ValueError for the first value of another type than its field; `source` names its file in messages."""
        for name, value in self.to_dict().items():
            place = f"{source}: " if source else ""
            if not fits(value, FIELD_TYPES[name]):
                state = "has no value" if value is None and source else f"is {value!r}"
                cure = _cure(name, value, of_file=bool(source))
                raise UserError(f"{place}{name} {state}: it must be {type_name(FIELD_TYPES[name])}{cure}")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as plain values for YAML."""
        return {name: getattr(self, name) for name in FIELD_TYPES}

    def save_yaml(self, path: str | Path, record: Mapping[str, Any] | None = None) -> None:
        """Write all fields atomically; `record` is a section of metadata that loading skips."""
        import yaml

        content = {**self.to_dict(), **({RECORD: {"format": FORMAT, **record}} if record else {})}
        write_file(Path(path), yaml.safe_dump(content, sort_keys=False))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """A config from a file; fields that it does not name keep their defaults.

        Of the `config.yaml` of a run, the config remembers the run, which is the base if you add adapters. Raises
        ValueError: no such file, not YAML, or an error of `from_dict`.
        """
        values, path = load_yaml(path), Path(path)
        config = cls.from_dict(values, str(path))
        # A copy of config.yaml elsewhere has a record too, but no weights beside it.
        if RECORD in values and path.name == "config.yaml" and (path.parent / "checkpoints").is_dir():
            config.of_run = str(path.parent), config.init_from, config.use_lora
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """A config from a mapping of field names to values; fields may stand in sections (`SECTIONS`).

        Args:
            values: as in YAML; text such as "5e-4" becomes a number if the field is a number.
            source: its name in messages.

        Raises:
            ValueError: a key that no field has, a field that is given twice, or a value of another type than its field.
        """
        values = flat_fields(values, source)
        if "parameters" in values and {"method", "metric"} & values.keys():
            raise UserError(f"{source}: this is the file of a sweep, not a config: `sweep --sweep_config` takes it")
        for key, value in values.items():
            if key not in FIELD_TYPES and key != RECORD:
                nested = isinstance(value, Mapping) and nearest(key, [*FIELD_TYPES]) is None
                names = f"there is no section {key!r}: write its fields at the top, or in {', '.join(SECTIONS)}"
                raise UserError(f"{source}: {names if nested else unknown(key)}")
        config = cls(**{key: _read(key, value) for key, value in values.items() if key != RECORD})
        config.check_types("" if source == "config" else source)
        return config


Config.__doc__ = DocWithFields(Config.__doc__ or "")  # pyright: ignore[reportAttributeAccessIssue]


def yaml_problem(error: Exception) -> str:
    """The error in a YAML text: the place and the reason, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8: save the file as UTF-8"
    mark, what = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is not None and what:
        cure = ": write spaces in place of the tab" if r"'\t'" in what else ""
        cure = cure or (": remove the tag, the word with !" if "constructor for the tag" in what else "")
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}{cure}"
    return " ".join(str(error).replace('in "<unicode string>", ', "at ").split())


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError for no such file, no YAML, no mapping, a key that is given twice, or
    a config with the record of another format."""
    values = read_yaml(path)[0]
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected `field: value` lines, found a {type(values).__name__}")
    if isinstance(values.get(RECORD), dict):
        check_format(values[RECORD], path)
    return values


def read_yaml(path: str | Path, *, unique: bool = True, exponents: bool = False) -> tuple[Any, Any]:
    """(the value, the tree of nodes with their lines) of a YAML file; `unique` and `exponents` are those of
    `parse_nodes`. Raises UserError as `parse_nodes`, or where the file cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_YAML_BYTES + 1)
        if len(data) > MOST_YAML_BYTES:
            raise UserError(f"{path}: has more than {MOST_YAML_BYTES >> 20} MiB, which no config has: check the path")
        text = data.decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid YAML: {yaml_problem(error)}") from error
    return parse_nodes(text, str(path), unique=unique, exponents=exponents)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text, as `parse_nodes` gives it."""
    return parse_nodes(text, source)[0]


def parse_nodes(text: str, source: str, *, unique: bool = True, exponents: bool = False) -> tuple[Any, Any]:
    """(the value, the tree of nodes) of a YAML text. A word such as `no` or `2024` is text where a field, or a key, is.

    With `exponents`, 1e-3 without quotes is a number, as in YAML 1.2; a text in quotes stays one. Raises UserError for
    no YAML, or, where it is to be `unique`, a key that is given twice in a mapping: YAML itself keeps the last.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            # Before `<<` puts the keys of other mappings in, which may be given again.
            node = super().compose_mapping_node(anchor)  # pyright: ignore[reportUnknownMemberType]
            keys: list[Any] = []
            for key, _ in _pairs(node):
                # A data set that is called `no`, or `on`, or 1e5.
                if key.tag.endswith(":bool") or (exponents and EXPONENT.fullmatch(key.value)):
                    key.tag = "tag:yaml.org,2002:str"
                if not unique or key.tag.endswith(":merge"):
                    continue
                value = self.construct_object(key)  # 1 and 1.0 are one key
                if value in keys:
                    line = key.start_mark.line + 1
                    raise UserError(f"{source}: line {line}: {key.value!r} is given twice: keep one of the two")
                keys.append(value)
            return node

        def construct_document(self, node: Any) -> Any:
            for key, value in _pairs(node):
                for name, inner in [(key, value), *(_pairs(value) if key.value in SECTIONS else [])]:
                    if is_text(FIELD_TYPES.get(name.value)) and isinstance(inner, yaml.ScalarNode):
                        inner.tag = inner.tag if inner.tag.endswith(":null") else "tag:yaml.org,2002:str"
            return super().construct_document(node)

    def _pairs(node: Any) -> list[tuple[Any, Any]]:
        """(key, value) of a mapping whose keys are plain words."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        return [(key, value) for key, value in pairs if isinstance(key, yaml.ScalarNode)]

    if exponents:
        Loader.add_implicit_resolver(
            "tag:yaml.org,2002:float", re.compile(f"(?:{EXPONENT.pattern})$"), list("-+.0123456789")
        )
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node), node
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2024-13-99
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source}: not valid YAML: {yaml_problem(error)}") from error


def flat_fields(values: Mapping[str, Any], source: str = "config") -> dict[str, Any]:
    """The fields of all sections and those outside sections. Raises ValueError for a field that is given twice."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in SECTIONS and key not in FIELD_TYPES and value is None:
            continue  # an empty section
        fields = value if key in SECTIONS and isinstance(value, Mapping) else {key: value}
        for name, field in fields.items():
            if str(name) in flat:
                raise UserError(f"{source}: {name!r} is given twice, in sections or outside: keep one of the two")
            flat[str(name)] = field
    return flat


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The closest match for a name among known names, if there is one."""
    meant = next((field for alias, field in ALIASES.items() if _letters(alias) == _letters(name)), None)
    if meant in known:
        return meant
    if same := [each for each in known if _letters(each) == _letters(name)]:
        return same[0]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.63)), None)


def _letters(name: str) -> str:
    """A name without its separators: learningrate is learning_rate, and batch-size batchSize."""
    return re.sub(r"[_\W]", "", name).lower()


def unknown(name: str) -> str:
    """The message for a field that does not exist, with what is meant, where that is known."""
    near = nearest(name, [*FIELD_TYPES, *BESIDE_CONFIG])
    if near in BESIDE_CONFIG:
        return f"there is no field {name!r}: give {argument(near, BESIDE_CONFIG[near])} beside the config"
    if (whole := name.partition(".")[0]) != name and whole in FIELD_TYPES:
        return f"there is no field {name!r}: it would be a part of {whole!r}, which is given whole"
    return f"there is no field {name!r}: " + (
        f"did you mean {near!r}?" if near else "the help of `roxxel-dist train` lists the fields"
    )


def takes_fractions(name: str) -> bool:
    """Whether a field of the config may be a number that is not whole; False where there is no such field."""
    return name in FIELD_TYPES and fits(0.5, FIELD_TYPES[name])


def _cure(name: str, value: Any, *, of_file: bool) -> str:
    """How a value of a wrong type is mended, where that is known."""
    if isinstance(value, dict) and fits([], FIELD_TYPES[name]):
        return f": write [{value}]"
    if isinstance(value, bool) and of_file:
        return ": on, off, yes and no are True and False in YAML"
    try:
        is_quoted = isinstance(value, str) and fits(parse_yaml(value, name), FIELD_TYPES[name])
    except UserError:
        return ""
    return f": write {value} without quotes" if is_quoted else ""


def _read(name: str, value: Any) -> Any:
    """A YAML value for a field. YAML reads 5e-4 as text and only 5.0e-4 as a number."""
    value = as_choice(FIELD_TYPES[name], value)
    if isinstance(value, str) and not takes_fractions(name) and fits(1, FIELD_TYPES[name]):
        number = number_of(value)
        return number if isinstance(number, int) else value
    if isinstance(value, str) and takes_fractions(name):
        try:
            return float(value)
        except ValueError:
            return value
    return with_numbers(value) if name == "model_args" else value
