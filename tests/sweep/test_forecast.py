"""What a sweep would take, where some of its trials cannot run."""

import re
from pathlib import Path

import pytest
from commands import make_corpus
from trials import BASE

from roxxel_dist.config import UsageError
from roxxel_dist.sweep import dry_run as estimate
from roxxel_dist.sweep.dry_run import Plan, forecast
from roxxel_dist.sweep.execution.trial import config_of
from roxxel_dist.sweep.journal import History
from roxxel_dist.sweep.samplers import make


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return str(folder / "data")


@pytest.fixture
def text_of(data, tmp_path, monkeypatch):
    """The forecast for values of decay_steps, in runs of 12 steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate, "try_out", lambda *given: None)  # a training of its own

    def text(values, **fixed):
        space = {name: {"value": value} for name, value in fixed.items()}
        space |= {"decay_steps": {"values": values}, "warmup_steps": {"value": 200}, "lr_schedule": {"value": "wsd"}}
        plan = Plan(
            study=Path("study"), what="grid search", count=None, size=len(values), workers=1, hosts=1, procs_per_host=1,
            gpus_per_host=None, ray_address=None, max_time_s=None, history=History(),
        )  # fmt: skip
        engine = make({"method": "grid", "parameters": space}, seed=1)
        return forecast(plan, engine, lambda params: config_of(BASE, params), data)

    return text


def test_trials_that_cannot_run_are_counted(text_of):
    text = text_of([2, 500, 600])
    assert "the first 3: 12 to 12 steps" in text
    assert "; 2 of them cannot run (decay_steps is 500: " in text


def test_a_model_with_a_table_of_its_own_for_each_end_is_planned(text_of):
    """As nearly every LLaMA, and as GPT-2, have it; only shapes are made."""
    tied, own = text_of([2]), text_of([2], weight_tying=False, pos_encoding="learned")
    sizes = [int(re.search(r"([\d,]+) to [\d,]+ parameters", text)[1].replace(",", "")) for text in (tied, own)]
    assert sizes[1] > sizes[0]
    assert "cannot run" not in own


def test_where_none_can_run_it_is_an_error(text_of):
    with pytest.raises(UsageError, match="none of 2 trials that were looked at can run: decay_steps is 500"):
        text_of([500, 600])
