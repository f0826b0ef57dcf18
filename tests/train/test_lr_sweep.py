"""The steps of a sweep: at which rates, on which rows, and when they end."""

import optax
import pytest
from flax import nnx
from runs import losses, train

from roxxel_dist import Curriculum, Phase, Roxxel
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.settings.training import LoopOptions, OptimizerConfig
from roxxel_dist.train.lr_finder import sweep, sweep_rates, sweep_stream
from roxxel_dist.train.step.optimizer import NamedOptimizer

PHASES = [Phase(12, 8, 17), Phase(3, 8, 17)]


class Bigram(nnx.Module):
    """The next token from the last one; it compiles in no time."""

    def __init__(self):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.embed = nnx.Embed(500, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, 500, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.dropout(self.embed(tokens)))


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


def losses_of(corpus, rates, devices=1, grad_accum=1, optimizer=None, **options):
    mesh, made = make_mesh(devices), LoopOptions(**options)
    stream = sweep_stream(Curriculum(corpus, PHASES), len(rates), made.seed, mesh, grad_accum)
    optimizer = NamedOptimizer(optimizer or OptimizerConfig())
    return sweep(Bigram, optimizer, stream, loss_of, rates, grad_accum=grad_accum, options=made)


@pytest.fixture(scope="module")
def trained(corpus_pattern, tmp_path_factory):
    """The losses of a training at one rate."""
    fixed = NamedOptimizer(OptimizerConfig(lr=1e-2, lr_schedule="constant", warmup_steps=0))
    options = {"eval_every": 100, "checkpoint_every": 100, "val_fraction": 0.0, "mesh": make_mesh(1)}
    folder = tmp_path_factory.mktemp("trained")
    with Roxxel(corpus_pattern) as corpus:
        train(corpus, folder, PHASES, loss_fn=loss_of, model=Bigram, optimizer=fixed, **options)
    return [loss for _, loss, _ in losses(folder)]


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("constant", "cosine")), "wsd"]
)
def test_a_sweep_at_one_rate_is_training_at_that_rate(corpus, trained, kind):
    """To the bit, whatever the schedule says; a sweep goes on in the shape of the first phase."""
    asked = OptimizerConfig(lr=5.0, lr_schedule=kind, warmup_steps=3)
    assert losses_of(corpus, [1e-2] * 12, optimizer=asked) == trained[:12]


def test_rates_are_those_of_the_steps(corpus):
    """A rate of next to nothing leaves the model as it is; the next step sees what a large one did."""
    still = losses_of(corpus, [1e-12] * 10, optimizer=OptimizerConfig(optimizer="sgd"))
    moved = losses_of(corpus, [*[1e-12] * 6, *[0.3] * 4], optimizer=OptimizerConfig(optimizer="sgd"))
    assert moved[:7] == still[:7]
    assert moved[7] < still[7]


def test_a_sweep_ends_where_the_loss_diverges(corpus):
    rates = sweep_rates(1e-3, 1e9, 30)
    found = losses_of(corpus, rates, optimizer=OptimizerConfig(optimizer="sgd", grad_clip=0.0))
    assert 3 < len(found) < 30


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"use_bf16": True}, marks=pytest.mark.long),
        {"bf16_compute": True, "fsdp": True, "grad_accum": 2},
    ],
)
def test_the_ways_to_train_are_the_ways_to_sweep(corpus, options):
    options = dict(options)
    grad_accum = options.pop("grad_accum", 1)
    devices = 2 if grad_accum == 2 else 1
    found = losses_of(corpus, [1e-3] * 10, devices, grad_accum, **options)
    assert found == pytest.approx(losses_of(corpus, [1e-3] * 10), rel=0.02)


def test_a_batch_that_does_not_divide(corpus):
    with pytest.raises(ValueError, match="batch_size is 8, which is not a multiple of grad_accum"):
        sweep_stream(Curriculum(corpus, PHASES), 10, 0, make_mesh(1), 3)
