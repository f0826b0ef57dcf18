"""The losses of 20 steps of three configurations, as they were when they were last meant to change.

    python tests/train/test_golden.py

records them anew in golden.json.
"""

import json
import os
import platform
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":  # what pytest does before it comes here: the devices must be there before jax is used
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    import conftest  # noqa: F401

import numpy as np
import pytest
from flax import nnx

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.optimizer import NamedOptimizer

GOLDEN = Path(__file__).with_name("golden.json")
STEPS, FIRST_PHASE = 20, 12
VOCAB = 300
INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
ROW_BLEND = {"weights": {"self": 0.75, "notes": 0.25}, "blend": "row", "packing": "documents"}
CONFIGS = {
    "plain": {
        "phases": [Phase(12, 8, 33), Phase(8, 8, 65)],
        "within": 1e-5,
    },
    "accumulation, dropout, bf16_compute, muon": {
        "phases": [Phase(12, 16, 33), Phase(8, 32, 17)],
        "model": {"dropout_rate": 0.1},
        "optimizer": {"optimizer": "muon"},
        "trainer": {"grad_accum_steps": 2, "bf16_compute": True},
        "within": 2e-2,
    },
    "fsdp, row blend, packed documents": {
        "phases": [Phase(12, 16, 33, **ROW_BLEND), Phase(8, 8, 65, **ROW_BLEND)],
        "model": {"dim": 64, "num_blocks": 2},
        "trainer": {"fsdp": True},
        "within": 1e-5,
    },
}
"""What each changes of the plain run; "within" is the relative difference allowed on another kind of CPU."""
LONG = ("plain", "accumulation, dropout, bf16_compute, muon")
QUICK = "fsdp, row blend, packed documents"


def machine():
    """What decides the last bits of a loss here."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""

    def first(name):
        found = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        return found[1].strip() if found else ""

    flags = first("flags").split()
    return {
        "machine": platform.machine(),
        "model name": first("model name"),
        "cache size": first("cache size"),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "XLA_FLAGS": os.environ["XLA_FLAGS"],
    }


def write_corpora(folder):
    """Two data sets with something to learn: each token follows from the one before it in one of three ways."""
    rng = np.random.default_rng(20)
    for name, documents in (("text", 150), ("notes", 60)):
        follows = rng.integers(1, VOCAB, (VOCAB, 3))

        def document(follows=follows):
            tokens = [int(rng.integers(1, VOCAB))]
            for choice in rng.integers(0, 3, int(rng.integers(40, 400))):
                tokens.append(int(follows[tokens[-1], choice]))
            return np.asarray(tokens, np.uint16)

        with Roxxel(folder / f"{name}_*.rox") as data:
            data.write((document() for _ in range(documents)), vocab_size=VOCAB, max_shard_bytes=20_000)


def train(name, corpora, run, steps=STEPS):
    """The loss of each of the first `steps` steps."""
    config = CONFIGS[name]
    shape = ModelConfig(
        **{"dim": 32, "num_blocks": 1, "vocab_size": VOCAB, "max_context": 64, **config.get("model", {})}
    )

    def model():
        return Transformer(shape, nnx.Rngs(params=0, dropout=1))

    optimizer = NamedOptimizer(OptimizerConfig(lr=1e-2, **config.get("optimizer", {})))
    with Roxxel(corpora / "text_*.rox") as text, Roxxel(corpora / "notes_*.rox") as notes:
        mixed = {"notes": notes} if config["phases"][0].weights else None
        trainer = Trainer(
            model, optimizer, Curriculum(text, config["phases"], mixed), token_losses, run, seed=3,
            log_every=1, eval_every=STEPS, checkpoint_every=STEPS, max_steps=steps, val_fraction=0.0,
            **config.get("trainer", {}),
        )  # fmt: skip
        try:
            trainer.run()
        finally:
            trainer.close()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [row["train_loss"] for row in rows]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    write_corpora(folder)
    return folder


@pytest.mark.parametrize("steps", [FIRST_PHASE, pytest.param(STEPS, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in LONG), QUICK])
def test_losses_are_what_they_were(name, steps, corpora, tmp_path):
    golden = json.loads(GOLDEN.read_text())
    expected = golden["losses"][name]
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.5, "nothing was learned, so little was tested"
    expected, found = expected[:steps], train(name, corpora, tmp_path / "run", steps)
    here = machine()
    differs = [what for what in here if here[what] != golden["machine"].get(what)]
    kind = f"differs in {', '.join(differs)}" if differs else "is of the same kind"
    within = CONFIGS[name]["within"] if differs else 0.0
    off = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    worst = max(range(steps), key=off.__getitem__)
    assert off[worst] <= within, (
        f"{name}: {sum(x > within for x in off)} of {steps} losses are not what they were, most of all that of step "
        f"{worst + 1}: {found[worst]!r}, it was {expected[worst]!r}, off by {off[worst]:.1e} of it. Allowed is "
        f"{within:g}, as this machine {kind}. If the change is meant, say so in the commit and record them anew: "
        f"python tests/train/test_golden.py"
    )


def record():
    """Write golden.json."""
    with tempfile.TemporaryDirectory() as folder:
        write_corpora(Path(folder))
        losses = {name: train(name, Path(folder), Path(folder) / f"run{i}") for i, name in enumerate(CONFIGS)}
    GOLDEN.write_text(json.dumps({"machine": machine(), "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    record()
