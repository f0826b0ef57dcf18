"""Where the time of a step would go: parts of a compiled step, and their limits."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from states import init_state
from tables import one_test

from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, scalars_on
from roxxel_dist.cluster.step_parts import PARTS
from roxxel_dist.cluster.xla_flags import RUN_ONCE
from roxxel_dist.devices.program_cost import Kernel, ProgramCost, program_cost
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.run.estimate.step_costs import CHANGES, costs_of, largest, roofline_seconds
from roxxel_dist.train.step.optimizer import InitialState, as_optimizer
from roxxel_dist.train.step.step import SPIKE_FACTOR, make_step

H200, V5E = "NVIDIA H200", "TPU v5 lite"
TINY = {"dim": 32, "num_blocks": 1, "n_heads": 2, "vocab_size": 256, "max_context": 64}
EACH = {"embedding", "attention", "mlp", "norms", "head_and_loss"}
MIXED = EACH - {"mlp"} | {"experts"}


def kernel(part, flops=0.0, data=0.0, sent=0.0, network=0.0, launches=1):
    return Kernel("k", (f"jit(step)/{part}/mul",), flops, data, sent, network, launches)


@one_test(
    ("one", "device", "milliseconds", "limit"),
    [
        (kernel("mlp", flops=989.4e9, data=1e6), H200, 1.0, "compute"),
        (kernel("mlp", flops=1e6, data=4.8e9), H200, 1.0, "memory"),
        (kernel("mlp", flops=1e6, data=4.8e8, launches=16), H200, 1.6, "memory"),
        (kernel("casts", sent=450e6), H200, 1.0, "links"),  # within a host
        (kernel("casts", sent=450e6, network=100e6), H200, 2.0, "links"),  # over the network
        (kernel("casts", data=4.8e9, sent=225e6), H200, 1.5, "memory"),  # both, one after the other
        (kernel("casts", sent=200e6, network=1e12), V5E, 1.0, "links"),  # a slice has no slower network
    ],
)
def test_a_kernel_takes_the_longest_of_its_limits(one, device, milliseconds, limit):
    cost = ProgramCost(kernels=[one])
    [found] = costs_of(cost, device)
    assert found.milliseconds == pytest.approx(milliseconds, rel=1e-3)
    assert found.limit == limit
    assert (found.flops, found.bytes, found.sent_bytes, found.launches) == (
        one.flops * one.launches, one.bytes_accessed * one.launches, one.sent_bytes * one.launches, one.launches,
    )  # fmt: skip


def test_a_card_without_links_sends_nothing_and_an_unknown_one_has_no_figures():
    [found] = costs_of(ProgramCost(kernels=[kernel("mlp", data=1e9, sent=1e9)]), "NVIDIA L4")
    assert found.limit == "memory"
    assert costs_of(ProgramCost(kernels=[kernel("mlp", data=1e9)]), "cpu") == ()


def test_programs_together_are_as_often_as_they_run():
    total = ProgramCost()
    total.add(ProgramCost(kernels=[kernel("mlp", data=4.8e9), kernel("norms", data=4.8e8)]), 2)
    total.add(ProgramCost(kernels=[kernel("mlp", flops=989.4e9), kernel("casts", sent=45e6)]))
    found = {cost.part: cost for cost in costs_of(total, H200)}
    assert list(found) == ["mlp", "norms", "casts"]
    assert found["mlp"].milliseconds == pytest.approx(3)
    assert found["mlp"].limit == "memory"
    assert found["mlp"].launches == 3
    assert roofline_seconds(found.values()) == pytest.approx(3.3e-3)


def test_the_largest_part_is_named_with_what_would_change_it():
    parts = [kernel("jvp(head_and_loss)", data=4.8e9), kernel("transpose(jvp(head_and_loss))", data=9.6e9)]
    line = largest(costs_of(ProgramCost(kernels=[*parts, kernel("mlp", flops=4 * 989.4e9)]), H200))
    assert line.startswith("largest: mlp, 4 of 7 ms (57%), mostly its matrix products: a smaller model")
    line = largest(costs_of(ProgramCost(kernels=[*parts, kernel("mlp", flops=989.4e9)]), H200))
    assert line.startswith(
        "largest: head_and_loss, 3 of 4 ms (75%), mostly the memory of the device: a larger loss_chunk"
    )
    assert largest(()) == ""


def test_every_advice_is_about_fields_that_there_are():
    from roxxel_dist.settings.config import Config

    fields = {field.name for field in dataclasses.fields(Config)}
    words = {word.strip(",;:()") for text in CHANGES.values() for word in text.split()}
    assert {word for word in words if "_" in word} <= fields
    assert {key[0] for key in CHANGES if isinstance(key, tuple)} <= set(PARTS)


def step_of(model):
    """The text of a compiled training step of one CPU device, 2 x 64 tokens."""
    mesh, optimizer = make_mesh(1), as_optimizer(optax.adamw(1e-3))
    split, state, hparams = init_state(model, InitialState(optimizer), mesh, fsdp=False, dtype=None)
    hparams = {**hparams, **scalars_on(mesh, {**optimizer.settings(100), SPIKE_FACTOR: 0.0})}
    step = make_step(split, token_losses, optimizer, state, batch_sharding(mesh), compute_dtype=jnp.bfloat16)
    tokens = jax.device_put(jnp.zeros((2, 65), jnp.int32), batch_sharding(mesh))
    with jax.set_mesh(mesh):
        return step.lower(state, hparams, tokens).compile(RUN_ONCE).as_text()


class Own(nnx.Module):
    """A model of a user that names one of its parts."""

    def __init__(self):
        self.embed, self.out = nnx.Embed(64, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 64, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        x = self.embed(tokens)
        with jax.named_scope("mlp"):
            return self.out(x)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        pytest.param(
            {"loss_chunk": 32, "num_blocks": 2, "scan_layers": True, "gradient_checkpointing": True},
            EACH,
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"mla": True, "rope_dim": 8, "norm_position": "both", "use_moe": True, "n_experts": 2},
            MIXED,
            marks=pytest.mark.long,
        ),
        (None, {"mlp", "head_and_loss"}),
    ],
    ids=["scanned", "latent", "own"],
)
def test_each_part_of_a_step_has_its_kernels(fields, parts):
    build = Own if fields is None else TransformerBuilder(ModelConfig(**TINY | fields), 0, 1)
    cost = program_cost(step_of(build), [0])
    costs = costs_of(cost, H200)
    found = {part.part: part for part in costs}
    expected = parts | {f"{part} backward" for part in parts} | {"optimizer"}
    if fields is not None:  # the gradient of its loss is made in the forward pass
        expected.discard("head_and_loss backward")
    assert expected <= set(found)
    assert set(found) - expected <= {"casts", "casts backward", "other", "other backward", "head_and_loss backward"}
    # Nothing is lost, and next to no work is in no part.
    assert sum(part.flops for part in costs) == pytest.approx(cost.flops)
    assert sum(part.bytes for part in costs) == pytest.approx(cost.bytes_accessed)
    assert sum(part.launches for part in costs) == pytest.approx(cost.launches)
    nameless = [part for part in costs if part.part.startswith("other")]
    assert sum(part.flops for part in nameless) == 0
    if fields is not None:
        assert roofline_seconds(nameless) < 0.1 * roofline_seconds(costs)
