"""A program: are the devices of this host right, and how fast are they? `main`.

Each device multiplies two matrices of small integers and copies an array, many times; together they sum an array. Every
sum of integers here is exact in any order and in the devices' dtype, so a result is right to the bit, or wrong. The
best of several times counts: what else the machine does can make a device look slow, but never fast.

It prints one line of JSON, `measure()`.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LEAST_STRETCHES = 3
"""So many stretches are measured of each work, however long they take."""


@dataclass(frozen=True)
class Work:
    """What is measured: a stretch of windows without a pause, of which the shortest one counts."""

    size: int
    """Rows and columns of the matrices. With entries in [-4, 3] a sum of 16 * size is exact in float32."""
    dtype: str
    words: int
    """Words of 4 bytes of the copied array, and of the summed one."""
    products: int
    copies: int
    """Products, and copies, of a window. On an accelerator they are so many that their start costs nothing."""
    stretch: int
    """Windows of a stretch. On a CPU it is longer than the periods in which a kernel shares out time, and begins at
    each window: another program beside the check disturbs some of them."""
    seconds: float
    """After so long no further window begins."""


OF_CPU = Work(size=512, dtype="float32", words=1 << 18, products=2, copies=20, stretch=30, seconds=2.0)
OF_ACCELERATOR = Work(size=4096, dtype="bfloat16", words=1 << 26, products=100, copies=20, stretch=1, seconds=0.5)


def mix_bits(place: Any) -> Any:
    """Mixed bits of uint32 numbers, an array of numpy or jax."""
    bits = place * np.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x85EBCA77)
    return bits ^ (bits >> 13)


def matrix(size: int, seed: int, numpy: Any = jnp) -> Any:
    """int32[size, size] of integers in [-4, 3], from numpy or jax."""
    place = numpy.arange(size * size, dtype=numpy.uint32) + numpy.uint32(seed)
    return (mix_bits(place) & numpy.uint32(7)).astype(numpy.int32).reshape(size, size) - 4


def weights(size: int, seed: int) -> Any:
    """uint32[size] of odd numbers, by which every single wrong element changes a sum modulo 2^32."""
    return mix_bits(np.arange(size, dtype=np.uint32) + np.uint32(seed)) | np.uint32(1)


def product(left: jax.Array, right: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """uint32: the product of two matrices, each element weighted by its row and column, summed modulo 2^32."""
    result = jnp.matmul(left, right, preferred_element_type=jnp.float32)
    bits = result.astype(jnp.int32).astype(jnp.uint32)
    return jnp.sum(bits * rows[:, None] * columns[None, :], dtype=jnp.uint32)


def expected_product(size: int) -> int:
    """What `product` gives, in integers alone, at the cost of two products of a matrix and a vector."""
    rows, columns = weights(size, 3), weights(size, 4)
    left, right = (matrix(size, seed, np).astype(np.uint32) for seed in (1, 2))
    inner = (right * columns[None, :]).sum(axis=1, dtype=np.uint32)
    return int(((left * inner[None, :]).sum(axis=1, dtype=np.uint32) * rows).sum(dtype=np.uint32))


def copy_words(words: jax.Array) -> jax.Array:
    """The array, each word plus 1: every byte is read and written."""
    return words + jnp.uint32(1)


def weighted_sum(words: jax.Array) -> jax.Array:
    """uint32: the sum of the words modulo 2^32, each weighted by its place."""
    place = jnp.arange(words.size, dtype=jnp.uint32)
    return jnp.sum(words.reshape(-1).astype(jnp.uint32) * (mix_bits(place) | jnp.uint32(1)), dtype=jnp.uint32)


def expected_copy(count: int, added: int) -> int:
    """What `weighted_sum` gives of 0, 1, 2, … after so many copies."""
    place = np.arange(count, dtype=np.uint32)
    odd = mix_bits(place) | np.uint32(1)
    return int(((place + np.uint32(added % 2**32)) * odd).sum(dtype=np.uint32))


def best_ms(work: Work, window: Callable[[], object]) -> float:
    """The time of the shortest stretch, in milliseconds."""
    times: list[float] = []
    end = time.perf_counter() + work.seconds
    while len(times) < LEAST_STRETCHES * work.stretch or time.perf_counter() < end:
        begun = time.perf_counter()
        window()
        times.append(time.perf_counter() - begun)
    starts = range(len(times) - work.stretch + 1)
    return 1000 * min(sum(times[start : start + work.stretch]) for start in starts)


def check_product(device: Any, work: Work) -> tuple[float, bool]:
    """(milliseconds, whether each product was right) of a device."""
    make = jax.jit(lambda seed: matrix(work.size, seed).astype(work.dtype))
    left, right = (make(jax.device_put(np.uint32(seed), device)) for seed in (1, 2))
    rows, columns = (jax.device_put(weights(work.size, seed), device) for seed in (3, 4))
    run = jax.jit(product)
    results = [run(left, right, rows, columns)]
    jax.block_until_ready(results)

    def window() -> None:
        new = [run(left, right, rows, columns) for _ in range(work.products)]
        results.extend(jax.block_until_ready(new))

    took = best_ms(work, window)
    right_one = expected_product(work.size)
    return took, all(int(result) == right_one for result in results)


def check_copy(device: Any, work: Work) -> tuple[float, bool]:
    """(milliseconds, whether the array was right at the end) of a device."""
    run, count = jax.jit(copy_words), 0
    words = jax.jit(lambda _: jnp.arange(work.words, dtype=jnp.uint32))(jax.device_put(0, device))
    jax.block_until_ready(run(words))

    def window() -> None:
        nonlocal words, count
        for _ in range(work.copies):
            words, count = run(words), count + 1
        jax.block_until_ready(words)

    took = best_ms(work, window)
    return took, int(jax.jit(weighted_sum)(words)) == expected_copy(work.words, count)


def check_sum(devices: list[Any], work: Work) -> tuple[float, list[int]]:
    """(milliseconds, the places of devices whose result was wrong) of a sum over all devices, which each gets."""
    count, length = len(devices), max(1, work.words // len(devices) // 4)
    mesh = Mesh(np.array(devices), ("host",))
    values = (mix_bits(np.arange(count * length, dtype=np.uint32)) & 7).astype(np.float32).reshape(count, length)
    split = NamedSharding(mesh, PartitionSpec("host"))
    given = jax.make_array_from_callback(values.shape, split, lambda index: values[index])

    def summed(part: jax.Array) -> jax.Array:
        return jax.lax.psum(part, "host")

    run = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=PartitionSpec("host"), out_specs=PartitionSpec("host")))
    result = jax.block_until_ready(run(given))
    took = best_ms(work, lambda: [jax.block_until_ready(run(given)) for _ in range(2)])
    right = values.sum(axis=0)
    parts = {shard.device: np.asarray(shard.data).reshape(-1) for shard in result.addressable_shards}
    return took, [place for place, device in enumerate(devices) if not np.array_equal(parts[device], right)]


def measure() -> Mapping[str, Any]:
    """What the devices of this process did: times in milliseconds, and which results were wrong."""
    begun = time.perf_counter()
    devices = jax.local_devices()
    work = OF_CPU if devices[0].platform == "cpu" else OF_ACCELERATOR
    found: list[dict[str, Any]] = []
    for place, device in enumerate(devices):
        wrong: list[str] = []
        times: dict[str, float] = {}
        for name, check in (("product", check_product), ("copy", check_copy)):
            times[name], is_right = check(device, work)
            wrong += [] if is_right else [name]
        found.append({"device": place, "times": times, "wrong": wrong})
    answer: dict[str, Any] = {**names(), "devices": found}
    if len(devices) > 1:
        answer["sum"], wrong_places = check_sum(devices, work)
        for place in wrong_places:
            found[place]["wrong"].append("sum")
    return answer | {"seconds": time.perf_counter() - begun}


def names() -> Mapping[str, Any]:
    """What the devices of this process are."""
    devices = jax.local_devices()
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


def main(find: Callable[[], Mapping[str, Any]] = measure) -> int:
    """Print what `measure`, or `names`, finds."""
    if devices := os.environ.get("ROXXEL_LOCAL_DEVICES"):
        jax.config.update("jax_num_cpu_devices", int(devices))
    print(json.dumps(find()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
