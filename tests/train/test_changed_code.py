"""What a process changes in the code is what it trains, although an earlier process left its programs in the cache."""

import json
import subprocess
import sys

import pytest
from commands import environment

COMMON = """
import sys, types
import jax, jax.numpy as jnp, optax
from roxxel_dist import Config, Experiment

def go(run, **fields):
    shape = dict(dim=16, num_blocks=1, kv_heads=1, head_size=8, max_context=16, batch_size=4, lr=1e-2, warmup_steps=0)
    loop = dict(max_steps=3, log_every=1, tokenizer_type="char", sample="off", val_fraction=0.0, checkpoint_every=9)
    Experiment(Config(**{**shape, **loop, **fields})).fit("corpus.txt", run)

def module(name, source):
    sys.modules[name] = made = types.ModuleType(name)
    exec(source, made.__dict__)
    return made

NET = '''
from flax import nnx
import optax
scale = 1.0
class Net(nnx.Module):
    def __init__(self, size, rngs):
        self.embed, self.out = nnx.Embed(size, 8, rngs=rngs), nnx.Linear(8, size, rngs=rngs)
    def __call__(self, tokens):
        return scale * self.out(self.embed(tokens))
def build(config, rngs):
    return Net(config.vocab_size, rngs)
def loss_with(share):
    def loss(model, batch):
        each = optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])
        return share * each.mean()
    return loss
loss = loss_with(1.0)
'''
own = dict(model="cell:build", loss="cell:loss")
"""
FIRST = """
go("built-in")
go("with gelu", activation="gelu")
module("cell", NET)
go("own", **own)
"""
PATCHES = {
    "a method of the package": """
from roxxel_dist.model.mlp import FeedForward
before, FeedForward.__call__ = FeedForward.__call__, lambda self, x: (x * 0, jnp.float32(0))
go(run)
FeedForward.__call__ = before
""",
    "a function of the package": """
from roxxel_dist.train.step import step
before = step.apply_gradient
step.apply_gradient = lambda opt, state, hparams, grads, *more, **how: before(
    opt, state, hparams, jax.tree.map(jnp.sign, grads), *more, **how)
go(run)
step.apply_gradient = before
""",
    "a global of the package": """
from roxxel_dist.train.step import schedule
before, schedule.FINAL_FRACTION = schedule.FINAL_FRACTION, 0.9
go(run)
schedule.FINAL_FRACTION = before
""",
    "a function of optax": """
before, optax.adamw = optax.adamw, lambda rate, *more, **how: optax.sgd(rate)
go(run)
optax.adamw = before
""",
    "a function of jax": """
before, jax.nn.gelu = jax.nn.gelu, lambda x, approximate: jnp.tanh(x)
go(run, activation="gelu")
jax.nn.gelu = before
""",
    "a global of an own model": """
module("cell", NET.replace("scale = 1.0", "scale = 3.0"))
go(run, **own)
""",
    "the body of an own model": """
module("cell", NET.replace("scale * self", "scale * self.out.bias[...] + self"))
go(run, **own)
""",
    "a closure of an own loss": """
module("cell", NET.replace("loss_with(1.0)", "loss_with(2.0)"))
go(run, **own)
""",
    "an own model changed in place": """
cell = module("cell", NET)
cell.Net.__call__ = lambda self, tokens: self.out(jnp.tanh(10 * self.embed(tokens)))
go(run, **own)
""",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The losses of each run by its name: of the first process, and of one that changes the code.

    The programs come from `python -c`, so no file has the change.
    """
    folder = tmp_path_factory.mktemp("changed")
    (folder / "corpus.txt").write_text("the cat sat on a mat and the dog ran over a hill \n\n" * 50)
    patched = "".join(f"\nrun = {name!r}\n{patch}" for name, patch in PATCHES.items())
    for source in (FIRST, patched):
        result = subprocess.run(
            [sys.executable, "-c", COMMON + source], cwd=folder, capture_output=True, text=True, timeout=240,
            env=environment(JAX_COMPILATION_CACHE_DIR=str(folder / "cache")),
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
    found = {}
    for path in folder.glob("*/metrics.jsonl"):
        found[path.parent.name] = [json.loads(line)["train_loss"] for line in path.read_text().splitlines()]
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("name", PATCHES)
def test_changed_code_is_what_is_trained(trained, name):
    assert trained[name] not in [losses for other, losses in trained.items() if other != name]


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["built-in", "with gelu", "own"])
def test_each_run_has_its_losses(trained, name):
    assert len(trained[name]) == 3
