"""A training step as compilers make it, beside that of flax and optax alone: it may not move more bytes than a part of
what that one does.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import pytest
from commands import environment

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import compiled_step

from roxxel_dist.cluster.xla_flags import RUN_ONCE

PYTHON = ROOT / ".cache" / "cuda" / "bin" / "python"
MOST_BYTES, MOST_FLOPS, MOST_SENT = 0.85, 1.03, 420e6
SMALL = {"num_blocks": 1, "dim": 64, "hidden_dim": 128, "n_heads": 2}


def test_a_small_step_moves_fewer_bytes_than_the_plain_one():
    """By the compiler of this CPU: a narrow block, and as many words. Logits that are computed twice make it 1.17 times
    the plain one's bytes and 1.32 times its FLOPs, and optax's cross-entropy as well 1.56 times its bytes."""
    # Tests compile without emitters where they can: a scatter is a loop then, whose bytes nobody sees.
    options = dict.fromkeys({"xla_cpu_use_fusion_emitters"} & RUN_ONCE.keys(), True)
    measured = partial(compiled_step.measured, jax.devices()[:1], 4, 257, SMALL, options=options)
    ours, plain = measured(), measured(plain=True)
    print(f"ours {ours}\nplain {plain}")
    assert ours["bytes"] <= 0.9 * plain["bytes"]
    assert ours["flops"] <= MOST_FLOPS * plain["flops"]
    assert ours["peak_bytes"] <= plain["peak_bytes"] / 2, "the logits of a chunk, not all"


def compiled(target, *words):
    """The figures of a step, of 2 blocks of the 124M model if the words do not say otherwise."""
    command = [PYTHON, ROOT / "benchmarks" / "compiled_step.py", target, "num_blocks=2", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_step_moves_fewer_bytes_than_the_plain_one():
    """2 blocks, a vocabulary of 50,304, 32 x 1,024 tokens: the loss is most of it."""
    ours, plain = compiled("h200:1x1", "rows=32"), compiled("h200:1x1", "rows=32", "--plain")
    print(f"ours {ours}\nplain {plain}")
    assert ours["bytes"] <= MOST_BYTES * plain["bytes"]
    assert ours["flops"] <= MOST_FLOPS * plain["flops"]
    assert ours["roofline_ms"] <= plain["roofline_ms"]
    assert ours["peak_bytes"] <= plain["peak_bytes"]


@pytest.mark.long
def test_a_step_with_fsdp_gathers_each_parameter_once():
    """4 blocks on 8 GPUs: the head too, whatever the number of chunks of the loss."""
    ours = compiled("h100:1x8", "rows=64", "num_blocks=4", "fsdp=true")
    print(f"ours {ours}")
    assert ours["sent"] <= MOST_SENT
