"""Data sets by name: blended by the weights of phases, remembered by a run, and compared when it is resumed."""

import shutil

import numpy as np
import pytest

from roxxel_dist import Config, Experiment, Roxxel
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import build_components
from roxxel_dist.run.curriculum import describe_batch
from roxxel_dist.settings.config import load_yaml

PHASES = [
    {"steps": 4, "batch_size": 8, "seq_len": 17},
    {"steps": 4, "batch_size": 8, "seq_len": 17, "weights": {"self": 0.5, "code": 0.5}, "blend": "row"},
]
SMALL = {
    "model": "runs:build", "dim": 16, "max_context": 16, "phases": PHASES, "vocab_size": 200, "eval_iters": 1,
    "log_every": 1, "n_devices": 1, "checkpoint_every": 5, "max_steps": 6,
}  # fmt: skip


def write(path, low, high, documents=20):
    rng = np.random.default_rng(low)
    with Roxxel(path) as data:
        data.write((rng.integers(low, high, 300).astype(np.uint16) for _ in range(documents)), vocab_size=high)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Two data sets, `text` of ids below 100 and `code` of ids from 100 on, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for folder in ("text", "code"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "text" / "t.rox", 1, 100)
    write(tmp_path / "code" / "c.rox", 100, 200)
    return tmp_path


def ids(recipe, step):
    plan = recipe.curriculum.plan(42)
    rows, sets = plan.rows(step), recipe.curriculum.datasets
    pairs = zip(rows.dataset, rows.offset, strict=True)
    return np.concatenate([sets[plan.datasets[name]].read(np.array([at]), rows.seq_len) for name, at in pairs])


def test_weights_take_their_rows_from_the_data_set_of_that_name(work):
    with Roxxel("text") as data:
        made = build_components(Config(**SMALL, datasets={"code": "code", "self": "text"}), data)
        assert list(made.curriculum.datasets) == ["self", "code"]
        assert ids(made, 0).max() < 100
        code = []
        for step in range(4, 8):
            found = ids(made, step)  # 0 is between documents
            is_code, is_text = ((found >= 100) | (found == 0)).all(1), (found < 100).all(1)
            assert (is_code ^ is_text).all()
            code.append(is_code.sum())
        assert sum(code) == 16
        assert all(0 < count < 8 for count in code)


def test_a_run_remembers_its_data_sets_and_compares_them(work, monkeypatch):
    run = Experiment(Config(**SMALL, datasets={"self": "text", "code": "code"})).fit(run_dir="run").absolute()
    log = (run / "logs" / "rank-0.log").read_text()
    assert "data code: 6,020 tokens, in 1 shard(s)" in log
    assert "validation: uses only the held-out part of self; to validate on code too, name shards in `vali" in log
    saved = load_yaml(run / "config.yaml")
    assert saved["datasets"] == {"self": str(work / "text"), "code": str(work / "code")}
    Experiment(Config(**SMALL | {"max_steps": 1}, datasets={"self": "gone", "code": "code"})).fit("text", "other")
    assert load_yaml(work / "other" / "config.yaml")["datasets"]["self"] == str(work / "text")
    lines = describe_batch(run, 5).splitlines()
    assert lines[0].startswith("step 5 of 8, phase 2 of 2")
    read = [sum(f": {name} token" in line for line in lines) for name in ("code", "self")]
    assert min(read) > 0
    assert sum(read) == 8
    (work / "elsewhere").mkdir()
    monkeypatch.chdir(work / "elsewhere")
    Experiment(Config(**SMALL | {"max_steps": 7})).fit(run_dir=run, resume=True)
    assert "resuming after step 6 of 7" in (run / "logs" / "rank-0.log").read_text()
    shutil.rmtree(work / "code")
    (work / "code").mkdir()
    write(work / "code" / "c.rox", 110, 200)
    with pytest.raises(UserError, match="was made with another corpus"):
        Experiment(Config(**SMALL | {"max_steps": 8})).fit(run_dir=run, resume=True)


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"code": "nowhere"}, r"datasets 'code' is .*nowhere: there are no shards"),
        ({"code": "text.txt"}, r"text becomes shards with `roxxel-dist data build .*text.txt --out DIR`"),
        ({"prose": "code"}, "phase 2: weights name 'code', and the data sets are self, prose"),
        ({"code": 3}, "datasets: 'code' is 3: write names and paths"),
        (None, "phase 2: weights name 'code', and the data sets are self"),
    ],
)
def test_what_cannot_be_is_named(work, datasets, message):
    (work / "text.txt").write_text("Some text. " * 100)
    with pytest.raises(UserError, match=message):
        Experiment(Config(**SMALL, datasets=datasets)).fit("text", "run")
    assert not (work / "run").exists()


def test_ids_beyond_the_vocabulary_are_told(work):
    with (
        Roxxel("text") as data,
        pytest.raises(ValueError, match="the data 'code' has 200 tokens, and vocab_size is 150"),
    ):
        build_components(Config(**SMALL | {"vocab_size": 150}, datasets={"code": "code"}), data)


def test_self_is_what_the_data_path_names_otherwise():
    assert Config(datasets={"self": "a"}).primary_path(None) == "a"
    assert Config(datasets={"code": "a"}).primary_path("b") == "b"
    assert Config().primary_path(None) is None
    assert Config(datasets={"self": "a"}).primary_path("b") == "b"
