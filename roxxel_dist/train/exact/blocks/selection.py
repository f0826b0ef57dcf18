"""Some parameters of a state, and their part of the optimizer's state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from roxxel_dist.model.split import Leaves
from roxxel_dist.train.exact.blocks.slices import free
from roxxel_dist.train.step.state import TrainState


@dataclass(frozen=True)
class Selection:
    """Some parameters and what the optimizer keeps of them, apart from the optimizer's own numbers."""

    names: frozenset[str]
    every: frozenset[str]
    """All parameters."""
    treedef: Any
    owners: tuple[str | None, ...]
    """Of each leaf the parameter that it is of, None of a number that is of all."""

    @classmethod
    def of_names(cls, state: TrainState, names: Sequence[str]) -> "Selection":
        """Of a state, which may be abstract."""
        chosen, every = frozenset(names), frozenset(state.params)
        leaves, treedef = jax.tree.flatten_with_path(_chosen(state, chosen, every))
        return cls(chosen, every, treedef, tuple(_owner(path, every) for path, _ in leaves))

    def leaves(self, state: TrainState) -> tuple[list[Any], list[Any]]:
        """(arrays of these parameters, the numbers that are of all)."""
        leaves = jax.tree.leaves(_chosen(state, self.names, self.every))
        pairs = list(zip(leaves, self.owners, strict=True))
        return [leaf for leaf, owner in pairs if owner], [leaf for leaf, owner in pairs if not owner]

    def leaves_by_device(self, parts: Sequence[TrainState]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Both of each state, by device."""
        found = [self.leaves(part) for part in parts]
        return [own for own, _ in found], [numbers for _, numbers in found]

    def take_slices(
        self, parts: Sequence[TrainState], models: Sequence[Any], params: Leaves
    ) -> tuple[list[list[Any]], list[list[Any]]]:
        """`leaves_by_device`, whose slices are updated: the gathered parameters of the models are given back.

        `params` has these by name, as shapes with shardings.
        """
        for model in models:
            free([model.params[name] for name in params], list(params.values()))
        return self.leaves_by_device(parts)

    def tree(self, own: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """(the parameters, the optimizer's state of them) of what `leaves` gave."""
        first, second = iter(own), iter(numbers)
        return jax.tree.unflatten(self.treedef, [next(first if owner else second) for owner in self.owners])

    @property
    def names_of_own(self) -> list[str]:
        """The parameter of each array that `leaves` gives."""
        return [owner for owner in self.owners if owner]


def merge_selections(state: TrainState, trees: Sequence[Any]) -> Any:
    """(parameters, the optimizer's state) in the order of a state, of trees of `Selection`s of all of them; numbers
    that are of all come from the first one."""
    every = frozenset(state.params)

    def join(whole: Any, *parts: Any) -> Any:
        if not _is_named(whole, every):
            return parts[0]
        found = {name: part for each in parts for name, part in each.items()}
        return {name: found[name] for name in whole}

    whole = state.params, state.opt_state
    return jax.tree.map(join, whole, *trees, is_leaf=lambda node: _is_named(node, every))


def _chosen(state: TrainState, names: frozenset[str], every: frozenset[str]) -> Any:
    def choose(node: Any) -> Any:
        return {name: part for name, part in node.items() if name in names} if _is_named(node, every) else node

    whole = state.params, state.opt_state
    return jax.tree.map(choose, whole, is_leaf=lambda node: _is_named(node, every))


def _is_named(node: Any, every: frozenset[str]) -> bool:
    return isinstance(node, dict) and bool(node) and every.issuperset(node)


def _owner(path: Sequence[Any], every: frozenset[str]) -> str | None:
    return next((key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in every), None)
