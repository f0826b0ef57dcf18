"""`generate` on the devices that the run or its flags say: the text of one device, and what is not possible."""

import jax
import pytest
from made_runs import make_run

from roxxel_dist import Generator
from roxxel_dist.cli import main
from roxxel_dist.cluster import parameter_sharding

EXPERTS = {"use_moe": True, "n_experts": 8, "num_blocks": 1, "vocab_size": 304}
WORDS = ["--prompt", "def f", "--max_new_tokens", "8", "--temperature", "0.9"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("divided") / "run", **EXPERTS, expert_devices=4)


def text_of(run, capsys, *flags):
    assert main(["generate", str(run), *WORDS, *flags]) == 0
    return capsys.readouterr()


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [[], ["--expert_devices", "8"], ["--expert_devices", "2", "--tensor_devices", "2", "--fsdp_devices", "2"]],
)
def test_the_text_is_that_of_one_device(run, capsys, monkeypatch, flags):
    monkeypatch.setattr(parameter_sharding, "FSDP_MIN_SIZE", 64)  # small parameters are divided too
    expected = text_of(run, capsys, "--expert_devices", "1")
    found = text_of(run, capsys, *flags)
    assert found.out == expected.out
    assert len(found.out) > len("def f\n")
    assert text_of(run, capsys, *flags, "--num_samples", "3").out.startswith(f"--- sample 1, seed 0\n{found.out}")


@pytest.mark.parametrize(
    ("asked", "there", "experts", "attention", "line"),
    [
        ({}, 8, 4, 1, ""),
        ({}, 3, 2, 1, "expert_devices is 2, and was 4 in the run: this process has 3 device(s)"),
        ({}, 1, 1, 1, "expert_devices is 1, and was 4 in the run: this process has 1 device(s)"),
        ({"expert_devices": 1}, 8, 1, 1, ""),
        ({"expert_devices": 2, "fsdp_devices": 2, "tensor_devices": 2}, 8, 8, 4, ""),
        ({"tensor_devices": 4}, 8, 8, 4, "expert_devices is 2, and was 4"),
    ],
)
def test_each_device_has_its_part(run, monkeypatch, asked, there, experts, attention, line):
    """Of the matrices of experts, and of a matrix of attention."""
    monkeypatch.setattr(parameter_sharding, "FSDP_MIN_SIZE", 64)
    devices, said = jax.devices()[:there], []
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    model = Generator(run, say=said.append, **asked).model
    leaves = model.blocks.feedforward.gate_up[...], model.blocks.attention.out.kernel[...]
    assert [leaf.size // leaf.addressable_shards[0].data.size for leaf in leaves] == [experts, attention]
    assert "".join(said).startswith(line)
    assert bool(said) == bool(line)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--expert_devices", "16"], "expert_devices (16) is 16 devices, and this process has 8: use fewer"),
        (["--expert_devices", "4", "--tensor_devices", "4"], "expert_devices (4) x tensor_devices (4) is 16 devices"),
        (["--tensor_devices", "0"], "tensor_devices is 0: it must be at least 1"),
        (["--expert_devices", "3"], "expert_devices is 3: it must divide the experts of the model, which has 8"),
    ],
)
def test_what_cannot_be_is_one_line(run, capsys, flags, message):
    assert main(["generate", str(run), *WORDS, *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1
