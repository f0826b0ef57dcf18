"""`plan --target`: what it refuses, and what the compilers of accelerators that are not here say of a training step."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import environment
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.devices.targets import GPUS, TPUS, gpu_config, is_too_large, memory_in, parse_target
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.estimate.figures import EstimateRequest

TPU_PYTHON = Path(__file__).parents[2] / ".cache" / "tpu" / "bin" / "python"
CONFIG = """
dim: 128
n_heads: 2
num_blocks: 1
max_context: 128
vocab_size: 512
bf16_compute: true
val_fraction: 0
phases: [{steps: 4, batch_size: 8, seq_len: 129}]
"""
WORDS = ["plan", "--config", "small.yaml", "--data_path", "tokens.npy"]


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CONFIG)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 500, 50_000).astype(np.uint16))
    return tmp_path


KNOWN = (
    "v5e:4x4, v5p:2x2x2 or v6e:4x4 (v4, v5e, v5p, v6e, tpu7x); GPUs by hosts x GPUs of a host, as h100:2x8 (a100, h100,"
)


@one_test(
    ("name", "message"),
    [
        ("tpu", f"target is 'tpu', which is not known: TPU slices are named by chips, as {KNOWN}"),
        ("v9:4x4", "target is 'v9:4x4', which is not known"),
        ("H100:1x8", "target is 'H100:1x8', which is not known"),
        ("", "target is '', which is not known"),
        ("v5e", "target is 'v5e', and 'v5e' needs its shape after a colon"),
        ("v5e:16", "needs its shape after a colon"),
        ("v5e:4x", "needs its shape after a colon"),
        ("v5e:0x4", "needs its shape after a colon"),
        ("v5e:4x4x4x4", "needs its shape after a colon"),
        ("v5e:4x4x4", "target is v5e:4x4x4: slices of these chips have 2 axes, so use two, as 4x4"),
        ("v6e:32x16", "target is v6e:32x16, a slice of 512 chips: the largest has 256, so use fewer"),
        ("v5p:9999x9999x9999", "the largest has 8,960, so use fewer"),
        ("h100:8", "needs its shape after a colon"),
        ("h100:2x8x8", "needs its shape after a colon"),
        ("h100:-1x8", "needs its shape after a colon"),
    ],
)
def test_a_name_that_is_none(name, message, work, capsys):
    with pytest.raises(UserError) as refused:
        parse_target(name)
    assert message in str(refused.value)
    assert main([*WORDS, "--target", name]) == 2
    assert message in capsys.readouterr().err.replace("--target", "target")


@one_test("name", ["v5e:2x2", "v5e:16x16", "v5p:2x2x2", "v6e:4x4", "tpu7x:2x2x1", "h100:1x8", "b200:64x8"])
def test_a_name_is_a_kind_and_a_shape(name):
    kind, shape = name.split(":")
    target = parse_target(name)
    assert (target.kind, "x".join(map(str, target.shape)), target.is_gpu) == (kind, shape, kind in GPUS)


def test_costs_need_a_target(work, capsys):
    assert main([*WORDS, "--costs"]) == 2
    assert "costs is True, and there is no target: give --target too" in capsys.readouterr().err
    assert main([*WORDS, "--costs", "--target", "v5"]) == 2
    assert "target is 'v5', which is not known" in capsys.readouterr().err


def test_layouts_are_asked_of_a_compiler_of_one_program(work, capsys):
    assert main([*WORDS, "--layouts"]) == 2
    assert "layouts is True, and there is no target: give --target too" in capsys.readouterr().err
    assert main([*WORDS, "--layouts", "--target", "v5"]) == 2
    assert "target is 'v5', which is not known" in capsys.readouterr().err
    assert main([*WORDS, "--layouts", "--target", "v5e:2x2", "--virtual_shards", "8"]) == 2
    assert "virtual_shards is 8: a step of virtual shards is not one program" in capsys.readouterr().err


def test_a_target_has_its_own_devices(work, capsys):
    with pytest.raises(UserError, match="target is v5e:2x2, and devices is 8: leave one out"):
        EstimateRequest(target="v5e:2x2", devices=8)
    assert main([*WORDS, "--target", "v5e:2x2", "--devices", "8"]) == 2
    assert "leave one out" in capsys.readouterr().err


def test_one_process_compiles(work, capsys, monkeypatch):
    monkeypatch.setenv("ROXXEL_PROCESS_ID", "0")
    assert main([*WORDS, "--target", "v5e:2x2"]) == 2
    assert "plan in one that is not launched" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "tpu]"), ("h100:1x8", "cuda12]")])
def test_without_the_compiler_there_is_the_line_that_installs_it(name, extra, work, capsys, monkeypatch):
    monkeypatch.setattr("roxxel_dist.devices.targets.importlib.util.find_spec", lambda name: None)
    assert main([*WORDS, "--target", name]) == 69
    told = capsys.readouterr()
    assert "pip install" in told.err
    assert extra in told.err
    assert told.out == ""
    assert sorted(path.name for path in work.iterdir()) == ["small.yaml", "tokens.npy"]


@one_test(
    ("message", "found"),
    [
        ("Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded", (17.5, 15.75)),
        ("the total memory required for HLO temporaries (2.00T) exceeds available HBM (95.74G).", (2048, 95.74)),
        ("unlikely to have enough memory. Requires 3.84T, has 90.96G available. If more", (3840 * 1.024, 90.96)),
        ("unlikely to have enough device memory. Requires 3.5E, has 14.5G available.", (3.5 * (1 << 30), 14.5)),
        ("Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem.", None),
        ("something else", None),
    ],
)
def test_what_a_compiler_says_of_memory(message, found):
    assert memory_in(message) == ((None, None) if found is None else tuple(int(n * (1 << 30)) for n in found))


@one_test(
    ("message", "is_so"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm.", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required (2.00T) exceeds available HBM", True),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem.", False),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.00M of 1.00M smem.", False),
        ("INTERNAL: Mosaic failed to compile TPU kernel", False),
    ],
)
def test_a_program_is_too_large_for_the_memory_of_a_device_or_has_another_mistake(message, is_so):
    assert is_too_large(message) == is_so


TPU_KINDS = ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]


@one_test("kind", [gpu.device_kind for gpu in GPUS.values()] + TPU_KINDS)
def test_every_target_has_figures(kind):
    found = accelerator(kind)
    assert found is not None
    assert found.tera_flops > 0
    assert found.gigabytes_per_s > 0
    assert found.link_gigabytes_per_s > 0
    assert found.source.startswith(("NVIDIA ", "Google Cloud documentation, TPU"))
    own = [gpu for gpu in GPUS.values() if gpu.device_kind == kind]
    assert all(found.compute_capability == ".".join(map(str, gpu.capability)) for gpu in own)
    assert all(f"major: {gpu.capability[0]}" in gpu_config(gpu) for gpu in own)


def plan(work, *words, code=0):
    """The JSON of a plan that libtpu compiles, and what was printed beside it."""
    if not TPU_PYTHON.exists():
        pytest.skip("no libtpu: make tpu")
    command = [TPU_PYTHON, "-m", "roxxel_dist", *WORDS, *words, "--json"]
    done = subprocess.run(command, cwd=work, env=environment(), capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.mark.timeout(900)
def test_a_tpu_slice(work):
    """Four chips on one host: everything is there, nothing is computed twice, and no lock is taken."""
    locked = os.path.exists("/tmp/libtpu_lockfile")
    small = "--dim", "64", "--n_heads", "1", "--vocab_size", "1024", "--optimizer", "sgd"  # compiles soon; fsdp cuts it
    validated = "--val_fraction", "0.1", "--eval_iters", "1"
    found, _ = plan(work, "--target", "v5e:2x2", "--fsdp", "True", *validated, *small)
    [phase] = found["phases"]
    for step in (phase["target"], phase["target"]["validation"]):
        assert step["fits"]
        assert 0 < step["peak_bytes"] < step["device_bytes"]
        assert 15e9 < step["device_bytes"] < 17.2e9
        assert step["flops_ratio"] == pytest.approx(1, abs=0.03)
        assert step["bound_seconds"].keys() == {"compute", "memory", "links"}
        assert min(step["bound_seconds"].values()) > 0
        assert step["compile_seconds"] > 0
        parts = {part["part"]: part for part in step["costs"]}
        assert {"embedding", "attention", "mlp", "norms", "head_and_loss"} <= set(parts)
        assert step["roofline_seconds"] * 1000 == pytest.approx(sum(part["milliseconds"] for part in parts.values()))
        assert step["roofline_seconds"] >= max(step["bound_seconds"].values())
        assert sum(part["flops"] for part in parts.values()) == pytest.approx(step["flops_per_device"])
        assert sum(part["sent_bytes"] for part in parts.values()) == pytest.approx(sum(step["collectives"].values()))
        assert parts.get("other", {"milliseconds": 0})["milliseconds"] < 0.1 * 1000 * step["roofline_seconds"]
    assert "optimizer" in {part["part"] for part in phase["target"]["costs"]}
    assert phase["target"]["flops_per_device"] * 4 == pytest.approx(phase["flops"] / phase["steps"], rel=0.1)
    assert {"all-gather", "all-reduce"} & set(phase["target"]["collectives"])
    assert all(whole > 0 for whole in phase["target"]["gathered"].values())
    assert phase["attention"] == "splash"
    assert (found["devices"], found["processes"], found["platform"], found["target"]) == (4, 1, "tpu", "v5e:2x2")
    assert os.path.exists("/tmp/libtpu_lockfile") == locked


@pytest.mark.long
@pytest.mark.timeout(900)
def test_layouts_of_a_tpu_slice(work):
    """The least roofline is first, all that fit come before all that do not, and the first is a config that trains."""
    found, _ = plan(work, "--target", "v5e:2x2", "--layouts", "--fsdp", "--fsdp_devices", "3", "--tensor_devices", "7")
    layouts = found["layouts"]
    fields = [layout["fields"] for layout in layouts]
    assert {} in fields
    assert {"fsdp": True} in fields
    assert {"fsdp": True, "tensor_devices": 2} in fields
    steps = [layout["step"] for layout in layouts]
    rooflines = [step["roofline_seconds"] for step in steps if step["fits"]]
    assert rooflines == sorted(rooflines)
    # A head is not divided: 4 devices repeat the work of attention with 2 of them.
    repeated = [each.get("tensor_devices", 1) > 2 for each in fields]
    assert [step["flops_ratio"] > 1.05 for step in steps] == repeated
    words = [word for name, value in fields[0].items() for word in (f"--{name}", str(value))]
    of_plan, _ = plan(work, "--target", "v5e:2x2", *words)
    of_best = of_plan["phases"][0]["target"]
    assert {**of_best, "compile_seconds": 0, "validation": 0} == {**steps[0], "compile_seconds": 0, "validation": 0}


CUT_ROW = """
import os, sys
from roxxel_dist.devices.targets import parse_target
target = parse_target("v5e:2x4")
os.environ.update(target.environment())
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from roxxel_dist import attention
from roxxel_dist.cluster.mesh import make_mesh, phase_mesh

def total(q, k, v):
    return attention(q, k, v, window=int(sys.argv[1]) or None).astype(jnp.float32).sum()

mesh = phase_mesh(make_mesh(devices=target.devices()), 1)
place = NamedSharding(mesh, P(None, "tokens"))
q, k = (jax.ShapeDtypeStruct((1, 8192, heads, 64), jnp.bfloat16, sharding=place) for heads in (4, 2))
with jax.set_mesh(mesh):
    print(jax.jit(jax.grad(total, (0, 1, 2)), out_shardings=place).lower(q, k, k).compile().as_text())
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("window", "gathered"), [(0, ["bf16[1,8192,2,64]"] * 4), (1024, [])])
def test_a_row_that_is_cut_has_splash_attention(window, gathered, work):
    """Compiled for eight chips: the three kernels, and keys and values gathered once a pass, or sent to a neighbour."""
    if not TPU_PYTHON.exists():
        pytest.skip("no libtpu: make tpu")
    command = [TPU_PYTHON, "-c", CUT_ROW, str(window)]
    done = subprocess.run(command, cwd=work, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"%(splash_mha_(?:fwd|dq|dkv))\w*[.\d]* = .*custom-call", done.stdout)
    assert sorted(set(kernels)) == ["splash_mha_dkv", "splash_mha_dq", "splash_mha_fwd"]
    assert re.findall(r"= (\w+\[[\d,]+\])\S* all-gather\(", done.stdout) == gathered
    assert ("reduce-scatter(" in done.stdout) == bool(gathered)
    assert "collective-permute" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_row_on_a_tpu_slice(work):
    phases = "[{steps: 2, batch_size: 1, seq_len: 2049}]"
    found, _ = plan(work, "--target", "v5e:2x2", "--phases", phases, "--max_context", "2048")
    step = found["phases"][0]["target"]
    assert found["phases"][0]["layout"]["token_pieces"] == 4
    assert step["flops_ratio"] == pytest.approx(1, abs=0.05)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.long
def test_experts_cost_what_their_tokens_cost(work):
    """Forward and backward, with shares of the hidden units on two chips."""
    found, _ = plan(work, "--target", "v5e:2x2", "--use_moe", "True", "--tensor_devices", "2")
    assert found["phases"][0]["target"]["flops_ratio"] == pytest.approx(1, abs=0.03)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.long
def test_what_does_not_fit_is_told_what_makes_it_fit(work):
    """A device with less memory than the state takes, but more than a quarter of it; what is proposed was compiled."""
    fields = "--dim", "512", "--vocab_size", "2048", "--device_memory_gb", "0.04"
    _, told = plan(work, "--target", "v5e:2x2", *fields, code=2)
    assert "its training step does not fit: it needs" in told
    assert "and one of v5e:2x2 has 40.00 MB: with fsdp true it takes" in told
    assert "and fits" in told


@pytest.mark.long
def test_what_a_compiler_refuses_is_refused_with_its_word(work):
    _, told = plan(work, "--target", "v5e:3x5", code=2)
    assert 'v5e:3x5, which its compiler refuses: INVALID_ARGUMENT: Topology layout "v5e:3x5" is not divisible' in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--phases", "[{steps: 2, batch_size: 6, seq_len: 129}]", "--grad_accum", "4"],
            "batch_size is 6, which is not a multiple of grad_accum (4)",
        ),
        pytest.param(
            *(["--tensor_devices", "3"], "tensor_devices is 3: it must be at least 1, and divide the 4 device(s)"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(["--attention", "cudnn"], "cuDNN is for GPUs, and the devices here are tpu"), marks=pytest.mark.long
        ),
        (["--data_path", "nowhere"], "nowhere"),
    ],
)
def test_what_train_refuses_is_refused(words, message, work):
    _, told = plan(work, "--target", "v5e:2x2", *words, code=2)
    assert message in told.replace("--", "")
    assert "Traceback" not in told


def test_kinds_of_tpu_are_those_that_libtpu_names():
    """Each has the name of a machine, which libtpu asks for."""
    assert all(re.fullmatch(r"(v|tpu)\w+-\d", tpu.machine) for tpu in TPUS.values())


DEVICES = """
import os, sys
from roxxel_dist.devices.targets import parse_target
target = parse_target(sys.argv[1])
os.environ.update(target.environment())
devices = target.devices()
print(len(devices), devices[0].device_kind, target.device_bytes(devices[0]) >> 30, sep=",")
"""


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        # As jax has on a v4-8: a device is a chip of 32 GiB, not one of its two cores.
        pytest.param("v4:2x2x1", "4,TPU v4,30", marks=pytest.mark.long),
        pytest.param("v4:1x1x1", "1,TPU v4,30", marks=pytest.mark.long),
        ("tpu7x:2x2x1", "8,TPU7x,94"),  # half a chip of 192 GiB
    ],
)
def test_a_device_is_what_training_has(name, devices, work):
    if not TPU_PYTHON.exists():
        pytest.skip("no libtpu: make tpu")
    command = [TPU_PYTHON, "-c", DEVICES, name]
    done = subprocess.run(command, cwd=work, env=environment(), capture_output=True, text=True)
    assert done.stdout.strip() == devices, done.stderr
