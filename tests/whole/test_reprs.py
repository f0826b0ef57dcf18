"""What a person at a prompt sees of the objects of the package, and what `help` says of their fields."""

import inspect
import pydoc
from typing import get_type_hints

import numpy as np
import pytest

from roxxel_dist import Config, Curriculum, Phase, Roxxel
from roxxel_dist.settings.training import LoopKeywords, LoopOptions
from roxxel_dist.train.parts import loop_options


def test_a_config_shows_what_differs_from_the_defaults():
    config = Config(dim=64, lr=1e-3)
    config.seed = 7
    assert repr(config) == "Config(dim=64, seed=7, lr=0.001)"
    assert repr(Config()) == "Config()"
    assert eval(repr(config)) == config


@pytest.mark.parametrize("kind", [Config, LoopOptions])
def test_help_has_the_fields(kind):
    text = pydoc.plaintext.document(kind)
    assert "log_every: Steps between rows of the log. (default: 10)" in text
    assert inspect.getdoc(kind).count("\n    checkpoint_every: ") == 1


def test_phases_curricula_and_plans(tmp_path):
    data = Roxxel(tmp_path / "a.rox")
    data.write([np.arange(1, 3000, dtype=np.uint16)], separator=0)
    phases = [Phase(steps=3, batch_size=2, seq_len=9), Phase(epochs=0.5, batch_size=4, seq_len=17)]
    assert repr(phases[0]) == "Phase(steps=3, batch_size=2, seq_len=9)"
    curriculum = Curriculum(data, phases, {"code": data})
    shown = f"Curriculum([{phases[0]}, Phase(steps=22, batch_size=4, seq_len=17)], steps=25, others=['code'])"
    assert repr(curriculum) == shown
    plan = curriculum.plan(seed=5)
    assert repr(plan) == "<Plan: 25 steps, 2 phase(s) of self, code, seed 5>"
    assert repr(plan.amend(10)) == "<Plan: 25 steps, 2 phase(s) of self, code, seed 5, amended at step 11>"


def test_a_trainer_knows_its_options():
    assert get_type_hints(LoopKeywords) == get_type_hints(LoopOptions)
    with pytest.raises(TypeError, match=r"^Trainer: there is no option 'log_evry': did you mean 'log_every'\?$"):
        loop_options({"log_evry": 1})
