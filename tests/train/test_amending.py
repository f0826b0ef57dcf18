"""A run whose curriculum changes from some step on."""

import shutil

import numpy as np
import optax
import pytest
from runs import PHASES, losses, make, model, rows, told, train

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.optimizer import NamedOptimizer

ADAMW = NamedOptimizer(OptimizerConfig(lr=1e-2))
LONGER = [*PHASES[:2], Phase(9, 4, 33)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory, corpus_pattern):
    """Eight steps of a run; only read."""
    with Roxxel(corpus_pattern) as corpus:
        train(corpus, folder := tmp_path_factory.mktemp("begun") / "run", max_steps=8, optimizer=ADAMW)
    return folder


def test_past_steps_stay_and_no_row_is_read_again(corpus, begun, tmp_path):
    """In a run that is cut once more behind its amendment, and resumes like any other."""
    for name in ("whole", "parts"):
        shutil.copytree(begun, tmp_path / name)
    before, whole = numbers(begun), tmp_path / "whole"
    made = train(corpus, whole, LONGER, amend=True, optimizer=ADAMW)
    assert made.start_step == 8
    after = numbers(whole)
    assert sorted(after) == list(range(1, 20))
    assert {step: after[step] for step in before} == before
    read = [made.plan.rows(step) for step in range(19)]
    tokens = np.concatenate([np.add.outer(r.offset, np.arange(r.seq_len)).ravel() for r in read])
    assert len(np.unique(tokens)) == len(tokens)
    text = told(whole)
    assert "the plan until now:" in text
    assert "the plan from step 9 on:" in text
    assert "learning rate of step 9" in text
    train(corpus, tmp_path / "parts", LONGER, amend=True, max_steps=13, optimizer=ADAMW)
    assert train(corpus, tmp_path / "parts", LONGER, optimizer=ADAMW).start_step == 13
    assert numbers(tmp_path / "parts") == after


def numbers(path):
    return {step: loss for step, loss, _ in losses(path)}


def test_without_it_an_edited_curriculum_is_refused(corpus, begun):
    with pytest.raises(ValueError, match=r"made with another curriculum .* change it from step 9 on with amend=True"):
        make(corpus, begun, LONGER, optimizer=ADAMW)


def test_shards_may_be_added(tmp_path):
    rng = np.random.default_rng(3)

    def documents(count):
        return (rng.integers(1, 500, 400).astype(np.uint16) for _ in range(count))

    with Roxxel(tmp_path / "data_*.rox") as data:
        data.write(documents(60), vocab_size=500, max_shard_bytes=20_000)
    with Roxxel(tmp_path / "data_*.rox") as data:
        train(data, tmp_path / "run", max_steps=8)
        data.write(documents(30), vocab_size=500, max_shard_bytes=20_000, append=True)
    with Roxxel(tmp_path / "data_*.rox") as data:
        with pytest.raises(ValueError, match=r"made with another corpus .*, that of .*data_"):
            make(data, tmp_path / "run")
        made = train(data, tmp_path / "run", amend=True)
        assert made.step == 13
        assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 14))


@pytest.mark.long
def test_a_data_set_may_be_taken_away(corpus, tmp_path):
    def blended(phases, sets, **options):
        curriculum = Curriculum(corpus, phases, mix_streamers=sets)
        options |= {"log_every": 1, "val_fraction": 0.0}
        made = Trainer(model, optax.adam(1e-2), curriculum, next_token_loss, tmp_path / "run", **options)
        made.run()
        made.close()
        return made

    with Roxxel(tmp_path / "code_*.rox") as code:
        code.write(np.random.default_rng(0).integers(1, 500, (60, 400)).astype(np.uint16), vocab_size=500)
    with Roxxel(tmp_path / "code_*.rox") as code:
        blended([Phase(6, 8, 17, weights={"self": 0.5, "code": 0.5})], {"code": code}, max_steps=4)
    assert blended([Phase(8, 8, 17)], None, amend=True).step == 8
    assert blended([Phase(8, 8, 17)], None).start_step == 8


@pytest.mark.long
def test_the_learning_rate_before_is_that_of_the_run(corpus, tmp_path):
    train(corpus, tmp_path, max_steps=8, optimizer=NamedOptimizer(OptimizerConfig(lr=0.5, lr_schedule="constant")))
    train(
        corpus, tmp_path, LONGER, amend=True, optimizer=NamedOptimizer(OptimizerConfig(lr=0.25, lr_schedule="constant"))
    )
    text = told(tmp_path)
    assert "learning rate of step 9: 0.5 before, 0.25 now" in text
    assert "at step 13 before" in text


def test_a_run_that_ended_by_patience_goes_on(corpus, tmp_path):
    options = {"patience": 2, "eval_every": 2, "eval_fn": lambda state: {"val_loss": 1.0}}
    ended = train(corpus, tmp_path, **options)
    assert ended.step == 4
    assert train(corpus, tmp_path, **options).step == 4
    assert train(corpus, tmp_path, LONGER, amend=True, **options).step == 8


def test_another_seed_or_another_cut_is_refused(corpus, begun):
    with pytest.raises(ValueError, match="an amendment cannot change it"):
        make(corpus, begun, LONGER, amend=True, seed=1, optimizer=ADAMW)
    with pytest.raises(ValueError, match="with the same val_fraction"):
        make(corpus, begun, LONGER, amend=True, val_fraction=0.3, optimizer=ADAMW)


@pytest.mark.long
def test_a_warm_up_that_only_the_new_plan_has_room_for(corpus, tmp_path):
    train(corpus, tmp_path, max_steps=8, optimizer=NamedOptimizer(OptimizerConfig(lr=1e-2)))
    longer = NamedOptimizer(OptimizerConfig(lr=1e-2, warmup_steps=15))
    assert train(corpus, tmp_path, LONGER, amend=True, optimizer=longer).step == 19
    assert "the plan from step 9 on:" in told(tmp_path)
