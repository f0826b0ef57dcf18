"""The corpus of a study: one process makes the shards, and the others wait for it, with a word and a limit."""

import subprocess
import sys

import pytest

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.trial import corpus

HOLDER = """
import sys
from pathlib import Path
from roxxel_dist.process.file_lock import take_lock
assert take_lock(Path(sys.argv[1])) is not None
print("held", flush=True)
sys.stdin.read()
"""


def test_who_makes_the_shards_is_named_and_waited_for_with_a_limit(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("one two three\n" * 50)
    data, config = tmp_path / "data", Config(tokenizer_type="byte")
    data.mkdir()
    monkeypatch.setattr(corpus, "SILENT_S", 0.1)
    monkeypatch.setattr(corpus, "LIMIT_S", 0.5)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(data / "byte.lock")], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        who = f"another process (pid {process.pid} on host "
        with pytest.raises(ValueError, match=r"makes these shards, and has written nothing for 0\.5 s") as error:
            corpus.make_shards(config, str(tmp_path / "text.txt"), data)
        assert str(error.value).startswith(f"{data / 'byte'}: {who}")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"roxxel-dist: waiting for {who}")
        assert line.endswith(f", which makes the shards {data / 'byte'}")
        process.stdin.close()
        process.wait()
    assert corpus.make_shards(config, str(tmp_path / "text.txt"), data) == str(data / "byte")
