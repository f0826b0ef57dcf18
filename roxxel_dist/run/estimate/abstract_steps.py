"""The steps of a run from shapes alone: what is compiled to learn what they take, and never run."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import batch_sharding, fit_sharding, one_device
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.run.components import RunComponents
from roxxel_dist.run.estimate.target_steps import peak_bytes
from roxxel_dist.train.exact.layout import rows_sharding
from roxxel_dist.train.exact.step import ShardedEvaluation, ShardedStep, exact_slices, make_sharded_steps
from roxxel_dist.train.step.local_sums import accumulation
from roxxel_dist.train.step.optimizer import InitialState, check_update
from roxxel_dist.train.step.state import TrainState, abstract_state
from roxxel_dist.train.step.step import loop_numbers, make_eval_step, make_step


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device, from XLA's memory analysis of the compiled step."""

    arguments: int
    """State, settings and batch."""
    temporaries: int
    """Activations, gradients, gathered parameters."""
    results: int
    """Outputs besides the state, which reuses the memory of the previous state."""
    code: int
    """The program itself, if the backend reports it."""
    peak: int
    """All of them together."""


def abstract_train_state(
    components: RunComponents, mesh: Mesh, total_steps: int
) -> tuple[ModuleSplit, TrainState, Leaves]:
    """The static part, the state before the first step and the hparams of all steps, as shapes and shardings.

    Raises ValueError if settings of the model or the optimizer are impossible.
    """
    optimizer, options = components.optimizer, components.options
    split, state, hparams = abstract_state(
        components.build,
        InitialState(optimizer, average=options.ema > 0),
        mesh,
        fsdp=options.fsdp,
        dtype=jnp.bfloat16 if options.use_bf16 else None,
    )
    if options.virtual_shards and options.fsdp:
        init = InitialState(optimizer, average=options.ema > 0)
        state, hparams = exact_slices(split, state, hparams, init, mesh, options.virtual_shards)
    check_update(optimizer, state.params, state.opt_state)
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    numbers: Any = dict.fromkeys((*optimizer.settings(total_steps), *loop_numbers(options)), number)
    return split, state, hparams | numbers


def memory_analysis(program: Any) -> StepMemory:
    """Memory of each device for a compiled program, from XLA's memory analysis."""
    account = program.memory_analysis()
    parts = {
        "arguments": account.argument_size_in_bytes,
        "temporaries": account.temp_size_in_bytes,
        "results": account.output_size_in_bytes - account.alias_size_in_bytes,
        "code": account.generated_code_size_in_bytes,
    }
    return StepMemory(**parts, peak=peak_bytes(program))


@dataclass(frozen=True)
class Steps:
    """The jitted steps of a run on a mesh, and their arguments but the batch."""

    components: RunComponents
    mesh: Mesh
    split: ModuleSplit
    state: TrainState
    hparams: Leaves
    in_blocks: bool = True
    """Whether virtual shards update the parameters in blocks, as all but earlier runs."""

    @classmethod
    def of(cls, components: RunComponents, mesh: Mesh, total_steps: int, *, in_blocks: bool = True) -> Self:
        """As training makes them; raises what `abstract_train_state` does."""
        return cls(components, mesh, *abstract_train_state(components, mesh, total_steps), in_blocks)

    @property
    def compute_dtype(self) -> Any:
        """Of parameters in the forward and backward pass; None: their own."""
        return jnp.bfloat16 if self.components.options.bf16_compute else None

    def train(self) -> Any:
        """The training step."""
        of = self.components
        return make_step(
            self.split,
            of.loss,
            of.optimizer,
            self.state,
            batch_sharding(self.mesh),
            grad_accum=of.grad_accum,
            compute_dtype=self.compute_dtype,
            skip_bad=of.options.on_bad_step == "skip",
        )

    def evaluate(self) -> Any:
        """The validation step."""
        return make_eval_step(self.split, self.components.loss, self.compute_dtype)

    def exact(self) -> tuple[ShardedStep, ShardedEvaluation]:
        """The training and the validation step of a run with virtual shards."""
        of = self.components
        return make_sharded_steps(
            self.split,
            of.loss,
            of.optimizer,
            rows_sharding(batch_sharding(self.mesh), of.options.virtual_shards),
            shards=of.options.virtual_shards,
            grad_accum=of.grad_accum,
            compute_dtype=self.compute_dtype,
            skip_bad=of.options.on_bad_step == "skip",
            in_blocks=self.in_blocks,
        )

    def training_args(self, batch: Any) -> tuple[Any, ...]:
        """Of the training step, for a batch of any mesh."""
        return self.state, self.hparams, self._placed(batch, self.components.grad_accum)

    def validation_args(self, batch: Any) -> tuple[Any, ...]:
        """Of the validation step, for a batch of any mesh."""
        return self.state.evaluated, self.state.rest, self.hparams, self._placed(batch)

    def accumulation(self, batch: Any) -> str:
        """What is sent with micro-batches of such a batch, and why; empty where nothing is."""
        of = self.components
        if of.options.virtual_shards:
            return ""
        shape = jax.tree.leaves(batch)[0].shape
        args = self.split, of.loss, self.state, self.hparams, batch_sharding(self.mesh), shape, of.grad_accum
        return accumulation(*args, self.compute_dtype).text

    def on_one_device(self) -> "Steps":
        """The same steps on the first of the devices, where nothing is cut; the model is not built again."""
        mesh = one_device(self.mesh, self.mesh.devices.flat[0])
        whole = NamedSharding(mesh, P())
        state, hparams = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (self.state, self.hparams)
        )
        return dataclasses.replace(self, mesh=mesh, state=state, hparams=hparams)

    def _placed(self, batch: Any, grad_accum: int = 1) -> Any:
        sharding = rows_sharding(batch_sharding(self.mesh), self.components.options.virtual_shards)

        def place(leaf: Any) -> Any:
            fitted = fit_sharding(sharding, leaf.shape, grad_accum)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=fitted)

        return jax.tree.map(place, batch)
