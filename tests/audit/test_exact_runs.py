"""Audits of runs with virtual shards whose state is in slices, on other devices than theirs."""

import shutil

import jax
import pytest
from commands import run as command
from flips import Flip, audit, flipping, truth

from roxxel_dist import Config, Experiment
from roxxel_dist.audit import replay
from roxxel_dist.audit.record import RunRecord, Segment
from roxxel_dist.train.parts import Parts

FIELDS = {
    "virtual_shards": 4, "fsdp": True, "n_devices": 2, "dim": 192, "log_every": 2, "eval_every": 4,
    "checkpoint_every": 3, "phases": [{"steps": 6, "batch_size": 4, "seq_len": 17}],
}  # fmt: skip
EQUAL = "equal to the bit over 6 steps"


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """The size that the runs have; that of this process is another one, and the same for all of them."""
    jax.devices()
    monkeypatch.setenv("PJRT_NPROC", "16")


@pytest.fixture(scope="module")
def exact(trained):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_NPROC", "16")
        run = trained(**FIELDS)
    table = RunRecord.read(run).checkpoint(6)[1]
    assert any(len(blocks) == 2 for name, blocks in table.blocks.items() if name.startswith("params/"))
    return run


def test_slices_and_devices_are_no_change_where_there_are_virtual_shards():
    for shards in (0, 4):
        one, other = (
            Segment(start=0, config={"virtual_shards": shards, "fsdp": fsdp, "n_devices": 3 + fsdp}, bits={}).numbers
            for fsdp in (False, True)
        )
        assert (one == other) == (shards > 0)


@pytest.mark.long
def test_a_run_that_went_on_without_slices_and_on_other_devices_is_one_run_for_an_audit(trained, capsys):
    run = trained(**FIELDS | {"max_steps": 3})
    trained(run, resume=True, **FIELDS | {"max_steps": 6, "fsdp": False, "n_devices": 1})
    code, text = audit(capsys, run)
    assert (code, text[: len(EQUAL)]) == (0, EQUAL), text


@pytest.mark.long
def test_steps_after_amended_shards_are_audited_from_the_checkpoint_before(trained, capsys):
    """It was made with other shards and another accumulation than the steps that follow."""
    fields = FIELDS | {"dim": 64, "fsdp": False}
    run = trained(**fields | {"max_steps": 3})
    changed = {"virtual_shards": 2, "grad_accum": 2, "max_steps": 6}
    Experiment(Config(**fields | changed)).fit(run_dir=run, resume=True, amend=True)
    code, text = audit(capsys, run, "--steps", "4:6")
    assert (code, text[: len(EQUAL)]) == (0, EQUAL.replace("6 steps", "3 steps")), text


@pytest.mark.long
def test_a_run_with_cut_rows_is_audited_on_three_devices(trained, capsys, monkeypatch):
    phases = [{"steps": 2, "batch_size": 4, "seq_len": 9}, {"steps": 2, "batch_size": 2, "seq_len": 17}]
    run, sizes = trained(**FIELDS | {"dim": 16, "fsdp": False, "phases": phases}), []

    def noted(*args, mesh, **fields):
        sizes.append(mesh.size)
        return Parts(*args, mesh=mesh, **fields)

    monkeypatch.setattr(replay, "Parts", noted)
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    code, text = audit(capsys, run)
    assert (code, text[: len(EQUAL)]) == (0, EQUAL.replace("6 steps", "4 steps")), text
    assert sizes == [3]


@pytest.mark.cluster
def test_a_run_of_slices_on_two_devices_is_audited_on_one(exact, tmp_path):
    found = command("audit", exact, "--devices", 1, cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert EQUAL in found.stdout


FLIPS = [
    (Flip("moment", 3, 5), "the checkpoint of step 3 differs: params/"),
    (Flip("slice", 4, 1), "step "),
    (Flip("parameter", 2, 2), ""),
    (Flip("batch", 5, 3), "step 6 differs"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flip", "words"), [pytest.param(*case, id=f"{case[0].kind} in step {case[0].step}") for case in FLIPS]
)
def test_a_bit_that_flips_in_a_run_of_slices_is_found_on_other_devices(flip, words, trained, exact, capsys):
    with flipping(flip):
        run = trained(**FIELDS)
    expected, (code, text) = truth(run, exact), audit(capsys, run)
    shutil.rmtree(run)
    assert expected is not None
    assert expected.startswith(words), expected
    assert (code, text[: len(expected)]) == (1, expected), text
