"""Which programs are known without tracing them: those that are the package's own, part by part."""

import dataclasses

import pytest

from roxxel_dist import Config
from roxxel_dist.builders import build_components
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.train import trainer as trainer_module
from roxxel_dist.train.compile import AotCompiler
from roxxel_dist.train.trainer import Trainer

CONFIG = {
    "dim": 16, "num_blocks": 1, "kv_heads": 1, "head_size": 8, "max_context": 32,
    "phases": [{"steps": 4, "batch_size": 8, "seq_len": 17}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """As in a rank of `train`; tests are modules of a user's own. No step is made, so none is compiled."""
    monkeypatch.setattr(AotCompiler, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(trainer_module, "all_installed", lambda: True)


def identity(corpus, folder, *, loss=None, wrap=lambda build: build, **changes):
    parts = build_components(Config(**CONFIG | changes), corpus)
    trainer = Trainer(
        wrap(parts.build), parts.optimizer, parts.curriculum, loss or parts.loss, folder,
        grad_accum_steps=parts.grad_accum, **dataclasses.asdict(parts.options),
    )  # fmt: skip
    try:
        return trainer._compiler.identity
    finally:
        trainer.close()


def test_what_the_package_makes_of_a_config_is_known(corpus, tmp_path):
    first = identity(corpus, tmp_path / "a")
    assert first is not None
    assert "0x" not in first  # no addresses: the next process has others
    assert identity(corpus, tmp_path / "b") == first
    changes = [{"on_bad_step": "skip"}, {"optimizer": "sgd"}]
    others = [identity(corpus, tmp_path / str(number), **change) for number, change in enumerate(changes)]
    assert len({first, *others}) == 1 + len(changes)


def test_code_of_the_users_is_traced_each_time(corpus, tmp_path, monkeypatch):
    assert identity(corpus, tmp_path / "a", loss=next_token_loss) is None
    assert identity(corpus, tmp_path / "b", wrap=lambda build: build.__call__) is None
    monkeypatch.undo()
    assert identity(corpus, tmp_path / "c") is None  # this file may have changed any module
