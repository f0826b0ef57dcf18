"""The command line: what a newcomer types, and mistypes."""

import os
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from commands import command, environment, make_corpus, run
from tables import one_test

from roxxel_dist.cli import main

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
    assert tree(folder) == MADE
    return folder


MADE = ["data", "data/build.json", "data/shard_00000.rox", "data/tokenizer.json", "empty", "short.txt", "tiny.yaml"]


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def said(capfd, *words):
    """(exit code, stdout, stderr) of a command that is run here."""
    capfd.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as left:  # the parser of the words speaks for itself
        code = left.code
    return code, *capfd.readouterr()


@pytest.mark.parametrize("words", [["--help"], ["data", "--help"], ["launch", "-h"], ["batch", "--help"]])
def test_help(words, capfd):
    code, out, err = said(capfd, *words)
    assert (code, err) == (0, "")
    assert "usage" in out


def test_train_help_tells_every_field(work, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    code, text, err = said(capfd, "train", "--help")
    assert (code, err) == (0, "")
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
    (["sweep"], "nothing to search: name a file with --sweep_config, or a study with --study"),
    (["launch", "ssh", "--", "train"], "give --hosts a,b,c or --hostfile FILE"),
    (["launch", "slurm", "--nodes", 0, "--", "train"], "--nodes 0: must be at least 1"),
    ([*TRAIN, "--bath_size", 3], "--batch_size"),
    ([*TRAIN, "--dim", "wide"], "wide"),
    ([*TRAIN, "--dim", 33], "n_heads x head_size must be dim, and 4 x 8 is not 33"),
    (["train", "--data_path", "data", "--dim", 33], "no multiple of kv_heads (1) cuts it into heads of an even size"),
    ([*TRAIN, "--config", "none.yaml"], "none.yaml: cannot be read"),
    ([*TRAIN, "--data_path", "nowhere*.rox"], "nowhere"),
    ([*TRAIN, "--data_path", "empty"], "empty"),
    ([*TRAIN, "--data_path", "short.txt", "--vocab_size", 300], "does not hold one such row"),
    ([*TRAIN, "--grad_accum", 3], "batch_size is 8, which is not a multiple of grad_accum (3)"),
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
    ([*LAUNCH, "--run_dir", "short.txt"], "run_dir is short.txt, a file: name a folder"),
    ([*LAUNCH[:3], 0, *LAUNCH[4:]], "nprocs"),
    (["launch", "local", "--max-restarts", -1, *LAUNCH[2:]], "--max-restarts -1: must be 0 (none) or more"),
    (["launch", "local", "--nprocs", 3, "--gpus-per-host", 4, "--", "true"], "--gpus-per-host 4 is not a multiple of"),
    (["launch", "local", "--env", "9=x", "--", "true"], "--env: '9' is no variable: write NAME=VALUE"),
    (["launch", "local", "--env", "ROXXEL_ATTEMPT=1", "--", "true"], "the launcher sets this variable itself"),
    (["launch", "local", "--env-from", "nowhere", "--", "true"], "--env-from nowhere: cannot be read"),
    (["launch", "local", "--json", "--", "true"], "give it with --dry-run"),
]


def named(words):
    return " ".join(map(str, words))[-60:] if isinstance(words, list) else ""


IN_PROCESSES = [
    ([*TRAIN, "--data_path", "nowhere"], "nowhere"),
    pytest.param([*LAUNCH, "--bath_size", 3], "--batch_size", marks=pytest.mark.long),
    pytest.param([*LAUNCH, "--data_path", "nowhere"], "nowhere", marks=pytest.mark.long),
    pytest.param(
        *([*LAUNCH, "--phases", "[{steps: 1, batch_size: 6, seq_len: 33}]", "--grad_accum", 4], "use a multiple of 4"),
        marks=pytest.mark.long,
    ),
    (["launch", "local", "--", "python", "nowhere.py"], "nowhere.py"),
]


@one_test(("words", "message"), MISTAKES)
def test_a_mistake_is_one_message_and_code_2(work, words, message, monkeypatch, capfd):
    monkeypatch.chdir(work)
    check(work, message, *said(capfd, *words))


@pytest.mark.parametrize(("words", "message"), IN_PROCESSES, ids=named)
def test_a_mistake_that_processes_find_is_one_message_and_exit_2(work, words, message):
    result = run(*words, cwd=work)
    for logs in {log.parent for log in work.rglob("rank-*.log")}:  # of a launch they stay, and nothing else
        assert words[0] == "launch"
        shutil.rmtree(logs)
        for folder in logs.relative_to(work).parents[:-1]:
            (work / folder).rmdir()
    check(work, message, result.returncode, result.stdout, result.stderr)


def check(work, message, code, out, err):
    text = out + err
    assert code == 2, text
    assert message in text
    assert text.count(message.split(":")[0]) <= 3, text
    assert "Traceback" not in text
    assert tree(work) == MADE, "something half-written was left"


def test_a_port_in_use(work):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("launch", "local", "--nprocs", 2, "--port", port, "--", *TRAIN, cwd=work)
    assert result.returncode == 69
    assert f"{port}" in result.stderr
    assert "Traceback" not in result.stderr
    assert tree(work) == MADE


LAUNCH = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 1, "--"]


@pytest.mark.parametrize("words", [[], pytest.param(LAUNCH, marks=pytest.mark.long)], ids=["train", "launch"])
def test_an_existing_run_directory(work, tmp_path, monkeypatch, capfd, words):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("dim: 32\n")
    (tmp_path / "old" / "training_cursor.json").write_text('{"step": 1, "last_step": 5, "finished": false}')
    monkeypatch.chdir(work)
    code, *texts = said(capfd, *words, *TRAIN, "--run_dir", tmp_path / "old")
    text = "".join(texts)
    assert code == 2, text
    assert "old holds a run already: continue it with --resume, or name another run_dir" in text
    assert "Traceback" not in text
    assert [path for path in tree(tmp_path) if not path.startswith("old/logs")] == [
        "old",
        "old/config.yaml",
        "old/training_cursor.json",
    ]


def test_a_folder_that_cannot_be_written(work, tmp_path, monkeypatch, capfd):
    if os.geteuid() == 0:
        target = "/proc/new"  # root may write everywhere but here
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        target = tmp_path / "locked" / "new"
    monkeypatch.chdir(work)
    code, _, err = said(capfd, *TRAIN, "--run_dir", target)
    assert code == 2, err
    assert "cannot be written" in err


def test_what_a_step_reads(work, monkeypatch, capfd):
    monkeypatch.chdir(work)
    words = ["batch", "tiny.yaml", "--data_path", "data", "--step"]
    code, first, _ = said(capfd, *words, 1)
    assert code == 0
    lines = first.splitlines()
    assert lines[0] == "step 1 of 22, phase 1 of 2: 8 rows x 33 tokens"
    assert len(lines) == 9
    assert all("self token" in line and "shard_00000.rox, document" in line for line in lines[1:])
    assert "step 22 of 22, phase 2 of 2: 4 rows x 65 tokens" in said(capfd, *words, 22, "--text")[1]
    code, _, err = said(capfd, *words, 23)
    assert code == 2
    assert "step 23: the plan has steps 1 to 22" in err


@pytest.mark.long
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_training_on_a_text_file(tmp_path, monkeypatch, kind, capfd):
    """No shards, no config file, one process: text in, text out."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / f"{kind}.txt"
    text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(4000)))
    shape = ["--dim", 16, "--num_blocks", 1, "--n_heads", 2, "--max_context", 16, "--batch_size", 8, "--n_devices", 1]
    more = ["--vocab_size", 257, "--max_steps", 6, "--eval_iters", 1, "--lr", "1e-2", "--sample", "on"]
    words = ["--tokenizer_type", kind]
    code, out, err = said(capfd, "train", "--data_path", text, "--run_dir", kind, *shape, *more, *words)
    assert code == 0, out + err
    assert "a sample of the text that the model generates" in out
    assert "lr: 0.01" in (tmp_path / kind / "config.yaml").read_text()
    assert (tmp_path / kind / "logs" / "rank-0.log").exists()
    words = ["generate", kind, "--temperature", 0, "--max_new_tokens", 5, "--prompt"]
    assert said(capfd, *words, "12 and ")[1].startswith("12 and ")
    code, out, err = said(capfd, *words, "π")
    if kind == "char":
        assert (code, out) == (2, "")
        assert "π" in err
    else:
        assert out.startswith("π")


def test_closed_streams(tmp_path):
    """Started as some daemons start programs: what it opens, and what its children have, is not taken for a stream."""
    child = shlex.join(command("launch", "local", "--nprocs", 1, "--", sys.executable, "-c", CHILD, tmp_path / "told"))
    closed = subprocess.run(["sh", "-c", f"exec {child} <&- >&- 2>&-"], cwd=tmp_path, env=environment(), check=False)
    assert closed.returncode == 0
    assert (tmp_path / "told").read_text() == "True null\n"
    version = f"exec {shlex.join(command('--version'))} >&-"
    done = subprocess.run(["sh", "-c", version], cwd=tmp_path, env=environment(), capture_output=True, check=False)
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


@pytest.mark.parametrize("words", [("generate", "run", "--prompt"), ("train", "--data_path"), ("train", "--run_dir")])
def test_bytes_that_are_no_utf_8(tmp_path, words):
    """Of a terminal or a script in another encoding, where the locale is right."""
    line = [*command(*words), b"na\xefve"]
    env = environment(PYTHONUTF8="0", LC_ALL="C.UTF-8")
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "roxxel-dist: 'na\\udcefve' is no text in this locale (utf-8), and a run is written in UTF-8: write the text "
        "in UTF-8 too, and rename a file or folder whose name is not\n"
    )


def test_a_machine_that_starts_no_thread(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    assert main(["ps"]) == 0
    assert main(["launch", "local", "--nprocs", "1", "--", "true"]) == 1
    assert "no thread can be started: you have as many processes here as are allowed" in capsys.readouterr().err


GONE = "the working directory is gone (deleted, or replaced by a new one of its name): change to one that is there"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("launch", "local", "--", "true"), 2),
        (("launch", "ssh", "--hosts", "a", "--dry-run", "--", "true"), 2),
        (("train", "--data_path", "x"), 2),
        (("ps",), 0),
        (("stop", "x"), 2),
        (("launch", "--help"), 0),
    ],
)
def test_a_working_directory_that_is_gone(tmp_path, monkeypatch, capsys, words, code):
    (tmp_path / "gone").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(list(words)) == code
    said = capsys.readouterr().err
    assert (GONE in said) == (code == 2 and words[0] != "stop")
    assert "No such file" not in said


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk(tmp_path, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("--help"),
            cwd=tmp_path,
            env=environment(PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b"roxxel-dist: the output cannot be written: No space left on device\n"
