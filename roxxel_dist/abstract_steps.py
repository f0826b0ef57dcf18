"""The steps of a run from shapes alone: what is compiled to learn what they take, and never run."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.builders import RunComponents
from roxxel_dist.cluster.mesh import batch_sharding, fit_sharding
from roxxel_dist.target_steps import peak_bytes
from roxxel_dist.train.optimizer import InitialState
from roxxel_dist.train.train_state import Leaves, ModuleSplit, TrainState, abstract_state
from roxxel_dist.train.train_step import SPIKE_FACTOR, make_eval_step, make_step


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
        components.build, InitialState(optimizer), mesh, fsdp=options.fsdp,
        dtype=jnp.bfloat16 if options.use_bf16 else None,
    )  # fmt: skip
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    numbers: Any = dict.fromkeys((*optimizer.settings(total_steps), SPIKE_FACTOR), number)
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
    """The jitted steps of components on a mesh, and their arguments but the batch."""

    mesh: Mesh
    train: Any
    evaluate: Any
    state: TrainState
    hparams: Leaves
    grad_accum: int

    @classmethod
    def of(cls, components: RunComponents, total_steps: int, processes: int) -> "Steps":
        """As training makes them."""
        mesh, options = components.mesh(processes), components.options
        split, state, hparams = abstract_train_state(components, mesh, total_steps)
        dtype = jnp.bfloat16 if options.bf16_compute else None
        train = make_step(
            split, components.loss, components.optimizer, state, batch_sharding(mesh),
            grad_accum=components.grad_accum, compute_dtype=dtype, skip_bad=options.on_bad_step == "skip",
        )  # fmt: skip
        return cls(mesh, train, make_eval_step(split, components.loss, dtype), state, hparams, components.grad_accum)

    def training(self, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        """The training step and its arguments."""
        return self.train, (self.state, self.hparams, self._placed(batch, self.grad_accum))

    def validation(self, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        """The validation step and its arguments."""
        return self.evaluate, (self.state.params, self.state.rest, self.hparams, self._placed(batch))

    def _placed(self, batch: Any, grad_accum: int = 1) -> Any:
        sharding = batch_sharding(self.mesh)

        def place(leaf: Any) -> Any:
            fitted = fit_sharding(sharding, leaf.shape, grad_accum)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=fitted)

        return jax.tree.map(place, batch)
