"""A resume that would leave the exactness of virtual shards says so before a file changes, and needs --amend."""

import hashlib
import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import yaml
from runs import make, module

from roxxel_dist import Config, Phase, Roxxel
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cli import main
from roxxel_dist.cluster import determinism
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.record import check_same_run
from roxxel_dist.settings.training import TRIAL

CONFIG = {
    "model": "runs:build", "dim": 16, "max_context": 32, "lr": 0.01, "virtual_shards": 4, "n_devices": 1,
    "log_every": 1, "checkpoint_every": 1, "memory_checkpoint_every": 0, "val_fraction": 0, "wandb": "off",
    "phases": [{"steps": 4, "batch_size": 16, "seq_len": 17}],
}  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a run of two of its four steps."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    rng = np.random.default_rng(1)
    with Roxxel(folder / "data.rox") as file:
        file.write([rng.integers(1, 60, 2000).astype(np.uint8) for _ in range(4)], vocab_size=60)
    jax.devices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_NPROC", "16")
        assert train(folder, "run", "--max_steps", "2") == 0
    return folder


@pytest.fixture
def folder(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "16")
    return shutil.copytree(begun, tmp_path / "copy")


def train(folder, name, *words):
    given = ["--config", folder / "config.yaml", "--data_path", folder / "data.rox", "--run_dir", folder / name, *words]
    return main(["train", *map(str, given)])


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def record(folder, **bits):
    """Write other bits into the record of the run."""
    path = folder / "run" / "config.yaml"
    saved = yaml.safe_load(path.read_text())
    saved["record"]["bits"] |= bits
    path.write_text(yaml.safe_dump(saved))


BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
MORE = "--max_steps", "4"
CASES = {
    "without shards": ({}, ("--virtual_shards", "0"), "virtual_shards is 0, and the run to resume has 4: from here on "
                       "its bits would depend on the number of devices. Leave it as it was, or accept that with"),
    "other shards": ({}, ("--virtual_shards", "8"), "virtual_shards is 8, and the run to resume has 4: from here on "
                     "its bits would not be those of the run so far"),
    "other accumulation": ({}, ("--grad_accum", "2"), "grad_accum is 2, and the run to resume has 1: from here on its"),
    "other devices": ({"devices": {"TPU v9": 2}}, (), "bits of the run would be others: devices: ['TPU v9'] ->"),
    "other jax": ({"jax": "0.1.2"}, (), "bits of the run would be others: jax: '0.1.2' ->"),
    "another loss": ({"programs": "roxxel-dist 0.1.0"}, (), "bits of the run would be others: programs: 'roxxel-dist "
                     "0.1.0' -> 'roxxel-dist 0.2.0'. Resume it where these are as they were"),
    "other flags": ({"xla_flags": "--xla_fast=1"}, (), "bits of the run would be others: xla_flags: '--xla_fast=1'"),
}  # fmt: skip


@pytest.fixture
def compiled(fresh):
    """The names of the programs that are compiled or come out of jax's cache."""
    names = []

    def listen(event, _, **more):
        if event == BACKEND_COMPILE:
            names.append(more.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case, folder, capsys, compiled):
    bits, words, message = CASES[case]
    record(folder, **bits)
    before = contents(folder / "run")
    assert train(folder, "run", "--resume", *MORE, *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert contents(folder / "run") == before
    assert compiled == []


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_it_can_be_amended(case, folder):
    bits, words, _ = CASES[case]
    record(folder, **bits)
    assert train(folder, "run", "--resume", "--amend", *words, "--max_steps", "3") == 0
    assert train(folder, "run", "--resume", *words, *MORE) == 0, "it is compared with the last resume"
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_a_trial_goes_on_where_there_is_room(folder, monkeypatch, capsys):
    record(folder, jax="0.1.2")
    monkeypatch.setenv(TRIAL, "1")
    assert train(folder, "run", "--resume", "--max_steps", "3") == 0
    assert "jax: '0.1.2' ->" in capsys.readouterr().out


def test_a_resume_that_made_no_step_does_not_count():
    bits = determinism.numerics_fingerprint() | {"attention": "xla"}
    resumes = [{"step": 2, "bits": bits | {"jax": "0.1.2"}}]
    saved = {"virtual_shards": 4, "record": {"bits": bits, "resumes": resumes}}
    config = Config(virtual_shards=4)
    check_same_run(saved, config, "xla", 2)
    with pytest.raises(UserError, match=r"jax: '0\.1\.2' ->"):
        check_same_run(saved, config, "xla", 3)


@pytest.mark.long
def test_other_devices_in_any_number_and_slices_are_no_change(folder):
    record(folder, processes=7, distributed=True)
    assert train(folder, "run", "--resume", *MORE, "--n_devices", "4", "--fsdp", "true") == 0


OPTIONS = {
    "phases": [Phase(4, 8, 17)],
    "checkpoint_every": 2,
    "eval_every": 10,
    "virtual_shards": 4,
    "val_fraction": 0.0,
}
OTHERS = "virtual_shards is 4, and here the bits of the run would be others: "
OF_PARTS = {
    "without shards": ({}, {"virtual_shards": 0}, "virtual_shards is 0, and the run in .* has 4: from step 3 on its"),
    "other shards": ({}, {"virtual_shards": 8}, "virtual_shards is 8, and the run in .* has 4: from step 3 on its"),
    "other accumulation": ({}, {"grad_accum_steps": 2}, "grad_accum is 2, and the run in .* has 1: from step 3 on its"),
    "other devices": ({"devices": {"TPU v9": 2}}, {}, OTHERS + r"devices: \['TPU v9'\] ->"),
    "other jax": ({"jax": "0.1.2"}, {}, OTHERS + r"jax: '0\.1\.2' ->"),
}  # fmt: skip


def of_parts(corpus, folder, devices=1, **more):
    return make(corpus, folder, model=module(), mesh=make_mesh(devices), **OPTIONS | more)


@pytest.fixture(scope="module")
def begun_of_parts(corpus_pattern, tmp_path_factory):
    """The folder of two of four steps of a `Trainer` of parts."""
    folder = tmp_path_factory.mktemp("of_parts")
    with pytest.MonkeyPatch.context() as patch, Roxxel(corpus_pattern) as corpus:
        patch.setenv("PJRT_NPROC", "16")
        of_parts(corpus, folder, max_steps=2).run()
    return folder


@pytest.fixture
def run_of_parts(begun_of_parts, tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "16")
    return shutil.copytree(begun_of_parts, tmp_path / "run")


def save_bits(run, **bits):
    """Write other bits into the checkpoint of the run."""
    store = CheckpointStore(run / "checkpoints")
    metadata = store.metadata(2)
    store.delete_later(2, replace(metadata, bits=metadata.bits | bits).to_dict())
    store.close()


@pytest.mark.parametrize("case", OF_PARTS)
def test_a_trainer_of_parts_refuses_it(case, corpus, run_of_parts, compiled):
    (bits, options, message), run = OF_PARTS[case], run_of_parts
    save_bits(run, **bits)
    before = contents(run)
    with pytest.raises(UserError, match=message):
        of_parts(corpus, run, **options)
    assert contents(run) == before
    assert compiled == []


@pytest.mark.parametrize("case", [pytest.param("without shards", marks=pytest.mark.long), "other jax"])
def test_a_trainer_of_parts_can_amend_it(case, corpus, run_of_parts):
    bits, options, _ = OF_PARTS[case]
    save_bits(run_of_parts, **bits)
    of_parts(corpus, run_of_parts, amend=True, max_steps=3, **options).run()
    made = of_parts(corpus, run_of_parts, **options)  # it is compared with the last resume
    made.close()
    assert (made.start_step, made.last_step) == (3, 4)


def test_a_trainer_of_parts_goes_on_on_other_devices(corpus, run_of_parts):
    save_bits(run_of_parts, processes=7, distributed=True)
    made = of_parts(corpus, run_of_parts, devices=4)
    made.close()
    assert (made.start_step, made.last_step) == (2, 4)
