"""A run in lm-evaluation-harness, with tasks that are files here: its numbers are those of `eval --tasks`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from roxxel_dist.cli import main

ROOT = Path(__file__).parent.parent.parent
INTERPRETER = Path(os.environ.get("ROXXEL_LM_EVAL_PYTHON") or ROOT / ".cache" / "lm_eval" / "bin" / "python")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not INTERPRETER.exists(), reason=f"no {INTERPRETER}: `make lm_eval` makes it"),
]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
QUESTIONS = [
    {"context": f"{a} {b}", "choices": [c, f"{a} {b}", "omega."], "answer": i % 3}
    for i, (a, b, c) in enumerate((a, b, c) for a in WORDS[:3] for b in WORDS[3:6] for c in WORDS[6:])
]
TEXTS = ["alpha beta gamma " * 5, "zeta"]
TASKS = {
    "greek": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "prose": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n", "eta"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


@pytest.mark.timeout(600)
def test_the_harness_gives_the_numbers_of_eval(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(WORDS[i * i % 7] for i in range(2000)))
    Path("tasks").mkdir()
    lines(Path("greek.jsonl"), QUESTIONS)
    # The harness puts a space between a question and a choice, which ours have themselves.
    lines(Path("tasks/greek.jsonl"), [{**one, "choices": [f" {c}" for c in one["choices"]]} for one in QUESTIONS])
    for path in ("tasks/prose.jsonl", "prose.jsonl", "written.jsonl"):
        lines(Path(path), [{"text": text} for text in TEXTS])
    for name, task in TASKS.items():
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}}}
        Path(f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test", **files, **task}))
    config = ["--dim", "16", "--num_blocks", "1", "--max_context", "32", "--tokenizer_type", "byte", "--sample", "off"]
    assert main(["train", "--data_path", "text.txt", "--run_dir", "run", "--max_steps", "20", *config]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "--tasks", "tasks/*.jsonl", "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)["tasks"]

    words = ["--model", "roxxel_dist", "--model_args", "run=run", "--tasks", ",".join(TASKS), "--include_path", "."]
    words += ["--batch_size", "4", "--output_path", "out", "--log_samples"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [INTERPRETER, "-m", "roxxel_dist.weights.lm_eval", "run", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [path] = Path("out").rglob("results_*.json")
    found = json.loads(path.read_text())["results"]
    assert {name: found["greek"][f"{name},none"] for name in ("acc", "acc_norm")} == wanted["greek"]
    assert found["prose"]["bits_per_byte,none"] == pytest.approx(wanted["prose"]["bits_per_byte"], rel=1e-5)
    [samples] = Path("out").rglob("samples_written_*.jsonl")
    texts = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    assert len(texts) == 2
    assert all(len(text) <= 12 and "eta" not in text for text in texts)
