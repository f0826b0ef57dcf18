"""Other loaders, each as a function that gives the next batch; None where the package is not installed."""

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Next = Callable[[], Any]


def sequential(tokens: np.ndarray, batch: int, seq_len: int) -> Next:
    """The next slice of the mapped tokens, copied as int32: what no shuffled order can be faster than."""
    size = batch * seq_len
    starts = itertools.cycle(range(0, len(tokens) - size, size))

    def following() -> np.ndarray:
        start = next(starts)
        return tokens[start : start + size].reshape(batch, seq_len).astype(np.int32)

    return following


def torch_loader(tokens: np.ndarray, batch: int, seq_len: int) -> Next | None:
    """A shuffling DataLoader without workers, which is its fastest form here, over windows of a memmap."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Windows(Dataset):
        def __len__(self) -> int:
            return len(tokens) // seq_len

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.from_numpy(tokens[index * seq_len : (index + 1) * seq_len].astype(np.int32))

    loader = DataLoader(Windows(), batch_size=batch, shuffle=True, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches).numpy()


def grain_source(tokens: np.ndarray, batch: int, seq_len: int) -> Next | None:
    """A shuffled MapDataset over windows of a memmap, asked by index: faster here than with its threads."""
    if importlib.util.find_spec("grain") is None:
        return None
    import grain

    class Windows:
        def __len__(self) -> int:
            return len(tokens) // seq_len

        def __getitem__(self, index: int) -> np.ndarray:
            return tokens[index * seq_len : (index + 1) * seq_len].astype(np.int32)

    batches = grain.MapDataset.source(Windows()).shuffle(seed=1).repeat().batch(batch)
    numbers = itertools.count()
    return lambda: batches[next(numbers)]


def roxxel_stream(folder: Path, tokens: np.ndarray, batch: int, seq_len: int, sharding: Any) -> Next | None:
    """The stream of the package roxxel, which always places its batches with jax; the archive is made where missing."""
    if importlib.util.find_spec("roxxel") is None:
        return None
    from roxxel import Roxxel

    path = folder / "peer.rox"
    if not path.exists():
        Roxxel(str(path)).write(iter(np.split(tokens, 64)), separator=None)
    opened = Roxxel(str(path))
    opened.open()
    mesh = sharding.mesh

    def batches() -> Any:
        while True:
            yield from opened.stream(seq_len, batch, 1, mesh=mesh, data_sharding=sharding)

    stream = batches()
    return lambda: next(stream)
