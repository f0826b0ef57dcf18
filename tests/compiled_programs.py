"""Programs beside the steps of `plan --target`, compiled in the process of a target's compiler, and never run."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist import Config
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, one_device
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import SamplingInputs, _decode, _prefill
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.run.components import build_components, open_corpus
from roxxel_dist.run.estimate.abstract_steps import Steps
from roxxel_dist.run.estimate.target_steps import TargetCompiler, one_device_flops
from roxxel_dist.train.exact import step as sharded

ROWS, PROMPT = 4, 128


def generation(report, target, fields):
    """`TargetStep`s: prompts are read, and continued with a cache, on one device."""
    compiler = TargetCompiler(target, report)
    mesh = make_mesh(1, devices=compiler.devices)

    def placed(tree):
        whole = NamedSharding(mesh, P())
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)

    def numbers(dtype, *shape):
        return placed(jax.ShapeDtypeStruct(shape, dtype))

    def evaluating():
        model = Transformer(ModelConfig(**fields), rngs=nnx.Rngs(0))
        model.eval()
        return model

    graphdef, state = nnx.split(nnx.eval_shape(evaluating))
    real, whole = numbers(jnp.float32), numbers(jnp.int32)
    inputs = SamplingInputs(real, whole, real, numbers(jnp.int32, ROWS), whole, None)
    read = graphdef, placed(state), numbers(jnp.int32, ROWS, PROMPT), numbers(jnp.int32, ROWS), inputs
    with jax.set_mesh(mesh):
        running = placed(jax.eval_shape(partial(_prefill, graphdef), *read[1:]))
    add = graphdef, placed(state), running, whole, inputs
    programs = {"reading prompts": (_prefill, read), "adding tokens": (_decode, add)}
    return {
        what: compiler.measure(what, mesh, jitted, args, one_device_flops(mesh, jitted, args))[0]
        for what, (jitted, args) in programs.items()
    }


def virtual_shards(report, target, fields, data_path):
    """(the `TargetStep` of each program of a step with virtual shards, FLOPs of them all on all devices over those of
    the ordinary step on one device)."""
    compiler, config = TargetCompiler(target, report), Config(**fields)
    found, flops = [], 0.0
    with open_corpus(config, Path(data_path), Path("data")) as data:
        components = build_components(config, data, devices=compiler.devices)
        mesh, plan = components.mesh(compiler.hosts), components.curriculum.plan(0)
        steps, shards = Steps.of(components, mesh, plan.total_steps), config.virtual_shards
        batch = Stream(plan, components.curriculum.datasets, batch_sharding(mesh), 0, components.grad_accum).abstract()
    alone = steps.on_one_device()
    ideal = one_device_flops(alone.mesh, alone.train(), alone.training_args(batch))
    sharded.shard_numbers = lambda layout: []  # which are on the devices: there are none
    step, _ = sharded.make_sharded_steps(
        steps.split, components.loss, components.optimizer, batch_sharding(mesh), shards=shards,
        compute_dtype=steps.compute_dtype,
    )  # fmt: skip

    def compile_one(jitted, args, mesh):
        nonlocal flops
        cost, program = compiler.measure(jitted.__name__, mesh, jitted, args, 0.0)
        times = shards if jitted.__name__ == "packed_sums" else mesh.size
        assert cost.flops_per_device is not None
        flops += cost.flops_per_device * times
        found.append(cost)
        return program

    def for_each(jitted, args, devices):
        place = SingleDeviceSharding(devices[0])
        args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), args)
        return [compile_one(jitted, args, one_device(mesh, devices[0]))]

    with jax.set_mesh(one_device(mesh, mesh.devices.flat[0])):
        step.compiled(compile_one, for_each, steps.state, steps.hparams, batch)
    return found, flops / ideal
