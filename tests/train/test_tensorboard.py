"""Event files, read back by TensorBoard's own reader."""

import struct
import sys
from pathlib import Path

import pytest
from runs import rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from roxxel_dist import Config, Experiment
from roxxel_dist.process.exit_codes import pip_install
from roxxel_dist.train.log.base import LogQueue
from roxxel_dist.train.log.tensorboard import TensorboardTracker

# numpy's and protobuf's own words on what tensorboard does
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def read(run):
    """(scalars by name as {step: value}, the accumulator)."""
    events = EventAccumulator(str(Path(run) / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return {name: {one.step: one.value for one in events.Scalars(name)} for name in events.Tags()["scalars"]}, events


def single(value):
    """A number as an event file has it."""
    return struct.unpack("f", struct.pack("f", value))[0]


def test_a_real_run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(400)))
    config = Config(
        model="runs:build", dim=16, max_context=16, n_devices=1, eval_iters=1, eval_every=3, log_every=1,
        tokenizer_type="byte", tensorboard=True, sample="off", export_weights=False,
        phases=[{"steps": 6, "batch_size": 8, "seq_len": 17}],
    )  # fmt: skip
    Experiment(config).fit(text, tmp_path / "run")
    logged, (scalars, events) = rows(tmp_path / "run"), read(tmp_path / "run")
    for name in ("train_loss", "val_loss", "lr", "tokens_per_s"):
        assert scalars[name] == {row["step"]: single(row[name]) for row in logged if name in row}
    start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    fields = plugin_data_pb2.HParamsPluginData.FromString(start).session_start_info.hparams
    assert fields["dim"].number_value == 16
    assert fields["tokenizer_type"].string_value == "byte"
    assert '"seq_len": 17' in fields["phases"].string_value


def test_what_is_done_again_is_there_once(tmp_path):
    def log(*steps, shift=0.0):
        for step in steps:
            queue.row({"step": step, "train_loss": step + shift, "nan": float("nan")})

    with LogQueue([TensorboardTracker(tmp_path, {})]) as queue:
        log(1, 2, 3, 4, 5)
        queue.rewind(3)
        log(4, 5, 6, shift=100.0)
    with LogQueue([TensorboardTracker(tmp_path, {})]) as queue:  # another process, from an earlier checkpoint
        log(6, 7, shift=200.0)
        queue.sample("a text\nof the model")
    scalars, events = read(tmp_path)
    assert scalars == {"train_loss": {1: 1, 2: 2, 3: 3, 4: 104, 5: 105, 6: 206, 7: 207}}
    (sample,) = events.Tensors("sample/text_summary")
    assert (sample.step, sample.tensor_proto.string_val[0]) == (7, b"a text  \nof the model")


def test_without_the_package_training_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with LogQueue([TensorboardTracker(tmp_path, {})]) as queue:
        queue.row({"step": 1, "train_loss": 1.0})
    assert pip_install("tensorboard") in capsys.readouterr().err
    assert not (tmp_path / "tensorboard").exists()
