"""The command line with real processes: what a newcomer types, and mistypes."""

import os
import shlex
import socket
import subprocess
import sys

import pytest
from commands import command, environment, make_corpus, run

CHILD = """
import os, sys
with open(sys.argv[1], "w") as file:
    print(file.fileno() > 2, os.path.basename(os.readlink("/proc/self/fd/0")), file=file)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    make_corpus(folder)
    (folder / "empty").mkdir()
    (folder / "short.txt").write_text("A very short text.\n")
    return folder


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("words", [["--help"], ["data", "--help"], ["launch", "-h"], ["train", "--help"]])
def test_help(work, words):
    result = run(*words, cwd=work)
    assert result.returncode == 0
    assert "usage" in result.stdout
    assert result.stderr == ""


def test_train_help_tells_every_field(work):
    text = run("train", "--help", cwd=work, COLUMNS="200").stdout
    for name in ("dim", "kv_heads", "weight_tying", "phases", "grad_accum", "warmup_steps", "run_dir", "resume"):
        assert f"--{name}" in text
    assert "Peak learning rate" in text


TRAIN = ["train", "--config", "tiny.yaml", "--data_path", "data", "--run_dir", "new"]
LAUNCH = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 2, "--", *TRAIN]
MISTAKES = [
    (["tarin"], "there is no command 'tarin': did you mean 'train'?"),
    (["launch", "slrum"], "there is no command 'launch slrum'"),
    (["batch", "nowhere", "--step", 1], "nowhere: cannot be read"),
    (["batch", "tiny.yaml", "--step", 1], "name them with --data_path"),
    (["sweep"], "what shall be searched? name a file with --sweep_config, or a study with --study"),
    (["launch", "ssh", "--", "train"], "give --hosts a,b,c or --hostfile FILE"),
    (["launch", "slurm", "--nodes", 0, "--", "train"], "--nodes 0: must be at least 1"),
    ([*TRAIN, "--bath_size", 3], "--batch_size"),
    ([*TRAIN, "--dim", "wide"], "wide"),
    ([*TRAIN, "--dim", 33], "n_heads x head_size must be dim, and 4 x 8 is not 33"),
    (["train", "--data_path", "data", "--dim", 33], "no multiple of kv_heads (1) cuts it into heads of an even size"),
    ([*TRAIN, "--config", "none.yaml"], "none.yaml: cannot be read"),
    ([*TRAIN, "--data_path", "nowhere"], "nowhere"),
    ([*TRAIN, "--data_path", "nowhere*.rox"], "nowhere"),
    ([*TRAIN, "--data_path", "empty"], "empty"),
    ([*TRAIN, "--data_path", "short.txt", "--vocab_size", 300], "use a smaller batch_size or seq_len, or more text"),
    ([*TRAIN, "--grad_accum", 3], "batch_size is 8, which does not divide by grad_accum (3)"),
    ([*TRAIN, "--max_context", 32], "seq_len is 65, and the model reads at most max_context + 1 = 33"),
    ([*TRAIN, "--vocab_size", 100], "vocab_size is 100, but the data has"),
    ([*TRAIN, "--phases", "[{steps: 1, batch_size: 8}]"], "batch_size and seq_len must be given"),
    ([*TRAIN, "--run_dir", "short.txt"], "run_dir is short.txt, a file: name a folder"),
    (["train", "--run_dir", "new"], "no data: name a text file, a folder or shards with --data_path"),
    (["generate", "data"], "data is not a run directory: it has no config.yaml"),
    (["data", "build", "nowhere", "--out", "new"], "nowhere"),
    (["data", "build", "empty", "--out", "new"], "empty"),
    (["data", "build", "short.txt", "--out", "new", "--tokenizer", "worpiece"], "worpiece"),
    (["data", "info", "nowhere"], "nowhere"),
    (LAUNCH[:6], "command"),
    ([*LAUNCH[:3], 0, *LAUNCH[4:]], "nprocs"),
    ([*LAUNCH, "--bath_size", 3], "--batch_size"),
    ([*LAUNCH, "--data_path", "nowhere"], "nowhere"),
    ([*LAUNCH, "--phases", "[{steps: 1, batch_size: 6, seq_len: 33}]"], "use a multiple of 4"),
    (["launch", "local", "--max-restarts", -1, *LAUNCH[2:]], "--max-restarts -1: must be 0 (none) or more"),
    (["launch", "local", "--nprocs", 3, "--gpus-per-host", 4, "--", "true"], "--gpus-per-host 4 does not divide by"),
    (["launch", "local", "--env", "9=x", "--", "true"], "--env: '9' is no variable: write NAME=VALUE"),
    (["launch", "local", "--env", "ROXXEL_ATTEMPT=1", "--", "true"], "the launcher sets this variable itself"),
    (["launch", "local", "--env-from", "nowhere", "--", "true"], "--env-from nowhere: cannot be read"),
    (["launch", "local", "--json", "--", "true"], "give it with --dry-run"),
    (["launch", "local", "--", "python", "nowhere.py"], "nowhere.py"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(map(str, words))[-60:] for words, _ in MISTAKES])
def test_a_mistake_is_one_message_and_exit_2(work, words, message):
    before = tree(work)
    result = run(*words, cwd=work)
    text = result.stdout + result.stderr
    assert result.returncode == 2, text
    assert message in text
    assert text.count(message.split(":")[0]) <= 3, text
    assert "Traceback" not in text
    assert tree(work) == before, "something half-written was left"


def test_a_port_in_use(work):
    before = tree(work)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("launch", "local", "--nprocs", 2, "--port", port, "--", *TRAIN, cwd=work)
    assert result.returncode == 69
    assert f"{port}" in result.stderr
    assert "Traceback" not in result.stderr
    assert tree(work) == before


def test_an_existing_run_directory(work):
    (work / "old").mkdir()
    (work / "old" / "config.yaml").write_text("dim: 32\n")
    before = tree(work)
    for words in (TRAIN, LAUNCH):
        result = run(*words, "--run_dir", "old", cwd=work)
        text = result.stdout + result.stderr
        assert result.returncode == 2
        assert "old holds a run already: continue it with --resume, or name another run_dir" in text
        assert "Traceback" not in text
    assert tree(work) == before


def test_a_folder_that_cannot_be_written(work):
    if os.geteuid() == 0:
        target = "/proc/new"  # root may write everywhere but here
    else:
        (work / "locked").mkdir(mode=0o500)
        target = work / "locked" / "new"
    result = run(*TRAIN, "--run_dir", target, cwd=work)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_what_a_step_reads(work):
    words = ["batch", "tiny.yaml", "--data_path", "data", "--step"]
    first, last = run(*words, 1, cwd=work), run(*words, 22, "--text", cwd=work)
    assert (first.returncode, last.returncode) == (0, 0), first.stderr + last.stderr
    lines = first.stdout.splitlines()
    assert lines[0] == "step 1 of 22, phase 1 of 2: 8 rows x 33 tokens"
    assert len(lines) == 9
    assert all("self token" in line and "shard_00000.rox, document" in line for line in lines[1:])
    assert "step 22 of 22, phase 2 of 2: 4 rows x 65 tokens" in last.stdout
    beyond = run(*words, 23, cwd=work)
    assert beyond.returncode == 2
    assert "step 23: the plan has steps 1 to 22" in beyond.stderr


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_training_on_a_text_file(work, kind):
    """No shards, no config file, one process: text in, text out."""
    text = work / f"{kind}.txt"
    text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(4000)))
    shape = ["--dim", 32, "--num_blocks", 1, "--max_context", 32, "--batch_size", 8, "--vocab_size", 300]
    more = [
        "--max_steps",
        6,
        "--eval_iters",
        1,
        "--lr",
        "1e-2",
        "--sample",
        "on",
        "--weight_tying",
        "False",
        "--dropout-rate",
        0.1,
    ]
    result = run("train", "--data_path", text, "--run_dir", kind, "--tokenizer_type", kind, *shape, *more, cwd=work)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a sample of what it writes now" in result.stdout
    assert "weight_tying: false" in (work / kind / "config.yaml").read_text()
    assert (work / kind / "logs" / "rank-0.log").exists()
    again = run("generate", kind, "--prompt", "12 and ", "--temperature", 0, "--max_new_tokens", 5, cwd=work)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("12 and ")
    strange = run("generate", kind, "--prompt", "π", "--max_new_tokens", 5, cwd=work)
    if kind == "char":
        assert strange.returncode == 2
        assert "π" in strange.stderr
        assert "Traceback" not in strange.stderr
    else:
        assert strange.stdout.startswith("π")


def test_closed_streams(tmp_path):
    """Started as some daemons start programs: what it opens, and what its children have, is not taken for a stream."""
    child = shlex.join(command("launch", "local", "--nprocs", 1, "--", sys.executable, "-c", CHILD, tmp_path / "told"))
    closed = subprocess.run(["sh", "-c", f"exec {child} <&- >&- 2>&-"], cwd=tmp_path, env=environment(), check=False)
    assert closed.returncode == 0
    assert (tmp_path / "told").read_text() == "True null\n"
    said = f"exec {shlex.join(command('--version'))} >&-"
    done = subprocess.run(["sh", "-c", said], cwd=tmp_path, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_reader_that_has_left(tmp_path):
    """Not 0: for `a | head && b` what was cut is not done."""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        command("--help"), cwd=tmp_path, env=environment(), stdout=writes, stderr=subprocess.PIPE, check=False
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("inside", [True, False])
def test_a_name_that_the_locale_cannot_read(tmp_path, inside):
    folder = tmp_path / "Läufe"
    folder.mkdir()
    words = ("plan", "configs/x.yaml") if inside else ("train", "--run_dir", folder / "run")
    more = {"PYTHONUTF8": "0", "LC_ALL": "C", "LANG": "C"}
    done = run(*words, cwd=folder if inside else tmp_path, **more)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "set PYTHONUTF8=1" in done.stderr
    assert run("--help", cwd=tmp_path, **more).returncode == 0


def test_output_on_a_full_disk(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("--help"), cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"roxxel-dist: the output cannot be written: No space left on device\n"
