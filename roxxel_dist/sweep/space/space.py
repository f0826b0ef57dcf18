"""The search space of a sweep: its parameters and mixtures as the axes of a unit cube."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.distributions import Distribution, distribution

if TYPE_CHECKING:
    import numpy as np

    from roxxel_dist.sweep.space.mixture import MixtureSpace

Params = dict[str, Any]
SHARE_AXIS = distribution({"min": 0.0, "max": 1.0})
"""One of the k - 1 axes of the shares of k data sets."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter, and where it stands in the file (several names where parameters are nested)."""

    path: tuple[str, ...]
    distribution: Distribution

    @property
    def name(self) -> str:
        """The names of the path with points between."""
        return ".".join(self.path)

    @property
    def place(self) -> tuple[str, ...]:
        """The keys of the file that lead to it."""
        return tuple(key for name in self.path for key in ("parameters", name))


@dataclass(frozen=True, kw_only=True)
class Space:
    """The parameters, in the order of the file, and the mixtures of data sets."""

    parameters: tuple[Parameter, ...]
    mixtures: "tuple[MixtureSpace, ...]" = ()

    @property
    def free(self) -> tuple[Parameter, ...]:
        """The searched parameters: those with more than one value, one dimension each."""
        return tuple(parameter for parameter in self.parameters if not parameter.distribution.is_constant)

    @property
    def axes(self) -> tuple[Distribution, ...]:
        """The dimensions of the cube: one for each searched parameter, then k - 1 for each mixture of k data sets."""
        shares = (SHARE_AXIS for mixture in self.mixtures for _ in range(mixture.axes))
        return (*(parameter.distribution for parameter in self.free), *shares)

    @property
    def share_axes(self) -> tuple[slice, ...]:
        """The places of the axes of each mixture among all axes."""
        ends, slices = len(self.free), []
        for mixture in self.mixtures:
            slices.append(slice(ends, ends + mixture.axes))
            ends += mixture.axes
        return tuple(slices)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all searched values: parameters, and the shares of mixtures."""
        shares = (key for mixture in self.mixtures for key in mixture.keys)
        return (*(parameter.name for parameter in self.free), *shares)

    @property
    def size(self) -> int | None:
        """The number of different points; None where they are endless."""
        counts = [parameter.distribution.count for parameter in self.free]
        counts += [None if mixture.step is None else len(mixture.lattice) for mixture in self.mixtures]
        return math.prod(count for count in counts if count is not None) if None not in counts else None

    @property
    def baselines(self) -> "tuple[tuple[np.ndarray, ...], ...]":
        """The shares of the first trials: natural ones, and uniform ones where they differ; each float64[k] a mixture.
        Empty without mixtures."""
        if not self.mixtures:
            return ()
        natural, uniform = (tuple(getattr(each, kind) for each in self.mixtures) for kind in ("natural", "uniform"))
        is_same = all((one == other).all() for one, other in zip(natural, uniform, strict=True))
        return (natural,) if is_same else (natural, uniform)

    def point(self, u: Sequence[float]) -> Params:
        """The parameters at a point of the unit cube, one number an axis; nested as in the file, shares by keys."""
        rest, params = iter(u), Params()
        for parameter in self.parameters:
            inner, kind = params, parameter.distribution
            for name in parameter.path[:-1]:
                inner = inner.setdefault(name, {})
            inner[parameter.path[-1]] = kind.quantile(0.0 if kind.is_constant else next(rest))
        shares = (mixture.shares(u[axes]) for mixture, axes in zip(self.mixtures, self.share_axes, strict=True))
        return params | self.params_of(tuple(shares))

    def params_of(self, shares: "Sequence[np.ndarray]") -> Params:
        """Shares as parameters of a trial: those of each mixture, float64[k]."""
        pairs = zip(self.mixtures, shares, strict=True)
        return {key: share for each, row in pairs for key, share in zip(each.keys, row.tolist(), strict=True)}

    def shares_of(self, params: Mapping[str, Any]) -> "tuple[np.ndarray, ...]":
        """The shares among the parameters of a trial: float64[k] for each mixture."""
        import numpy as np

        return tuple(np.array([params[key] for key in mixture.keys], float) for mixture in self.mixtures)

    def with_shares(self, u: Sequence[float], shares: "Sequence[np.ndarray]") -> tuple[float, ...]:
        """A point of the cube, with other shares."""
        found = list(u)
        for mixture, axes, row in zip(self.mixtures, self.share_axes, shares, strict=True):
            found[axes] = mixture.to_cube(row).tolist()
        return tuple(found)

    def sample(self, limit: int) -> Iterator[list[float]]:
        """Points of all parts of the space: every point if there are at most `limit`, else as many at random.

        At random each choice of a parameter is as likely as any other, whatever its probability in the search.
        """
        if self.size is not None and self.size <= limit:
            yield from self.grid()
            return
        rng, kinds = random.Random(0), self.axes
        for _ in range(limit):
            yield [
                rng.random() if kind.choices is None else kind.to_unit(rng.randrange(len(kind.choices)))
                for kind in kinds
            ]

    def grid(self) -> Iterator[list[float]]:
        """The points in the order of W&B: names sorted, values as listed, the last name changing fastest. A mixture
        counts as one name, such as mixture.1; its values are the shares of its lattice. Raises ValueError where they
        are endless; it names a parameter that is."""
        self._check_countable()
        dims = [
            (parameter.path, parameter.distribution.count or 1, slice(dim, dim + 1))
            for dim, parameter in enumerate(self.free)
        ]
        for mixture, axes in zip(self.mixtures, self.share_axes, strict=True):
            dims.append(((f"mixture.{mixture.phases[0]}",), len(mixture.lattice), axes))
        corners = [[mixture.to_cube(row).tolist() for row in mixture.lattice] for mixture in self.mixtures]
        dims.sort(key=lambda dim: dim[0], reverse=True)
        for position in range(self.size or 0):
            point, rest = [0.0] * len(self.axes), position
            for _, count, axes in dims:
                rest, turn = divmod(rest, count)
                if axes.start < len(self.free):
                    point[axes] = [self.free[axes.start].distribution.grid_point(turn)]
                else:
                    point[axes] = corners[self.share_axes.index(axes)][turn]
            yield point

    def _check_countable(self) -> None:
        for parameter in self.free:
            if parameter.distribution.count is None:
                if (phase := parameter.name.removeprefix("phase_end.")) != parameter.name:
                    raise UserError(
                        f"phase_ends.{phase}: a grid needs a step as the third number, such as [0.5, 0.9, 0.1]"
                    )
                raise UserError(
                    f"parameters.{parameter.name}: a grid needs values that can be counted: give `values`, `min` and "
                    f"`max` that are integers, or a `q_` distribution with bounds, or use another method"
                )
        for mixture in self.mixtures:
            if mixture.step is None:
                phases = ", ".join(map(str, mixture.phases))
                raise UserError(
                    f"mixtures, phases [{phases}]: a grid needs a `step`, such as step: 0.1, whose multiples the "
                    f"shares are"
                )
