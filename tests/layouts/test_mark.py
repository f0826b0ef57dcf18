"""`train` says that code of the user's own was never checked, until it is."""

import shutil
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from layouts.planted import sound

from roxxel_dist import Config, Experiment, check_layouts
from roxxel_dist.train.parts import mark_checked, unchecked_code_note

SAID = "never checked: whether a step of this model on 2 devices is the step of one device"
FIELDS = {"max_context": 32, "batch_size": 4, "max_steps": 1, "sample": "off", "export_weights": False}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A config of a module that lies in the working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copy(sound.__file__, tmp_path / "mynet.py")
    yield Config(**FIELDS, model="mynet:build", loss="mynet:loss", n_devices=2)
    sys.modules.pop("mynet", None)


@pytest.mark.long
def test_a_run_says_it_until_it_is_checked(own, tokens, tmp_path, capfd):
    def said(config=own, devices=2):
        return SAID in unchecked_code_note(config, devices, "check-layouts")

    Experiment(own).fit(tokens, tmp_path / "run")
    assert SAID in capfd.readouterr().out
    assert said()
    assert check_layouts(own, tokens, layouts=["rows"], seq_len=17).agree
    assert not said()
    (tmp_path / "mynet.py").write_text((tmp_path / "mynet.py").read_text() + "\n# another line\n")
    assert said()
    assert not said(devices=1)
    assert not said(Config(**FIELDS, dim=32, num_blocks=1, n_heads=2))


def test_each_model_of_partial_has_a_mark_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = [partial(sound.build, dim=8), partial(sound.build, dim=16), partial(sound.loss, dim=8), sound.build]
    mark_checked([models[0], sound.loss])

    def said(model):
        parts: Any = SimpleNamespace(model=model, loss_fn=sound.loss)
        return bool(unchecked_code_note(parts, 2, "check-layouts"))

    assert [said(model) for model in models] == [False, True, True, True]
