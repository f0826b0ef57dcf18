"""Trials of one shape that begin together: one of them compiles the step, the others wait for it and read it."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import make_corpus
from trials import BASE, split, task

from roxxel_dist.sweep.trial.trial import run

LOOKED_UP = re.compile(r"(MISS|hit) for '([^']+)'", re.IGNORECASE)
PARAMS = [
    {"lr": 1e-3 * (n + 1), "warmup_steps": n, "dropout_rate": 0.05 + 0.02 * n, "alpha_balance": 0.01 * (n + 1)}
    for n in range(8)
]


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 8])
def test_the_step_is_compiled_once(tmp_path, count):
    make_corpus(tmp_path)
    study, cache = tmp_path / "study", tmp_path / "cache"
    told = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_DEBUG_LOG_MODULES": "jax._src.compiler"}
    # Different lengths too, as a sweep over epochs has them.
    configs = [
        {**BASE, "wandb": "off", "phases": [{"steps": 9 + n, "batch_size": 8, "seq_len": 33}]} for n in range(count)
    ]
    tasks = [task(study, n, params=PARAMS[n], config=configs[n], environment=told) for n in range(count)]
    with ThreadPoolExecutor(count) as pool:
        ends = [split(events)[2] for events in pool.map(lambda one: list(run(one)), tasks)]
    assert all("result" in end for end in ends), ends
    found = [
        (what.lower(), name)
        for n in range(count)
        for what, name in LOOKED_UP.findall((study / "logs" / f"{n}.log").read_text())
    ]
    assert found.count(("miss", "jit_step")) == 1
    assert found.count(("hit", "jit_step")) == count - 1  # the others read what the first one compiled
    assert found.count(("miss", "jit_evaluate")) == 1
    assert len({end["result"]["value"] for end in ends}) == count, "they trained with different numbers"
    assert len(list((cache / "locks").iterdir())) == 4  # step, evaluation, bytes of text, digests
