"""The average of the parameters: its formula, what it changes, and what it leaves as it is."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from runs import losses, make, model, poisoned, stop_after, train

from roxxel_dist import Checkpointer, Phase, Roxxel
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.training import LoopOptions
from roxxel_dist.train.step.average import Averaged, update_average

DECAY = 0.9
PHASES = [Phase(8, 8, 17)]
OPTIONS = {"phases": PHASES, "eval_every": 1, "checkpoint_every": 4, "ema": DECAY}


def host(leaves):
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def keep(seen):
    """An eval_fn that keeps (parameters, average) of each step."""

    def evaluate(state):
        seen.append((host(state.params), host(state.evaluated)))

    return evaluate


def expected(params, decay=DECAY):
    """The weighted mean of the parameters after each step, in float64."""
    weights = [decay ** (len(params) - i) for i in range(1, len(params) + 1)]
    return {
        name: sum(w * np.float64(one[name]) for w, one in zip(weights, params, strict=True)) / sum(weights)
        for name in params[0]
    }


def check(found, params):
    for name, leaf in expected(params).items():
        np.testing.assert_allclose(found[name], leaf, rtol=2e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("decay", [0.5, 0.999, 0.9999])
def test_it_is_the_weighted_mean_of_the_parameters(decay):
    rng = np.random.default_rng(0)
    params = [{"w": rng.standard_normal(5).astype(np.float32)} for _ in range(300)]
    average, update = {"w": np.full(5, 1e3, np.float32)}, jax.jit(update_average)
    for step, one in enumerate(params, 1):
        average = update(average, one, np.float32(decay), np.int32(step))
    np.testing.assert_allclose(average["w"], expected(params, decay)["w"], atol=2e-5)


LAYOUTS = {
    "plain": {},
    "fsdp and accumulation": {"fsdp": True, "grad_accum_steps": 2, "mesh": lambda: make_mesh(4, fsdp=2)},
}


def of_layout(layout):
    options = LAYOUTS[layout] | ({"mesh": LAYOUTS[layout]["mesh"]()} if "mesh" in LAYOUTS[layout] else {})
    return OPTIONS | options | ({"model": lambda: model(dim=256)} if layout != "plain" else {})


@pytest.fixture(scope="module")
def averaged(corpus_pattern, tmp_path_factory):
    """A function of a layout: (the trainer of its run, the folder, (parameters, average) of each step); only read."""

    @cache
    def run(layout):
        seen, folder = [], tmp_path_factory.mktemp("averaged") / "run"
        with Roxxel(corpus_pattern) as corpus:
            return train(corpus, folder, eval_fn=keep(seen), **of_layout(layout)), folder, seen

    return run


@pytest.mark.parametrize("layout", ["plain", pytest.param("fsdp and accumulation", marks=pytest.mark.long)])
def test_a_run_validates_with_it_and_trains_as_without(corpus, averaged, tmp_path, layout):
    made, folder, seen = averaged(layout)
    train(corpus, tmp_path / "without", **of_layout(layout) | {"ema": 0.0})
    for step in range(1, len(seen) + 1):
        check(seen[step - 1][1], [params for params, _ in seen[:step]])
    for name, leaf in made.state.evaluated.items():
        assert leaf.sharding == made.state.params[name].sharding, name
    mine, theirs = losses(folder), losses(tmp_path / "without")
    assert [row[1] for row in mine] == [row[1] for row in theirs], "training does not read it"
    assert mine[0] == pytest.approx(theirs[0])  # after one step it is the parameters
    assert all(a[2] != b[2] for a, b in zip(mine[1:], theirs[1:], strict=True))
    view = made.state
    np.testing.assert_array_equal(view.model.head.kernel[...], view.evaluated["head.kernel"])
    np.testing.assert_array_equal(view.local_model().head.kernel[...], view.evaluated["head.kernel"])


def test_it_resumes_to_the_bit(corpus, averaged, tmp_path, monkeypatch):
    whole, folder, _ = averaged("plain")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        train(corpus, tmp_path / "parts", **OPTIONS)
    parts = train(corpus, tmp_path / "parts", **OPTIONS)
    assert losses(tmp_path / "parts") == losses(folder)
    jax.tree.map(np.testing.assert_array_equal, host(parts.state.evaluated), host(whole.state.evaluated))


@pytest.mark.long
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_bad_step_does_not_move_it(corpus, tmp_path, monkeypatch, action):
    seen = []
    options = OPTIONS | {"phases": [Phase(14, 8, 17)], "on_bad_step": action, "checkpoint_every": 2}
    options |= {"loss_fn": poisoned(corpus, options["phases"], 6), "eval_fn": keep(seen)}
    with monkeypatch.context() as patch:
        stop_after(patch, 7 if action == "skip" else 3)  # the count of steps goes on through a resume
        train(corpus, tmp_path, **options)
    train(corpus, tmp_path, **options)
    if action == "skip":
        jax.tree.map(np.testing.assert_array_equal, seen[5], seen[4])
        del seen[5]
    else:
        seen = [*seen[:4], *seen[-10:]]  # back to step 4
    check(seen[-1][1], [params for params, _ in seen])


@pytest.mark.long
def test_a_checkpointer_of_an_own_loop_reads_such_a_run(corpus, tmp_path):
    made = train(corpus, tmp_path, **OPTIONS, optimizer=optax.adam(1e-2))
    net = model()
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    assert Checkpointer(tmp_path / "checkpoints", net, optimizer).restore() == 8
    np.testing.assert_array_equal(net.head.kernel[...], made.state.params["head.kernel"])
    moments = nnx.state(optimizer.opt_state)
    assert [leaf.shape for leaf in jax.tree.leaves(moments)] == [
        leaf.shape for leaf in jax.tree.leaves(made.state.optimizer)
    ]


def test_the_state_has_none_by_default(corpus, tmp_path):
    """So the checkpoints of a run without one are what they were."""
    made = make(corpus, tmp_path, PHASES, optimizer=optax.sgd(0.1))
    made.close()
    assert not isinstance(made.loop.position.steps.state.opt_state, Averaged)
    assert made.state.evaluated is made.state.params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ema": 1.0}, "ema is 1.0: it must be above 0 and below 1, such as 0.999, or 0 for none"),
        ({"ema": -0.1}, "ema is -0.1: it must be"),
        ({"ema": float("nan")}, "ema is nan: it must be"),
        ({"ema": 0.99, "use_bf16": True}, "ema is 0.99 and use_bf16 is true: an average in bfloat16 stops moving"),
    ],
)
def test_errors_name_the_field_the_value_and_the_rule(fields, message):
    with pytest.raises(UserError, match=message):
        LoopOptions(**fields)
