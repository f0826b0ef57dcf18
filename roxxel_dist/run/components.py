"""Builders: from a Config and a corpus to model, loss, optimizer, curriculum and validation sets."""

import contextlib
import copy
import dataclasses
import importlib.util
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from roxxel_dist.cluster.distributed import broadcast_from_primary, is_primary, process_count, process_index
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.corpus.build import build
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.tasks import Task, find_tasks, read_tasks
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.model.config import AttentionKernel
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.split import split_module
from roxxel_dist.model.user_code import call_function, import_function, is_function
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import FullDiskError, UserError, pip_install
from roxxel_dist.process.file_lock import print_line
from roxxel_dist.process.progress import Progress
from roxxel_dist.run.curriculum import (
    build_curriculum,
    check_vocabularies,
    open_data_sets,
    shard_paths,
    vocabulary_size,
)
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.training import SCHEDULE_FREE, LoopOptions, OptimizerConfig
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.log.base import Tracker
from roxxel_dist.train.log.tensorboard import TensorboardTracker
from roxxel_dist.train.log.wandb import WandbTracker
from roxxel_dist.train.step.optimizer import NamedOptimizer
from roxxel_dist.train.step.step import LossFn, loop_numbers
from roxxel_dist.train.steps import StepOptions, Steps, make_steps
from roxxel_dist.train.validation.evaluator import HELD_OUT
from roxxel_dist.weights.base import check_tokenizer, check_weights, find_checkpoint, take_hf_shape, tokenizer_of
from roxxel_dist.weights.load import attention_kernel, model_builder, parameter_widths, slower_attention

BUILD_LIMIT_S = 6 * 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunComponents:
    """The parts of a run; nothing is on a device yet."""

    config: Config
    """With the size of the vocabulary."""
    vocab_size: int
    build: Callable[[], nnx.Module]
    """Makes the model, with the same weights each time; to be called under jit."""
    loss: LossFn
    optimizer: NamedOptimizer
    curriculum: Curriculum
    """The phases over the part of the data that is trained on."""
    validation: Mapping[str, Roxxel]
    """Validation data sets by name: those of the config, or else the held-out part, as `HELD_OUT`."""
    data: Roxxel
    """The corpus as it is on disk, held-out part included."""
    grad_accum: int
    """Micro-batches a step."""
    kernel: AttentionKernel
    """The attention kernel; for a user-defined model, the kernel in the config."""
    options: LoopOptions
    """With nothing to hold out: `curriculum` already excludes the held-out part. Without fsdp where `fsdp_devices` is
    1: each device has a copy of its own."""
    devices: Sequence[Any] | None = None
    """What it is compiled for, if that is not here; None: the devices of all processes."""

    @property
    def slower_attention(self) -> str:
        """See `roxxel_dist.weights.load.slower_attention`."""
        return slower_attention(self.config, self.curriculum.shapes, self.kernel, self.devices)

    def steps(self, mesh: Mesh, total_steps: int) -> Steps:
        """The programs of the run on a mesh, with a schedule of so many steps.

        Raises ValueError where settings of the model or the optimizer are impossible.
        """
        settings = self.optimizer.settings(total_steps) | loop_numbers(self.options)
        options = StepOptions.of_run(self.options, self.grad_accum)
        return make_steps(self.build, self.loss, self.optimizer, mesh, options, settings)

    def mesh(self, processes: int | None = None) -> Mesh:
        """The devices of this run, shared by `processes` in order; default: the processes that are running.

        Raises ValueError for too few devices, axes that do not divide them, or a process without a device.
        """
        config, every = self.config, processes or process_count()
        needs = config.device_needs
        mesh = make_mesh(
            needs.n_devices, fsdp=needs.fsdp, expert=needs.expert, tensor=needs.tensor, devices=self.devices
        )
        if processes:
            used = -(-mesh.size * processes // len(self.devices or jax.devices()))
        else:
            used = len({device.process_index for device in mesh.devices.flat})
        if used < every:
            raise UserError(
                f"n_devices is {config.n_devices}, which leaves none to {every - used} of {every} processes: use "
                f"0 for all, or launch fewer"
            )
        return mesh


def build_components(
    config: Config,
    data: Roxxel,
    *,
    trial: bool = False,
    begun_with: AttentionKernel | None = None,
    devices: Sequence[Any] | None = None,
) -> RunComponents:
    """The components of a run of `config` on `data`. Puts nothing on a device, and touches no run directory.

    In a trial of a sweep a warm-up longer than half of the run is cut to half: if it is searched together with epochs
    or batch_size, it does not fit all trials. `attention: auto` keeps the kernel `begun_with`. `devices` are those to
    compile for, if they are not here. Raises ValueError for a field that breaks its rule, or does not fit the data or
    the devices.
    """
    config = take_hf_shape(config)
    vocab_size = vocabulary_size(config, data)
    config = dataclasses.replace(config, vocab_size=vocab_size)
    config.validate()
    curriculum, held_out = build_curriculum(config, data)
    half = curriculum.total_steps // 2
    if trial and (config.warmup_steps or 0) > half:
        config = dataclasses.replace(config, warmup_steps=half)
    kernel = attention_kernel(config, curriculum.shapes, begun_with, devices)
    build = model_builder(config, kernel)
    optimizer = build_optimizer(config, build)
    validation = open_data_sets(config, "validation", data)
    check_vocabularies({"self": data, **curriculum.mix_streamers, **validation}, vocab_size)
    loss = token_losses if config.loss is None else import_function("loss", config.loss)
    fsdp = config.fsdp and config.fsdp_devices != 1  # else it would cut over "data", as on a user's mesh without "fsdp"
    options = dataclasses.replace(config.part(LoopOptions), val_fraction=0.0, fsdp=fsdp)
    return RunComponents(
        config=config, vocab_size=vocab_size, build=build, loss=loss, optimizer=optimizer, curriculum=curriculum,
        validation=validation or {HELD_OUT: held_out}, data=data, grad_accum=config.grad_accum, kernel=kernel,
        options=options, devices=devices,
    )  # fmt: skip


def open_tasks(
    config: Config, tokenizer: Tokenizer | None, patterns: Sequence[str] | None = None, field: str = "eval_tasks"
) -> tuple[Task, ...]:
    """The evaluation tasks of a run, or those that `patterns`, given by `field`, name instead. Raises ValueError for a
    file that breaks its rule, and where the data has no tokenizer."""
    named = config.eval_tasks if patterns is None else patterns
    if not named:
        return ()
    if tokenizer is None:
        raise UserError(
            f"{field} is {list(named)}, and the data has no tokenizer to read texts with: put its tokenizer.json "
            f"beside the shards, or leave {field} out"
        )
    return read_tasks(named, tokenizer, config.max_context, field=field)


def open_corpus(
    config: Config,
    data_path: str | Path | None,
    into: Path,
    *,
    begins: bool = True,
    share: Callable[[], None] = lambda: None,
) -> Roxxel:
    """The corpus at `data_path`; rank 0 makes shards of text in the folder `into`, for all ranks.

    `share`, called on every rank after that, copies the shards to hosts that do not see the folder. Raises ValueError
    if no data is named, or it cannot be read. If a run `begins` with the weights of `init_from`, they are checked
    against the model before text is read.
    """
    if data_path is None:
        raise UserError("no data: name a text file, a folder or shards with data_path=PATH (a run's config names none)")
    if is_tokens(data_path):
        data = Roxxel(data_path, dtype=config.data_dtype, remote=config.part(RemoteConfig))
        if data.guessed_dtype is not None and is_primary():
            print_line(f"{data.shards[0].path} has no header: its tokens are read as {data.dtype} (data_dtype)")
        if config.init_from is not None:
            check_tokenizer(config.init_from, data)
        return data
    if config.data_dtype != "auto":
        raise UserError(
            f"data_dtype is {config.data_dtype}, and {data_path} is text: leave it out; it is of .bin files of tokens"
        )
    tokenizer, vocab_size = config.tokenizer_type, config.vocab_size
    if config.init_from is not None:
        tokenizer, vocab_size = str(tokenizer_of(config.init_from)), None
    # Checks that need no corpus come before hours of tokenizing.
    for field, name in (("model", config.model), ("loss", config.loss), ("optimizer", config.optimizer)):
        if name is not None and is_function(name):
            import_function(field, name)
    shard_paths(config, "datasets")
    shard_paths(config, "validation")
    find_tasks(config.eval_tasks or ())
    if config.init_from is not None and begins:
        _check_base(config, config.init_from, tokenizer)
    progress = Progress.from_env(process_index())
    progress.say("")  # the launcher's time limit for the start must not apply to a large text
    run_on_primary("corpus", lambda: build([data_path], into, tokenizer=tokenizer, vocab_size=vocab_size).close())
    share()
    progress.say("start")
    return Roxxel(into)


def _check_base(config: Config, init_from: str, tokenizer: str) -> None:
    """Raises ValueError if `init_from` has no weights, or weights of another model than that of the config."""
    checkpoint, config = find_checkpoint(init_from), take_hf_shape(config)
    if config.model is None:
        config = dataclasses.replace(config, vocab_size=config.vocab_size or Tokenizer.load(tokenizer).vocab_size)
        split, params, _, hparams = split_module(nnx.eval_shape(model_builder(config)))
        check_weights(checkpoint, split.of_base(params, hparams))


@contextlib.contextmanager
def temporary_folder(data_path: str | Path | None, command: str) -> Iterator[Path]:
    """A folder in which `open_corpus` makes text into shards for a command that keeps nothing.

    It is in the working directory, which all ranks share, as for runs. Rank 0 may remove it after its own last step: a
    rank reads its rows before a step, and no rank finishes a step alone.
    """
    if data_path is None or is_tokens(data_path):
        yield Path()
        return
    with _ended_by_signals(), contextlib.ExitStack() as held:
        made: list[Path] = []

        def make() -> None:
            made.append(held.enter_context(interrupt.temporary_folder(f".{command}-", Path.cwd())))

        run_on_primary("folder for the corpus", make)
        yield Path(broadcast_from_primary("folder of the corpus", "".join(map(str, made)))) / "data"


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP end the process as Ctrl-C does, so that cleanup runs."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    if interrupt.active() or threading.current_thread() is not threading.main_thread():
        yield  # the command cleans up itself; Python allows signal handlers only in the main thread
        return
    with interrupt.handled_by(leave, (signal.SIGTERM, signal.SIGHUP)):
        yield


def run_on_primary(what: str, act: Callable[[], Any]) -> None:
    """Do something on rank 0 only; a UserError there is raised on every rank."""
    message = ""
    if is_primary():
        try:
            with usage_errors():
                act()
        except UserError as error:
            kind = "full" if isinstance(error, FullDiskError) else "usage"
            message = f"{kind} {error}"
    if message := broadcast_from_primary(what, message, BUILD_LIMIT_S):
        kind, _, text = message.partition(" ")
        raise (FullDiskError if kind == "full" else UserError)(text)


def build_optimizer(config: Config, build: Callable[[], nnx.Module]) -> NamedOptimizer:
    """The optimizer of a config, for the model that `build` makes.

    Raises ValueError where a function of the user's is not found, does not take (config, learning_rate), returns no
    optax transformation, or is named together with mup, which would not know its update.
    """
    settings = config.part(OptimizerConfig)
    if settings.optimizer == SCHEDULE_FREE and config.parametrization != "standard":
        raise UserError(
            f"parametrization is {config.parametrization}, and optimizer is {settings.optimizer}, whose average would "
            f"not have the rates by width: use adamw or muon, or leave parametrization out"
        )
    if not is_function(settings.optimizer):
        return NamedOptimizer(settings, widths=parameter_widths(config, build))
    if config.parametrization != "standard":
        raise UserError(
            f"parametrization is {config.parametrization}, and optimizer is {settings.optimizer!r}: how its updates "
            f"grow with the width is not known, so leave parametrization out, or name one of our optimizers"
        )
    make = import_function("optimizer", settings.optimizer)

    def own(rate: jax.Array) -> optax.GradientTransformation:
        mine = copy.deepcopy(config)  # the user's function may change it
        mine.model_args = mine.model_args or {}
        form = "def build(config, learning_rate)"
        made = call_function("optimizer", settings.optimizer, make, form, mine, rate)
        if isinstance(made, optax.GradientTransformation):
            return made
        raise UserError(
            f"optimizer is {settings.optimizer!r}: it returned a {type(made).__name__}, and must return an "
            f"optax.GradientTransformation"
        )

    jax.eval_shape(lambda rate: own(rate) and rate, jnp.float32(0))  # find a mistake now: the rate of a step is traced
    return NamedOptimizer(settings, own=own)


def check_installed(config: Config) -> None:
    """Raises UserError for a tracker whose package is not installed: a night without its files is lost."""
    for field, wanted, package in (
        ("wandb", config.wandb != "off", "wandb"),
        ("tensorboard", config.tensorboard, "tensorboardX"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            value = getattr(config, field)
            raise UserError(
                f"{field} is {value}, and the package {package} is not installed: {pip_install(field)}, or leave "
                f"{field} out"
            )


def trackers_of(config: Config, run: Path) -> list[Tracker]:
    """The trackers of rank 0; other ranks have none."""
    trackers = list[Tracker]()
    if is_primary() and config.wandb != "off":
        about = {"name": config.name, "notes": config.notes, "tags": config.tags}
        trackers.append(WandbTracker(run, config.wandb, config.wandb_project, **about, config=config.to_dict()))
    if is_primary() and config.tensorboard:
        trackers.append(TensorboardTracker(run, config.to_dict()))
    return trackers
