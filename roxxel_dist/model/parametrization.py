"""Maximal update parametrization, mup (Yang et al., "Tensor Programs V", 2022, arXiv 2203.03466, tables 3 and 8).

Every array is compared with that of the same model at its base width. Their ratio of widths gives its initial scale
and, in the optimizer, its learning rate. A step then changes the activations by the same amount at every width, and the
best learning rate at the base width is the best at the others. At the base width it is the standard parametrization.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.layers import COLUMN_AXES, STACKED
from roxxel_dist.process.exit_codes import UserError


@dataclass(frozen=True)
class Width:
    """How many times wider a parameter is than at the base width; 1 for fixed sizes, such as a vocabulary."""

    rows: float = 1.0
    """Ratio of fan-in."""
    columns: float = 1.0
    """Ratio of fan-out."""
    longer: float = 1.0
    """Ratio of the larger of the two."""

    @property
    def initial_scale(self) -> float:
        """The initial standard deviation relative to base width: 1 / sqrt(rows) for hidden matrices, 1 / rows for
        outputs."""
        return self.rows ** (-0.5 if self.columns != 1 else -1.0)

    @property
    def adam_rate(self) -> float:
        """The learning rate relative to base width, for updates of a fixed size per number (Adam, Lion, Adafactor)."""
        return 1 / self.rows

    @property
    def sgd_rate(self) -> float:
        """The learning rate relative to base width, for updates that are proportional to the gradient."""
        return self.columns / self.rows

    @property
    def muon_rate(self) -> float:
        """The learning rate relative to base width, for orthogonal updates with a fixed root mean square.

        Their spectral norm grows with the square root of the longer side; that of the update must be proportional to
        the square root of fan-out / fan-in (Yang et al., "A spectral condition for feature learning", 2023).
        """
        return (self.columns / self.rows / self.longer) ** 0.5


def widths(model: nnx.Module, base: nnx.Module) -> dict[str, Width]:
    """How much wider each parameter of a model is than in `base`, by name; both models may be abstract.

    Raises ValueError if the models have different parameters, or a parameter has different numbers of dimensions.
    """
    wide, narrow = ({name: _sides(each) for name, each in _variables(either).items()} for either in (model, base))
    result = {}
    for name in sorted(wide.keys() | narrow.keys()):
        if name not in wide or name not in narrow or wide[name][0] != narrow[name][0]:
            problem = "has other dimensions" if name in wide and name in narrow else "is in one of the models alone"
            raise UserError(
                f"parametrization is mup: at its width and at the base width, {name} {problem}. The base must have the "
                f"same parameters, only narrower: change base_dim, or what base_widths returns"
            )
        (_, rows, columns), (_, base_rows, base_columns) = wide[name], narrow[name]
        longer = max(rows, columns) / max(base_rows, base_columns)
        result[name] = Width(rows / base_rows, columns / base_columns, longer)
    return result


def rescale(model: nnx.Module, base: nnx.Module) -> None:
    """Set the initial scales of mup in a new model, in place, whose own scales do not depend on the width; `base` is
    the same model at its base width, and may be abstract."""
    factors = {name: width.initial_scale for name, width in widths(model, base).items()}
    _multiply(model, lambda name, array: factors[name])


def rescale_to(model: nnx.Module, base: nnx.Module) -> None:
    """Set the initial scales of mup in a new model whose own scales depend on the width.

    A parameter gets the standard deviation of `base`, which is not abstract, times mup's factor for the width. A
    parameter with all numbers equal, in either model, is not changed.
    """
    factors, narrow = widths(model, base), _variables(base)

    def factor(name: str, array: jax.Array) -> jax.Array:
        ours, theirs = jnp.std(array), jnp.std(narrow[name].get_value())
        return jnp.where((ours > 0) & (theirs > 0), factors[name].initial_scale * theirs / ours, 1)

    _multiply(model, factor)


def _multiply(model: nnx.Module, factor: Callable[[str, jax.Array], Any]) -> None:
    """Multiply each parameter of a model, in place and in its dtype."""
    for name, variable in _variables(model).items():
        array = variable.get_value()
        variable.set_value((array * factor(name, array)).astype(array.dtype))


def _variables(model: nnx.Module) -> dict[str, Any]:
    """The parameters of a model by name, such as "blocks.attention.qkv.kernel"."""
    state = nnx.state(model, nnx.Param)
    leaves = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {jax.tree_util.keystr(path, simple=True, separator="."): variable for path, variable in leaves}


def _sides(variable: Any) -> tuple[int, int, int]:
    """(dimensions, rows, columns) of a parameter of a layer; a vector, such as a bias or a norm's scale, is one row."""
    metadata, shape = variable.get_metadata(), variable.get_value().shape
    columns = metadata.get(COLUMN_AXES, 1)
    layer = shape[metadata.get(STACKED, 0) :]
    rows = layer[-columns - 1] if len(layer) > columns else 1
    return len(shape), rows, prod(layer[len(layer) - columns :])
