"""Programs beside the steps of `plan --target`, compiled in the process of a target's compiler, and never run."""

import time
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.devices.traced_flops import flops_of
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import SamplingInputs, _decode, _prefill
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.run.estimate.target_steps import TargetCompiler
from roxxel_dist.train.step.compile import StepMemory

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
    inputs = SamplingInputs(real, whole, real, numbers(jnp.int32, ROWS), numbers(jnp.int32, 8), None)
    read = graphdef, placed(state), numbers(jnp.int32, ROWS, PROMPT), numbers(jnp.int32, ROWS), inputs
    with jax.set_mesh(mesh):
        running = placed(jax.eval_shape(partial(_prefill, graphdef), *read[1:]))
    add = graphdef, placed(state), running, numbers(jnp.int32, ROWS), inputs
    programs = {"reading prompts": (_prefill, read), "adding tokens": (_decode, add)}

    def measured(what, jitted, args):
        begun, program = time.perf_counter(), compiler.compile(what, mesh, jitted, args)
        cost, peak = program_cost(program.as_text(), [0]), StepMemory.of_program(program).peak
        return compiler.step(cost, peak, mesh, flops_of(jitted, args, mesh), time.perf_counter() - begun)

    return {what: measured(what, *program) for what, program in programs.items()}
