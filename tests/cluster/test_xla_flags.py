"""XLA ends a process that has a flag which its jaxlib does not know: each that is set anywhere here is tried."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from commands import FLAGS

from roxxel_dist.cluster import xla_flags

ROOT = Path(__file__).parents[2]
OPTIONS = xla_flags.SAVE_MEMORY | xla_flags.RUN_ONCE
SET = {xla_flags.CPU_DEVICES: "2", xla_flags.DETERMINISTIC: "true", **FLAGS}
OF_USERS = {"xla_gpu_autotune_level": "2", "xla_gpu_enable_triton_gemm": "false", "xla_dump_to": "/tmp"}
"""Flags that tests or pages write as users do, in variables that no process of XLA gets here; options of GPUs."""
UNKNOWN = {"xla_unheard_of", "xla_other", "xla_a", "xla_b", "xla_fast"}
"""Flags that no jaxlib has, on purpose."""
OLD = {"xla_cpu_use_fusion_emitters"}
"""Flags that are set for older versions only."""


def ended(flags):
    """(exit code, stderr) of a process with these flags of XLA that makes its devices; of one that it does not know see
    test_xla_knows_the_flag_of_determinism."""
    env = os.environ | {"XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in flags.items())}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    code = "import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_this_jaxlib_knows_every_flag_that_is_set():
    flags = SET | OF_USERS
    code, said = ended(flags)
    assert code == 0, [name for name in flags if ended({name: flags[name]})[0]] or said


def test_this_jaxlib_knows_every_option_of_the_compiler():
    x = jnp.ones(3)
    for name, value in OPTIONS.items():
        compiled = jax.jit(lambda x: x + 1).lower(x).compile(compiler_options={name: value})
        assert compiled(x).tolist() == [2, 2, 2], name


def test_no_flag_is_set_that_is_not_tried():
    """A flag in any file of this project is one of the list in `xla_flags.py`, or of those that tests set."""
    places = [ROOT / name for name in ("roxxel_dist", "tests", "benchmarks", "examples", "docs", "docker", "launch")]
    files = [path for place in places for path in place.rglob("*") if path.suffix in {".py", ".md", ".yaml", ".sh", ""}]
    of_text = re.compile(r"--(xla_\w+)|[\"'](xla_(?:cpu|gpu|tpu|llvm|backend|force|dump)_\w+)[\"']")
    found = {}
    for path in files:
        if path.is_file() and path != Path(__file__):
            for flag in of_text.findall(path.read_text(errors="replace")):
                found.setdefault(flag[0] or flag[1], path.relative_to(ROOT))
    tried = SET.keys() | OPTIONS.keys() | OF_USERS.keys() | UNKNOWN | OLD
    assert found.keys() >= OPTIONS.keys() | SET.keys() - FLAGS.keys()  # where the list itself stands
    assert {flag: path for flag, path in found.items() if flag not in tried} == {}
