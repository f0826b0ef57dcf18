"""Optimizers by name, from optax, built while the step is traced: their numbers are inputs of the compiled program."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike

from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.model.parametrization import Width
from roxxel_dist.model.split import Matrix
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.average import Averaged, begin_average, inner_state, schedule_free_average
from roxxel_dist.train.step.by_parameter import decay_mask, map_matrices, muon_part, scale_by_width
from roxxel_dist.train.step.schedule import BATCH_TOKENS, LrSchedule, Settings, learning_rate, lr_factor

LONG = 1 << 30
"""Steps of a run that any warm-up and decay fit in."""
ELEMENTWISE = frozenset({"adamw", "nadamw", "lion", "sgd", "schedule_free_adamw"})
"""Those that update each element by its own gradient and moments, whatever the other elements of its parameter are."""
MUON_RMS = 0.2
"""Root mean square of a Muon update before the learning rate: AdamW's, so that one rate and decay suit both parts."""


@dataclass(frozen=True)
class NamedOptimizer:
    """The optimizer and schedule that an `OptimizerConfig` names."""

    config: OptimizerConfig
    matrices: Mapping[str, Matrix] = field(default_factory=dict, hash=False)
    """The parameters that are more than one matrix, or have several axes as columns; filled in from the model by
    `StateBuilder` and `make_step`."""
    widths: Mapping[str, Width] = field(default_factory=dict, hash=False)
    """With mup, how much wider each parameter is than at the base width (`model.parametrization.widths`)."""
    own: Callable[[jax.Array], optax.GradientTransformation] | None = None
    """Where the config names a function of the user's: the rate of a step, float32[], to the transformation."""
    batch_tokens: int | None = None
    """With `lr_scaling`, the tokens of the batch whose rate is lr; None: of the largest batch of the run when it began,
    or when lr was changed (`for_run`)."""

    def settings(self, total_steps: int) -> dict[str, float]:
        """lr, weight_decay, warmup_steps, total_steps, decay_steps and grad_clip of a run; with `lr_scaling` also
        batch_tokens.

        Raises ValueError where the warm-up or the decay does not fit into the run, or batch_tokens is not known.
        """
        settings = self.config.settings(total_steps)
        if self.config.lr_scaling == "none":
            return settings
        if not self.batch_tokens:
            raise UserError(
                f"lr_scaling is {self.config.lr_scaling}, and batch_tokens is not given: give the tokens of the batch "
                f"whose rate is lr, NamedOptimizer(config, batch_tokens=64 * 1025)"
            )
        return {**settings, BATCH_TOKENS: float(self.batch_tokens)}

    def for_batch(self, settings: dict[str, jax.Array], batch: Any) -> dict[str, jax.Array]:
        """The settings of a step with this batch, int32[B, L] or several such arrays, or their shapes: with its lr."""
        if self.config.lr_scaling == "none":
            return settings
        factor = lr_factor(self.config.lr_scaling, math.prod(jax.tree.leaves(batch)[0].shape), settings[BATCH_TOKENS])
        return {**settings, "lr": settings["lr"] * factor}

    def build(self, settings: Settings, step: ArrayLike, norm: jax.Array | None = None) -> optax.GradientTransformation:
        """Clipping, then the optimizer at this step's rate. Parameters and their moments keep their dtype.

        The `norm` of the whole gradient, float32[], is given where the transformation sees a part of it.
        """
        rate = self.rate(settings, step)
        if self.own is not None:
            return optax.chain(clip(settings["grad_clip"]), self.own(rate))
        decay, clipped = jnp.asarray(settings["weight_decay"], jnp.float32), clip(settings["grad_clip"], norm)
        if not self.widths:
            return optax.chain(clipped, _optimizer(self.config, rate, decay, self.matrices))
        inner = _optimizer(self.config, rate, jnp.zeros_like(decay), self.matrices)
        of_widths = scale_by_width(self.config.optimizer, self.widths, self.matrices, rate * decay)
        return optax.chain(clipped, inner, of_widths)

    def rate(self, settings: Settings, step: ArrayLike) -> jax.Array:
        """float32[]: the learning rate of a step counted from 0."""
        return learning_rate(self.config.lr_schedule, settings, step)


@dataclass(frozen=True)
class FixedOptimizer:
    """An optax transformation as its user made it, with its numbers and its schedule inside."""

    tx: optax.GradientTransformation

    def settings(self, total_steps: int) -> dict[str, float]:
        """No settings: the numbers are constants of the transformation."""
        del total_steps
        return {}

    def for_batch(self, settings: dict[str, jax.Array], batch: Any) -> dict[str, jax.Array]:
        """The settings as they are."""
        del batch
        return settings

    def build(self, settings: Settings, step: ArrayLike, norm: jax.Array | None = None) -> optax.GradientTransformation:
        """The transformation itself; it counts steps in its own state."""
        del settings, step, norm
        return self.tx

    def rate(self, settings: Settings, step: ArrayLike) -> None:
        """No rate: it is hidden in the transformation."""
        del settings, step


Optimizer = NamedOptimizer | FixedOptimizer
"""A step uses `settings`, the numbers that are inputs of the step, as float32 scalars; `build`, called while tracing,
the transformation for one step, with a state whose structure depends on no value; and `rate`, to log."""


def as_optimizer(optimizer: Any) -> Optimizer:
    """One of ours as it is; an optax transformation, `optax.MultiSteps`, or that of an `nnx.Optimizer`, as a fixed one.

    Of an `nnx.Optimizer` only the transformation is used: its state is made again from the parameters. Parameters reach
    the transformation as a dictionary from names such as "blocks.0.attention.qkv.kernel" to arrays. Raises ValueError
    where it is none of these, or an `nnx.Optimizer` of other variables than `nnx.Param`.
    """
    if isinstance(optimizer, nnx.Optimizer):
        if optimizer.wrt is not nnx.Param:
            raise UserError(
                f"optimizer is an nnx.Optimizer with wrt={optimizer.wrt!r}: only nnx.Param is trained, so make it "
                f"with wrt=nnx.Param"
            )
        return FixedOptimizer(optimizer.tx)
    if isinstance(optimizer, optax.MultiSteps):
        # Its own `gradient_transformation` passes no further arguments on.
        return FixedOptimizer(optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update))  # pyright: ignore[reportArgumentType]
    if isinstance(optimizer, optax.GradientTransformation):
        return FixedOptimizer(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise UserError(
        f"optimizer is a {type(optimizer).__name__}: give an optax.GradientTransformation, an nnx.Optimizer, or "
        f"NamedOptimizer(OptimizerConfig(…))"
    )


@overload
def for_run(optimizer: NamedOptimizer, shapes: Sequence[Shape], saved: Mapping[str, Any]) -> NamedOptimizer: ...


@overload
def for_run(optimizer: Optimizer, shapes: Sequence[Shape], saved: Mapping[str, Any]) -> Optimizer: ...


def for_run(optimizer: Optimizer, shapes: Sequence[Shape], saved: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a run of these phases, with all numbers of its schedule that come from the phases as a whole.

    The one place that says what a run keeps of the schedule that its checkpoint, or the one that it is forked from,
    records (`saved`; empty for a new run):

    - warm-up: the steps that it had, unless `warmup_steps` is given. It began with the run, whatever comes later.
    - the batch whose rate is lr (`lr_scaling`): as it was, unless `lr`, `lr_scaling` or `batch_tokens` is another
      number now. Else the largest batch of these phases.
    - the end of the schedule and the length of a decay: those of these phases, as the decay ends with the run.
    """
    if not isinstance(optimizer, NamedOptimizer):
        return optimizer
    config, tokens = optimizer.config, optimizer.batch_tokens
    before = LrSchedule.from_dict(saved)
    if before is not None and config.warmup_steps is None:
        config = replace(config, warmup_steps=int(before.settings["warmup_steps"]))
        total = sum(shape.steps for shape in shapes)
        if total <= (config.warmup_steps or 0):
            raise UserError(
                f"phases: they end after step {total:,}, and the warm-up of the run ends after step "
                f"{config.warmup_steps:,}: give them more steps, or give warmup_steps"
            )
    if config.lr_scaling != "none" and tokens is None:
        is_same = before is not None and (before.scaling, before.settings["lr"]) == (config.lr_scaling, config.lr)
        kept = before.settings[BATCH_TOKENS] if before is not None and is_same else 0
        tokens = int(kept or max(shape.tokens for shape in shapes))
    return replace(optimizer, config=config, batch_tokens=tokens)


def schedule_of(optimizer: Optimizer, total_steps: int) -> LrSchedule | None:
    """The schedule of a run of so many steps; None if the optimizer has no config.

    Raises UserError as `NamedOptimizer.settings` does.
    """
    if not isinstance(optimizer, NamedOptimizer):
        return None
    config = optimizer.config
    return LrSchedule(kind=config.lr_schedule, scaling=config.lr_scaling, settings=optimizer.settings(total_steps))


def updates_of(
    transformation: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, loss: ArrayLike
) -> tuple[Any, Any]:
    """(updates, the next state) of an optax transformation, which is given the loss too if it asks for `value`."""
    return optax.with_extra_args_support(transformation).update(grads, opt_state, params, value=loss)


def check_update(optimizer: Optimizer, params: Any, opt_state: Any) -> None:
    """Trace the update of a transformation of the user's once; nothing is computed.

    Raises UserError where it asks for more than `updates_of` gives, such as the loss as a function for a line search,
    or gives updates or a state of other shapes or types than it was given.
    """
    if isinstance(optimizer, NamedOptimizer) and optimizer.own is None:
        return

    def update(grads: Any, opt_state: Any, params: Any, number: jax.Array) -> tuple[Any, Any]:
        transformation = optimizer.build(dict.fromkeys(_any_settings(optimizer), number), number)
        return updates_of(transformation, grads, opt_state, params, number)

    try:
        opt_state = inner_state(opt_state)
        after = jax.eval_shape(update, params, opt_state, params, jax.ShapeDtypeStruct((), jnp.float32))
    except TypeError as error:
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        raise UserError(
            f"optimizer asks for {missing[1]} in its update, and a step gives it the loss alone (value): use an "
            f"optimizer without a line search"
        ) from error
    for what, given, made in zip(("updates", "state"), (params, opt_state), after, strict=True):
        if wrong := _difference(given, made):
            raise UserError(
                f"optimizer: its update gives {what} that differ from what it was given ({wrong}): keep structure, "
                f"shapes and types"
            )


def _difference(given: Any, made: Any) -> str:
    """The first leaf of a tree that another one does not have alike, or nothing."""

    def named(tree: Any) -> dict[str, str]:
        leaves = jax.tree.leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}

    before, after = named(given), named(made)
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            return f"{name or 'it'} was {before.get(name, 'not there')}, and is {after.get(name, 'not there')}"
    return ""


def for_model(optimizer: Optimizer, matrices: Mapping[str, Matrix]) -> Optimizer:
    """The optimizer for a model whose parameters are these matrices; a fixed one takes arrays as they are."""
    return replace(optimizer, matrices=matrices) if isinstance(optimizer, NamedOptimizer) else optimizer


@dataclass(frozen=True, eq=False)
class InitialState:
    """Parameters to the state before the first step, which depends on none of the optimizer's numbers."""

    optimizer: Optimizer
    average: bool = False
    """Whether an average of the parameters is kept beside it."""

    def __call__(self, params: Any) -> Any:
        """The state."""
        state = self.optimizer.build(_any_settings(self.optimizer), 0).init(params)
        has_own = isinstance(self.optimizer, NamedOptimizer) and schedule_free_average(state, params) is not None
        if has_own and self.average:
            raise UserError(
                "ema is set, and the optimizer is schedule-free: it has an average of its own, so leave ema out"
            )
        if has_own and any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params)):
            raise UserError(
                "use_bf16 is true, and the optimizer is schedule-free: its average in bfloat16 stops moving, so use "
                "bf16_compute in its place"
            )
        return Averaged(state, begin_average(params)) if self.average or has_own else state

    def for_model(self, matrices: Mapping[str, Matrix]) -> "InitialState":
        """The initial state for a model whose parameters are these matrices."""
        return InitialState(for_model(self.optimizer, matrices), self.average)


def _any_settings(optimizer: Optimizer) -> dict[str, float]:
    """Settings of some run, for a trace in which their values mean nothing."""
    return optimizer.config.settings(LONG) if isinstance(optimizer, NamedOptimizer) else {}


def global_norm(tree: Any) -> jax.Array:
    """float32[]: the Euclidean norm of all leaves together, summed in float32 whatever their dtype."""
    return optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))


def is_elementwise(optimizer: NamedOptimizer, name: str, param: Any) -> bool:
    """Whether each element of a parameter is updated by its own gradient and moments, and norms of the whole."""
    if optimizer.config.optimizer == "muon":
        return muon_part(optimizer.matrices, (jax.tree_util.DictKey(name),), param) == "adamw"
    return optimizer.own is None and optimizer.config.optimizer in ELEMENTWISE


def clip(limit: ArrayLike, norm: jax.Array | None = None) -> optax.GradientTransformation:
    """Gradients cut to a global norm (Pascanu et al. 2013, arXiv 1211.5063), in the dtype of their parameters.

    The `limit` is a number or a traced float32[]; 0 leaves the gradients as they are. The `norm` is theirs by
    default.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        top = jnp.asarray(limit, jnp.float32)
        whole = global_norm(updates) if norm is None else norm
        fits = (top <= 0) | (whole < top)

        def cut(gradient: jax.Array, like: jax.Array) -> jax.Array:
            # Back to the parameter's dtype: float32 gradients would turn the moments of bfloat16 parameters into
            # float32 at the first step, which is another program, and nothing is donated.
            return jnp.where(fits, gradient, gradient / whole * top).astype(like.dtype)

        return jax.tree.map(cut, updates, updates if params is None else params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _optimizer(
    config: OptimizerConfig, rate: jax.Array, decay: jax.Array, matrices: Mapping[str, Matrix]
) -> optax.GradientTransformation:
    """The named optimizer. In each of them a step takes rate x decay of every decayed weight (Loshchilov & Hutter
    2019, arXiv 1711.05101), so that `weight_decay` means the same everywhere.
    """
    b1, mask = config.beta1, partial(decay_mask, matrices=matrices)
    match config.optimizer:
        case "adamw" | "nadamw":  # Dozat 2016: Adam with Nesterov momentum
            nesterov = config.optimizer == "nadamw"
            b2 = _or(config.beta2, 0.95)
            return optax.adamw(rate, b1, b2, weight_decay=decay, mask=mask, nesterov=nesterov)
        case "lion":  # Chen et al. 2023, arXiv 2302.06675
            return optax.lion(rate, b1, _or(config.beta2, 0.99), weight_decay=decay, mask=mask)
        case "adafactor":
            inner = _adafactor(rate, decay)
            return map_matrices(inner, matrices) if matrices else inner
        case "sgd":
            return optax.chain(
                optax.trace(_or(config.momentum, 0.9)),
                optax.add_decayed_weights(decay, mask),  # pyright: ignore[reportArgumentType]
                optax.scale_by_learning_rate(rate),
            )
        case "muon":
            return _muon(config, rate, decay, matrices, mask)
        case "schedule_free_adamw":
            return _schedule_free_adamw(b1, _or(config.beta2, 0.999), rate, decay, mask)
        case name:
            raise UserError(f"optimizer is {name!r}: name it in a Config, or give its optax transformation itself")


def _adafactor(rate: jax.Array, decay: jax.Array) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235), factored second moments and no first, as T5 was trained
    (Raffel et al. 2020, arXiv 1910.10683): beta2 = 1 - t^-0.8, updates of a parameter cut to a root mean square of 1.

    Steps are absolute, not relative to the size of the parameter (as in Zhai et al. 2022, arXiv 2106.04560): `lr` then
    means what it means to AdamW, and the schedule is the run's.
    """
    return optax.adafactor(
        rate,
        decay_rate=0.8,
        clipping_threshold=1.0,
        multiply_by_parameter_scale=False,
        weight_decay_rate=rate * decay,  # optax adds it after the rate  # pyright: ignore[reportArgumentType]
        weight_decay_mask=decay_mask,
    )


def _muon(
    config: OptimizerConfig, rate: jax.Array, decay: jax.Array, matrices: Mapping[str, Matrix], mask: Any
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) on the matrices inside the model, AdamW on the rest.

    Updates are scaled to AdamW's root mean square (Liu et al. 2025, arXiv 2502.16982): both parts share rate and decay.
    """

    def dimensions(params: Any) -> Any:
        return {name: _muon_dimensions(param, matrices.get(name, Matrix())) for name, param in params.items()}

    of_matrices = optax.contrib.muon(
        rate,
        beta=_or(config.momentum, 0.95),
        weight_decay=decay,  # pyright: ignore[reportArgumentType]
        weight_decay_mask=mask,
        consistent_rms=MUON_RMS,
        muon_weight_dimension_numbers=dimensions,
    )
    rest = optax.adamw(rate, config.beta1, _or(config.beta2, 0.95), weight_decay=decay, mask=mask)
    labels = partial(jax.tree_util.tree_map_with_path, partial(muon_part, matrices))
    return optax.partition({"muon": of_matrices, "adamw": rest}, labels)


def _schedule_free_adamw(
    b1: float, b2: float, rate: jax.Array, decay: jax.Array, mask: Any
) -> optax.GradientTransformation:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682), `optax.contrib.schedule_free_adamw` with a mask.

    With z the steps of AdamW without momentum, and x the mean of all z, weighted by the squares of the largest rates up
    to them, gradients are taken at y = b1 x + (1 - b1) z. The parameters are y; x is evaluated (`average.py`).
    """
    inner = optax.chain(
        optax.scale_by_rms(b2, 1e-8, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(decay, mask),  # pyright: ignore[reportArgumentType]
        optax.scale_by_learning_rate(rate),
    )
    return optax.contrib.schedule_free(inner, rate, b1)


def _muon_dimensions(param: Any, view: Matrix) -> Any:
    """The rows and columns of a parameter; None for one of another optimizer (`optax.MaskedNode`)."""
    if not hasattr(param, "ndim"):
        return None
    columns = tuple(range(param.ndim - view.columns, param.ndim))
    return optax.contrib.MuonDimensionNumbers(reduction_axis=columns[0] - 1, output_axis=columns)


def _or(value: float | None, usual: float) -> float:
    return usual if value is None else value
