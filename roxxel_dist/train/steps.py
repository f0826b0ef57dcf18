"""The one room where a model turns into programs: its state, a training step, an evaluation, and the first arrays.

Every command that meets a model asks here: training, `eval`, `plan`, `find-lr`, `check-layouts` and `audit`. A run with
virtual shards has `ShardedSteps`, which have the same members; whoever uses them need not know which they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import batch_sharding, fit_sharding, one_device, scalars_on
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.devices.program_cost import ProgramCost, program_cost
from roxxel_dist.devices.targets import hosts_of
from roxxel_dist.devices.traced_flops import flops_of
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.settings.training import LoopOptions
from roxxel_dist.train.exact.cost import Key, ShardedMemory, count_calls, key_of, simulated_mesh
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.exact.layout import ShardLayout, place_like, rows_like, rows_sharding, shapes_of
from roxxel_dist.train.exact.step import ShardedEvaluation, ShardedStep, exact_places
from roxxel_dist.train.step.compile import AotCompiler, Compiler, StepMemory, batch_key, mesh_of
from roxxel_dist.train.step.local_sums import accumulation
from roxxel_dist.train.step.optimizer import InitialState, Optimizer
from roxxel_dist.train.step.state import StateBuilder, TrainState
from roxxel_dist.train.step.step import LossFn, check_vocabulary, make_eval_step, make_step, measure

Load = Callable[[Leaves, Leaves], Leaves]
"""(parameters, state beside them) -> those of a trained model, placed alike; see `StateBuilder.build`."""
Kind = Literal["training", "validation"]
"""Which program of a step is meant."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What decides the programs of a model, a loss and an optimizer, beside these."""

    grad_accum: int = 1
    """Micro-batches a step."""
    fsdp: bool = False
    """Whether large parameters are cut over the devices."""
    dtype: Any = None
    """Of floating parameters as they are kept; None: as the model makes them."""
    compute_dtype: Any = None
    """Of floating parameters in the forward and backward pass; None: as they are kept."""
    skip_bad: bool = False
    """Whether a bad step changes nothing."""
    average: bool = False
    """Whether an average of the parameters is kept."""
    virtual_shards: int = 0
    """0: the bits of a step depend on the number of devices."""

    @classmethod
    def of_run(cls, options: LoopOptions, grad_accum: int = 1) -> "StepOptions":
        """The step options of a run's options."""
        return cls(
            grad_accum=grad_accum,
            fsdp=options.fsdp,
            dtype=jnp.bfloat16 if options.use_bf16 else None,
            compute_dtype=jnp.bfloat16 if options.bf16_compute else None,
            skip_bad=options.on_bad_step == "skip",
            average=options.ema > 0,
            virtual_shards=options.virtual_shards,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps:
    """The programs of a model, a loss and an optimizer on a mesh, and what they take."""

    builder: StateBuilder
    loss: LossFn
    optimizer: Optimizer | None
    """None: nothing is trained, and the state has no moments."""
    sharding: NamedSharding
    """Of a (rows, tokens) batch."""
    options: StepOptions
    settings: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are inputs of every step beside those of the model, such as "lr"."""

    @property
    def split(self) -> ModuleSplit:
        """The module without its arrays."""
        return self.builder.split

    @property
    def mesh(self) -> Mesh:
        """The devices of the run."""
        assert isinstance(self.sharding.mesh, Mesh)
        return self.sharding.mesh

    @cached_property
    def _placed(self) -> tuple[TrainState, Leaves]:
        """The state, and the inputs that are the model's, as shapes with shardings."""
        return self.builder.shapes

    @property
    def state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        return self._placed[0]

    @cached_property
    def hparams(self) -> Leaves:
        """The inputs of every step, likewise."""
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self.mesh, P()))
        numbers: Any = dict.fromkeys(self.settings, number)
        return self._placed[1] | numbers

    def init(self, *, restored: bool = False, load: Load | None = None) -> tuple[TrainState, Leaves]:
        """(the state before the first step, the inputs of every step), on the mesh; the arguments are those of
        `StateBuilder.build`: of a state that will be `restored` from a checkpoint there are shapes."""
        state, hparams = self._place_built(self.builder.build(restored=restored, load=load))
        return state, {**hparams, **scalars_on(self.mesh, self.settings)}

    def _place_built(self, built: tuple[TrainState, Leaves]) -> tuple[TrainState, Leaves]:
        return built

    @cached_property
    def train(self) -> Any:
        """The training step, (state, hparams, batch) -> (state, metrics), for an `AotCompiler` to compile."""
        options, optimizer = self.options, self.optimizer
        assert optimizer is not None
        more: Any = {"grad_accum": options.grad_accum, "skip_bad": options.skip_bad}
        more["compute_dtype"] = options.compute_dtype
        return make_step(self.split, self.loss, optimizer, self.state, self.sharding, **more)

    def evaluate(self, end: int | None = None) -> Any:
        """The evaluation, (params, rest, hparams, batch) -> losses, likewise; `end` is as for `make_eval_step`."""
        return make_eval_step(self.split, self.loss, self.options.compute_dtype, end)

    def program(self, kind: Kind) -> Any:
        """`train`, or `evaluate` without an end."""
        return self.train if kind == "training" else self.evaluate()

    def args(self, kind: Kind, batch: Any) -> tuple[Any, ...]:
        """The (abstract) arguments of that program, for a batch of any mesh."""
        if kind == "training":
            return self.state, self.hparams, self._place(batch, self.options.grad_accum)
        return self.state.evaluated, self.state.rest, self.hparams, self._place(batch)

    def _place(self, batch: Any, grad_accum: int = 1) -> Any:
        def place(leaf: Any) -> Any:
            fitted = fit_sharding(self.sharding, leaf.shape, grad_accum)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=fitted)

        return jax.tree.map(place, batch)

    def on_one_device(self) -> "Steps":
        """The ordinary steps on the first device, where nothing is cut; the model is not traced again."""
        mesh = _first_device(self.mesh)
        return Steps(
            builder=self.builder.on_mesh(mesh),
            loss=self.loss,
            optimizer=self.optimizer,
            sharding=batch_sharding(mesh),
            options=replace(self.options, virtual_shards=0, fsdp=False),
            settings=self.settings,
        )

    def gradient(self, params: Leaves, rest: Leaves, hparams: Leaves, batch: Any) -> tuple[jax.Array, Leaves]:
        """(float32[] the loss, the gradient by parameter) of a batch, from arrays of this process's first device."""

        def loss_of(params: Leaves) -> tuple[jax.Array, jax.Array]:
            model = self.split.merge(params, rest, hparams, training=True, dtype=self.options.compute_dtype)
            loss = measure(self.loss, model, batch)
            return loss.minimized, jnp.float32(loss.loss)

        with jax.set_mesh(_first_device(self.mesh)):
            (_, loss), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
        return loss, grads

    def accumulation(self, batch: Any) -> str:
        """What is sent with micro-batches of such a batch, and why; empty where nothing is."""
        shape, options = jax.tree.leaves(batch)[0].shape, self.options
        args = self.split, self.loss, self.state, self.hparams, self.sharding, shape, options.grad_accum
        return accumulation(*args, options.compute_dtype).text

    def flops(self, kind: Kind, batch: Any) -> float:
        """FLOPs of a program for such a batch, of all devices together, before it is divided; it is traced."""
        args = self.args(kind, batch)
        return flops_of(self.program(kind), args, mesh_of(args[-1], self.mesh) or self.mesh)

    def program_flops(self, program: Any) -> float | None:
        """What one device computes in a compiled program of these steps; None where the program does not say it."""
        return _program_cost(program, self.mesh).flops

    def work_ratio(self, program: Any, batch: Any) -> float | None:
        """FLOPs of all devices over those of the step before it is divided; None where neither is known.

        `program` is the compiled training step for such a batch; the step is traced again.
        """
        here = self.program_flops(program)
        whole = self.flops("training", batch) if here else 0.0
        return here * self.mesh.size / whole if here and whole else None

    def memory(self, compiler: AotCompiler, batch: Any) -> StepMemory:
        """The memory that a training step for such a batch takes on a device, by the compiler of the devices here."""
        key = batch_key(batch)
        compiler.prepare(key, self.train, self.state, self.hparams, batch)
        return StepMemory.of_program(compiler.get(key))

    def simulated(self, make: Callable[[Mesh], "Steps"]) -> "Steps":
        """The steps that `cost` asks: these, or, where a step must run for that, those that are made for a mesh of
        simulated devices."""
        del make
        return self

    def cost(self, kind: Kind, batch: Any, compiler: Compiler, simulated: "Steps") -> tuple[ProgramCost, StepMemory]:
        """(what a device computes, moves and sends in a step for such a batch, its memory), of compiled programs.

        Of devices that do not run as many programs, the one that runs most.
        """
        del simulated
        program = compiler.step(self.program(kind), self.args(kind, batch), self.mesh)
        return _program_cost(program, self.mesh), StepMemory.of_program(program)

    def try_loss(self, batch: Any) -> None:
        """Trace the loss once, without computing it. What the model or the loss function raises passes."""
        evaluate = make_eval_step(self.split, self.loss, self.options.compute_dtype)
        with jax.set_mesh(self.mesh):
            jax.eval_shape(evaluate, self.state.params, self.state.rest, self.hparams, batch)

    def check_vocabulary(self, shape: Shape, datasets: Mapping[str, Roxxel]) -> None:
        """Raises ValueError where the data has tokens that the model has no logits for; nothing is computed."""
        check_vocabulary(self.split, self.loss, self.state, self.hparams, self.mesh, shape, datasets)

    def check_model_state(self, batch: Any) -> None:
        """Raises UserError where a call of the model changes its state in a way that these steps cannot follow."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedSteps(Steps):
    """The steps of a run with virtual shards, whose bits are the same on any number of devices.

    The `builder` is of one device of this process: each computes the whole state, and keeps its slices.
    """

    @cached_property
    def _placed(self) -> tuple[TrainState, Leaves]:
        options, init = self.options, self.builder.init_optimizer
        return exact_places(
            self.split, *self.builder.shapes, init, self.mesh, options.virtual_shards, fsdp=options.fsdp
        )

    def _place_built(self, built: tuple[TrainState, Leaves]) -> tuple[TrainState, Leaves]:
        return place_like(built, self._placed)

    @cached_property
    def layout(self) -> ShardLayout:
        """Which shards a device has."""
        return ShardLayout(self.options.virtual_shards, self.sharding)

    @cached_property
    def programs(self) -> ShardPrograms:
        """The functions of one device."""
        options, optimizer = self.options, self.optimizer
        numbers = options.virtual_shards, options.grad_accum, options.compute_dtype, options.skip_bad
        return ShardPrograms(self.split, self.loss, optimizer, *numbers)  # pyright: ignore[reportArgumentType]

    @cached_property
    def train(self) -> ShardedStep:
        """The training step, which takes and gives `DeviceStates`."""
        return ShardedStep(self.programs, self.layout)

    def evaluate(self, end: int | None = None) -> ShardedEvaluation:
        """See `Steps`."""
        return ShardedEvaluation(replace(self.programs, end=end), self.layout)

    def accumulation(self, batch: Any) -> str:
        """An empty text: each shard adds up its own micro-batches."""
        del batch
        return ""

    def program_flops(self, program: Any) -> float | None:
        """No FLOPs: a step is many programs."""
        del program

    def memory(self, compiler: AotCompiler, batch: Any) -> StepMemory:
        """See `Steps`."""
        key = batch_key(batch)
        compiler.prepare(key, self._memory_of(batch), self.state, self.hparams, batch)
        return compiler.get(key)

    def _memory_of(self, batch: Any) -> ShardedMemory:
        return ShardedMemory.of_step(self.programs, self.layout, self.state, self.hparams, batch)

    def simulated(self, make: Callable[[Mesh], Steps]) -> Steps:
        """See `Steps`."""
        return make(simulated_mesh(self.mesh))

    def cost(self, kind: Kind, batch: Any, compiler: Compiler, simulated: Steps) -> tuple[ProgramCost, StepMemory]:
        """See `Steps`: of each program as often as the step runs it; of an evaluation the memory of its largest one."""
        programs, args, line = dict[Key, Any](), self.args(kind, batch), self.layout.line
        meshes, alone = dict[Key, Mesh](), one_device(self.mesh, self.mesh.devices.flat[0])

        def one(jitted: Any, args: Any, mesh: Mesh) -> Any:
            meshes[key := key_of(jitted, args)] = mesh
            return programs.setdefault(key, compiler.one(jitted, args, mesh))

        def each(jitted: Any, args: Any, devices: Any) -> list[Any]:
            meshes[key := key_of(jitted, args)], found = alone, compiler.each(jitted, args, devices)
            programs.setdefault(key, found[0])
            return found

        with jax.set_mesh(alone):
            self.program(kind).compile(Compiler(one, each), *args)
        most = max(line.devices.flat, key=lambda device: len(self.layout.shards_of(device)))
        number = list(line.devices.flat).index(most)
        total = ProgramCost()
        for key, count in count_calls(simulated.program(kind), number, programs, args).items():
            total.add(_program_cost(programs[key], meshes[key]), count)
        if kind == "training":
            memory = self._memory_of(args[-1]).with_programs({name: program for (name, _), program in programs.items()})
        else:
            memory = max(map(StepMemory.of_program, programs.values()), key=lambda memory: memory.peak)
        return total, memory

    def check_model_state(self, batch: Any) -> None:
        """Raises UserError where a call of the model changes what has no mean over the shards; traces one of them.

        Its rows are whole: models of the user's own have no others.
        """
        rows = rows_like(batch, jax.tree.leaves(batch)[0].shape[0] // self.layout.count)
        args = *shapes_of((self.state.params, self.state.rest, self.hparams)), rows
        with jax.set_mesh(_first_device(self.mesh)):
            jax.eval_shape(self.programs.sums, *args, jax.ShapeDtypeStruct((), jnp.int32))


def make_steps(
    model: nnx.Module | Callable[[], nnx.Module],
    loss: LossFn,
    optimizer: Optimizer | None,
    sharding: Mesh | NamedSharding,
    options: StepOptions,
    settings: Mapping[str, float] | None = None,
) -> Steps:
    """The steps of a model, or of a callable that makes one, its loss and its optimizer (None: nothing is trained); the
    model is traced, and nothing is computed.

    `sharding` is that of a (rows, tokens) batch, or a mesh alone for `batch_sharding` of it; `settings` are numbers
    that are inputs of every step, such as "lr".

    Raises ValueError where settings of the model or the optimizer are impossible, or the mesh does not fit; TypeError
    where the callable returns no module.
    """
    sharding = batch_sharding(sharding) if isinstance(sharding, Mesh) else sharding
    mesh, shards = sharding.mesh, options.virtual_shards
    assert isinstance(mesh, Mesh)
    init = (lambda params: {}) if optimizer is None else InitialState(optimizer, average=options.average)
    place, fsdp = (_first_device(mesh), False) if shards else (mesh, options.fsdp)
    steps = (ShardedSteps if shards else Steps)(
        builder=StateBuilder.of_model(model, init, place, fsdp=fsdp, dtype=options.dtype),
        loss=loss,
        optimizer=optimizer,
        sharding=rows_sharding(sharding, shards),
        options=options,
        settings=settings or {},
    )
    _ = steps.state  # what does not fit is known now
    return steps


def _program_cost(program: Any, mesh: Mesh) -> ProgramCost:
    return program_cost(program.as_text(), hosts_of(list(mesh.devices.flat)))


def _first_device(mesh: Mesh) -> Mesh:
    """The first device of this process, or of a mesh of devices that are not here."""
    own = (device for device in mesh.devices.flat if device.process_index == jax.process_index())
    return one_device(mesh, next(own, mesh.devices.flat[0]))
