"""A run of two processes with two devices each, evaluated on as many, and on fewer."""

import json

import pytest
from commands import launched, make_corpus, rows, run

TASKS = {
    "code": [
        {"context": "import " + "json, " * n, "choices": ["os", "while", "import"], "answer": n % 3} for n in range(7)
    ],
    "prose": [{"text": "import json\n" * n} for n in (1, 2, 30)],
}


@pytest.mark.long  # the guide does it on two processes too, with fewer questions
def test_two_processes_give_the_losses_of_the_log(tmp_path):
    make_corpus(tmp_path)
    for name, lines in TASKS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["--num_blocks", 1, "--max_steps", 6, "--eval_tasks", "code.jsonl", "prose.jsonl"]
    trained = run(*launched(2, 2, "run", *words), cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    logged = {
        name: value
        for name, value in rows(tmp_path / "run")[6].items()
        if name.endswith(("val_loss", "eval_loss", "val_bal"))
    }
    assert len(logged) == 3
    of_tasks = {name: value for name, value in rows(tmp_path / "run")[6].items() if name.startswith("task/")}
    words = ["eval", "run@6", "--json"]
    for processes, devices in ((2, 2), (1, 1)):
        ranks = ["launch", "local", "--nprocs", processes, "--devices-per-proc", devices, "--max-restarts", 0, "--"]
        result = run(*ranks, *words, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        said = [line[line.index("{") :] for line in result.stdout.splitlines() if '"val_loss"' in line]
        assert len(said) == 1  # rank 0 alone
        found = json.loads(said[0])
        assert found["logged_val_loss"] == logged["val_loss"]
        scores = {f"task/{task}/{name}": value for task in TASKS for name, value in found["tasks"][task].items()}
        assert scores == (of_tasks if devices == 2 else pytest.approx(of_tasks, rel=1e-5))
        if devices == 2:
            assert {name: found[name] for name in logged} == logged
            assert found["difference"] == 0
        else:  # other devices may give other bits
            assert abs(found["difference"]) < 1e-4
    missing = run(*ranks, "eval", "run@3", cwd=tmp_path)
    assert missing.returncode == 2
    assert "run has no checkpoint of step 3; nearest is 1 or 5, kept are 1, 5, 6" in missing.stdout + missing.stderr
