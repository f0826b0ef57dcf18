"""The load of each expert: counted by every kind of step, in the rows of a run, and a warning where one is crowded."""

import exact_rows
import jax
import numpy as np
import optax
import pytest
from models import transformer

from roxxel_dist.cluster.mesh import fit_sharding, make_mesh
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.train.metrics import MetricsLogger, even_shares, expert_loads
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.optimizer import as_optimizer
from roxxel_dist.train.step.step import SPIKE_FACTOR
from roxxel_dist.train.steps import StepOptions, make_steps

FIELDS = exact_rows.SMALL | {"use_moe": True, "n_experts": 4, "top_k_mlp": 1, "max_context": 64}


def load_of_a_step(model, shape, mesh, loss=token_losses, **options):
    """float64[layers, experts], as multiples of an even share."""
    optimizer = as_optimizer(optax.sgd(1e-2))
    made = make_steps(
        model, loss, optimizer, mesh, StepOptions(**options), {**optimizer.settings(9), SPIKE_FACTOR: 0.0}
    )
    (state, hparams), compiler = made.init(), AotCompiler(mesh)
    place = fit_sharding(made.sharding, shape, options.get("grad_accum", 1))
    batch = exact_rows.batch_of(3, shape, packed=False, sharding=place)
    compiler.prepare("step", made.train, getattr(state, "whole", state), hparams, batch)
    _, metrics = compiler.get("step")(state, hparams, batch)
    return even_shares(metrics.load)


def by_hand(model, shape):
    """The choices, counted from what the model gives for the same rows."""
    batch = exact_rows.batch_of(3, shape, packed=False, sharding=jax.devices()[0])
    return even_shares(jax.jit(lambda: token_losses(model, batch)["expert_load"])())


long = pytest.mark.long


@pytest.mark.parametrize(
    ("shape", "devices", "options"),
    [
        pytest.param((8, 17), 1, {"gradient_checkpointing": True}, id="what is computed again", marks=long),
        pytest.param((8, 17), 2, {"grad_accum": 2}, id="micro-batches"),
        pytest.param((2, 49), 2, {"virtual_shards": 4}, id="virtual shards of rows that are cut", marks=long),
        pytest.param((8, 17), 2, {"virtual_shards": 4, "grad_accum": 2}, id="virtual shards", marks=long),
        pytest.param((8, 17), 1, {"loss": next_token_loss}, id="a loss of one number", marks=long),
        pytest.param((8, 17), 4, {"expert": 4, "grad_accum": 2}, id="divided experts", marks=long),
        pytest.param((2, 49), 1, {"virtual_shards": 4, "loss": next_token_loss}, id="cut, one number", marks=long),
    ],
)
def test_the_load_is_that_of_all_tokens_of_a_step(shape, devices, options):
    options = dict(options)
    again = {"gradient_checkpointing": options.pop("gradient_checkpointing", False)}
    model = transformer(**FIELDS | again | {"num_blocks": 1})
    expected = by_hand(model, shape)
    assert expected.shape == (1, 4)
    assert expected.max() > 1.1, "experts differ"
    mesh = make_mesh(devices, expert=options.pop("expert", 1))
    found = load_of_a_step(model, shape, mesh, **options)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": True, "context_window": 8, "sliding_window_pattern": 2}])
def test_loops_over_blocks_count_as_blocks_do(fields):
    """A loop over all, and one over periods with a block left over."""
    loads = [
        by_hand(transformer(**FIELDS | fields | {"num_blocks": 3, "scan_layers": scan}), (2, 17))
        for scan in (False, True)
    ]
    assert loads[0].shape == (3, 4)
    np.testing.assert_array_equal(*loads)


def test_what_a_row_says_of_the_load():
    load = even_shares([[2, 2, 2, 2], [0, 4, 4, 8]])  # in any unit
    assert load.tolist() == [[1, 1, 1, 1], [0, 1, 1, 2]]
    assert expert_loads(load) == {"expert_load_min": 0, "expert_load_mean": 1.5, "expert_load_max": 2}


class Lines(list):
    """A log that keeps its lines."""

    text = list.append


def test_a_crowded_expert_is_said_once_and_again_after_it_was_well():
    lines = Lines()
    logger = MetricsLogger(lines, None, 9, 0, lambda length: 0.0, [], lambda phase: None)
    for step, most in enumerate((3.9, 4.1, 6.0, 3.5, 5.0, 2.9, 3.9, 4.0), 1):
        load = np.ones((3, 8))
        load[2, 5] = most
        logger._warn_of_crowd(step, load)
    assert [line.split(": ")[1] for line in lines] == ["step 2", "step 8"]
    assert lines[0].startswith("warning: step 2: expert 5 of block 2 (both from 0) has 4.1 times its even share")
    assert "raise alpha_balance" in lines[0]
