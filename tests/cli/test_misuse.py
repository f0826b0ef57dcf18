"""What is asked wrongly is one line with the file, the value and what to do: no traceback, no raw text of Python."""

import os
import re

import pytest
from tables import one_test

from roxxel_dist import Config, Curriculum
from roxxel_dist.cli import main

LONG = "x" * 300
TRAIN = ["train", "--config", "tiny.yaml", "--data_path", "corpus.txt"]
RAW = re.compile(
    r"Traceback|\[Errno|unicode string|has no attribute|__init__|invalid literal|could not convert|can't decode"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("misuse")
    texts = {
        "tiny.yaml": "dim: 32\n", "corpus.txt": "a text\n" * 50, "list.yaml": "- 1\n", "open.yaml": "dim: [1,\nlr: 2\n",
        "dims.yaml": "dim: [64, 128]\n", "phases.yaml": "phases: {steps: 1}\n",
        "tab.yaml": "dim:\t32\n\tx: 1\n", "field.yaml": "learning_rate: 3\n", "odd.bin": "1234",
        "beside.yaml": "data_dir: text\n",
        "torn/metrics.jsonl": '{"step": 1}\n{"step": 2, "tr\n{"step": 3}\n', "number/metrics.jsonl": "3\n",
        "typed/config.yaml": "dim: [\n", "runs/first/config.yaml": "dim: 32\n",
        "studies/one/study.yaml": "", "studies/one/journal.jsonl": "",
        "studies/one/config.yaml": "dim: 32\n", "studies/one/trials/0/config.yaml": "",
        "sweep.yaml": "method: grid\nparameters: {lr: {values: [1, 2]}}\n", "sections.yaml": "model: {dim: 32}\n",
        "date.yaml": "seed: 2024-13-45\n", "deep.yaml": "[" * 5000,
        "gone/config.yaml": "dim: 32\n", "gone/checkpoints/3/x": "",
    }  # fmt: skip
    for name, text in texts.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    (place / "empty.txt").write_text("")
    (place / "noise").write_bytes(bytes(range(256)))
    (place / "latin.yaml").write_bytes(b"dim: 32 # \xe9\n")
    os.symlink("nowhere", place / "dead")
    os.symlink("loop", place / "loop")
    return place


@one_test(
    ("words", "message"),
    [
        (["train", "--config", "open.yaml"], "open.yaml: not valid YAML: line 3, column 1: expected"),
        (["train", "--config", "tab.yaml"], "line 1, column 5: found character '\\t' that cannot start any token: "),
        (["train", "--config", "latin.yaml"], "latin.yaml: not valid YAML: byte 10 is no UTF-8"),
        (["train", "--config", "field.yaml"], "there is no field 'learning_rate': did you mean 'lr'?"),
        (["train", "--config", "beside.yaml"], "there is no field 'data_dir': give --data_path PATH beside the config"),
        (["train", "--config", "dead"], "dead: cannot be read (No such file or directory)"),
        (["train", "--config", "loop"], "loop: cannot be read (Too many levels of symbolic links)"),
        (["train", "--phases", "[{"], "--phases: not valid YAML: line 1, column 3"),
        (["train", "--learning_rate", "3"], "there is no option --learning_rate: did you mean --lr?"),
        (["train", "--dim", "1e9"], "dim is 1000000000: "),
        (["train", "--dim", "15e-1"], "--dim 15e-1: must be a whole number"),
        (["train", "--set", "dim=64"], "no option --set: each field is an option: write --NAME VALUE;"),
        (["batch", "--config", "open.yaml"], "write the file by its place, as in `roxxel-dist batch SOURCE`;"),
        (["plan", "--mtbf", "often"], "--mtbf often: must be a number of days, or a time such as 5m"),
        (["train", "--dim"], "--dim has no value: must be a whole number"),
        (["train", "--dim", "--lr", "1e-3"], "--dim has no value: must be a whole number"),
        (["train", "--lr", "fast"], "--lr fast: must be a number"),
        (["train", "--model"], "--model has no value: write --model MODEL"),
        (["train", "--wandb"], "--wandb has no value: must be one of off, offline, online"),
        (["train", "--wandb", "maybe"], "--wandb maybe: must be one of off, offline, online"),
        (["train", "--wandb", "--dim", "32"], "--wandb has no value: must be one of off, offline, online"),
        (["doctor", "--hosts"], "--hosts has no value: write --hosts HOSTS"),
        (["data", "build", "corpus.txt", "--out"], "--out has no value: write --out OUT"),
        (["data", "build", "corpus.txt", "--out", "x", "--text_key"], "--text_key has no value: write --text_key TEXT"),
        (["sweep", "--sweep_config"], "--sweep_config has no value: write --sweep_config SWEEP_CONFIG"),
        (["launch", "ssh", "--hosts", "--", "true"], "--hosts has no value: write --hosts HOSTS"),
        (["export", "gone", "--format", "--out", "x"], "--format has no value: must be one of hf, msgpack"),
        (["train", "--config", "sweep.yaml"], "sweep.yaml: this is the file of a sweep, not a config: `sweep --sweep"),
        (["plan", "--config", "sweep.yaml"], "sweep.yaml: this is the file of a sweep, not a config: `sweep --sweep"),
        (["sweep", "--sweep_config", "tiny.yaml"], "tiny.yaml: this is a config, not the file of a sweep, which has"),
        (["sweep", "--sweep_config", "sections.yaml"], "this is a config, not the file of a sweep, which has"),
        (["launch", "local", "--step-timeout", "5x", "--", "true"], "--step-timeout 5x: must be a number of seconds"),
        (["stop", "x", "--timeout", "soon"], "--timeout soon: must be a number of seconds, or a time such as 5m"),
        (["train", "--lr", "5m"], "--lr 5m: must be a number"),
        (["eval", "gone", "--validation", "2024-13-45"], "--validation: not valid YAML: month must be in 1..12"),
        (["train", "--phases", "2024-13-45"], "--phases: not valid YAML: month must be in 1..12"),
        (["train", "--config", "date.yaml"], "date.yaml: not valid YAML: month must be in 1..12"),
        (["train", "--config", "deep.yaml"], "deep.yaml: not valid YAML: "),
        (["train", "-lr", "3e-4"], "there is no option -lr: options begin with two dashes: did you mean --lr?"),
        (["train", "--dim", "32", "lr=3e-4"], "takes only options, and 'lr=3e-4' is not one: write --lr 3e-4"),
        (["train", "tiny.yaml"], "takes only options, and 'tiny.yaml' is not one: write --config tiny.yaml"),
        (["sweep", "tiny.yaml"], "takes only options, and 'tiny.yaml' is not one: write --sweep_config tiny.yaml"),
        (["generate", "runs/first", "import"], "`generate` takes one RUN_DIR, and 'import' is one more"),
        (["launch", "--nprocs", "2"], "no launcher '--nprocs': write one of local, ssh, exec, slurm, "),
        (["launch", "train.py"], "there is no launcher 'train.py': write one of local, ssh, "),
        (["train", "--config", "dims.yaml"], "dims.yaml: dim is [64, 128]: it must be a whole number"),
        (["train", "--config", "phases.yaml"], "it must be a list or nothing: write [{'steps': 1}]"),
        ([*TRAIN, "--phases", "[{steps: 1, batch_size: 8, seq_len: 9}]", "--epochs", "2"], "--epochs does nothing"),
        (["train", "corpus.txt"], "takes only options, and 'corpus.txt' is not one: write --data_path corpus.txt"),
        ([*TRAIN, "--run_dir", ""], "--run_dir is empty: name a folder"),
        ([*TRAIN, "--run_dir", LONG], "File name too long: choose a shorter name"),
        (["train", "--data_path", LONG], "File name too long: choose a shorter name"),
        ([*TRAIN, "--run_dir", "ftp://a/b"], "--run_dir is ftp://a/b: it cannot be in ftp://, which is no bucket that"),
        (["train", "--data_path", "ftp://a/b"], "it cannot be in ftp://, which is no bucket that is known (s3://, gs"),
        (["data", "build", "corpus.txt", "--out", "ftp://a/b"], "out is ftp://a/b: it cannot be in ftp://, which"),
        (["sweep", "--sweep_config", "sweep.yaml", "--study", "file:///a"], "--study is file:///a: it cannot be in fi"),
        ([*TRAIN, "--run_dir=~/r"], "--run_dir is ~/r: only a shell replaces ~, where it begins a word"),
        ([*TRAIN, "--run_dir", "$HOME/r"], "/r, or ./$HOME/r for a folder named so"),
        (["train", "--datasets", "{self: ~/data}"], "of the data is ~/data: only a shell replaces ~"),
        (["data", "build", "corpus.txt", "--out=~/d"], "out is ~/d: only a shell replaces ~"),
        (["report", "run", "--out=~/d"], "--out is ~/d: only a shell replaces ~"),
        (["sweep", "--sweep_config", "sweep.yaml", "--study", "${NONE_SUCH}/a"], "write the whole path, or ./${NONE_"),
        (["batch", LONG, "--step", "1"], "File name too long"),
        (["data", "build", "x"], "`data build` needs --out OUT (The folder for shards, "),
        (["export", "--format", "hf"], "newest checkpoint); --out OUT (The folder to create). `roxxel-dist "),
        (["export", "run", "--out=x"], "`export` needs --format msgpack|safetensors|hf (msgpack: "),
        (["batch", "tiny.yaml", "--stp", "1"], "there is no option --stp: did you mean --step?"),
        (["plan", LONG], "File name too long"),
        (["generate", LONG], "File name too long"),
        (["generate", "gone"], "meta.json is missing, written by rank 0): no older one is complete"),
        (["eval", LONG], "File name too long"),
        (["eval", "typed"], "config.yaml: not valid YAML: line 2, column 1"),
        (["eval", "gone", "--validation", "{"], "--validation: not valid YAML: line 1, column 2"),
        (["export", "gone", "--format", "hf", "--out", LONG], "File name too long"),
        (["export", "gone", "--format", "zip", "--out", "new"], "--format zip: must be one of hf, msgpack"),
        (["report", LONG], "File name too long"),
        (["report", "torn"], "metrics.jsonl, line 2: '{\"step\": 2, \"tr' is no JSON object: take"),
        (["report", "number"], "metrics.jsonl, line 1: '3' is no JSON object: take the line out"),
        (["sweep", "--sweep_config", "open.yaml"], "open.yaml: not valid YAML: line 3, column 1"),
        (["sweep", "--sweep_config", LONG], "File name too long"),
        (["data", "build", "corpus.txt", "--out", LONG], "File name too long"),
        (["data", "build", "odd.bin", "--out", "new", "--dtype", "nope"], "--dtype nope"),
        (["data", "append", "corpus.txt", "--out", "x", "--tokenizer", "t.json"], "leave --tokenizer out"),
        (["data", "build", "empty.txt", "--out", "new"], "empty.txt: nothing to build from: 1 file is empty: name "),
        (["data", "build", "noise", "--out", "new"], "nothing to build from: 1 file is not UTF-8 text: name text"),
        (["report", "runs/first", "--best_config", "b.yaml"], "runs/first is no study: name the folder of a sweep"),
        (["compare", "runs/first"], "`compare` needs RUNS, 2 words, and has 1. `roxxel-dist compare --help`"),
        (["completion", "fish"], "SHELL fish: must be one of bash, tcsh, zsh"),
        (["data", "info", LONG], "File name too long"),
        (["save", LONG], "File name too long"),
        (["launch", "local", "--nproc", "2", "--", "true"], "there is no option --nproc: did you mean --nprocs?"),
        (["launch", "local", "--grace", "long", "--", "true"], "--grace long: must be a number"),
        (["generate", "runs/frist"], "did you mean runs/first?"),
        (["report", "runs/frist"], "did you mean runs/first?"),
        (["eval", "runs/frist"], "did you mean runs/first?"),
        (["generate", "runs/first"], "If it is a run, train it until a checkpoint is saved. If it is an export"),
        (["generate", "studies/one"], "studies/one is a study: name the run of a trial, such as studies/one/trials/0"),
    ],
)  # fmt: skip
def test_one_line_and_code_2(words, message, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert main(words) == 2
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("roxxel-dist: ")]
    assert message in line
    assert not RAW.search(said), said


def test_a_config_of_python_names_the_field():
    with pytest.raises(TypeError, match=r"Config: there is no field 'learning_rate': did you mean 'lr'\?"):
        Config(learning_rate=3)
    with pytest.raises(TypeError, match="give fields by name"):
        Config({"dim": 3})
    with pytest.raises(AttributeError, match=r"Config: there is no field 'learning_rate': did you mean 'lr'\?"):
        Config().learning_rate = 3


def test_a_curriculum_wants_data_sets():
    with pytest.raises(TypeError, match=r"primary_streamer is 'data': it must be a data set, such as Roxxel\(PATH\)"):
        Curriculum("data", [{"steps": 1, "batch_size": 1, "seq_len": 2}])
