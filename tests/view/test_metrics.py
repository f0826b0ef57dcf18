"""`top --metrics`: what Prometheus reads, by the official parser, and who can read it."""

import contextlib
import http.client
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from commands import command, environment
from made_rows import add, made_run
from made_study import made_study
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from roxxel_dist.cli import main
from roxxel_dist.launcher.control.record import JobRecord, RankProcess, Restart, this_process
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.view.items import Item, JobReader, items_of
from roxxel_dist.view.run import RunReader
from roxxel_dist.view.web.metrics_server import MetricsServer, Scrapes, exposition, token_of

TOKEN = "a-token-of-some-length"


def samples(text):
    """{(name, labels): value} of a text that the official parser takes; its help and types are read too."""
    assert text.endswith("\n# EOF\n") or text == "# EOF\n"
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert all(family.unit for family in families if family.name.endswith(("_seconds", "_ratio")))
    assert not any({"job", "instance"} & s.labels.keys() for family in families for s in family.samples), "Prometheus'"
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def one(found, name, **labels):
    """The value of the only sample of this name with these labels."""
    (value,) = [value for (other, own), value in found.items() if other == name and own >= labels.items()]
    return value


def record(folder, **more):
    """The record of a job of two ranks, of which one waits."""
    moved = time.time() - 30
    ranks = tuple(
        RankProcess(rank=rank, host=f"h{rank}", pid=1, step=7 - rank, activity="step", changed_at=moved)
        for rank in (0, 1)
    )
    return JobRecord(
        run_id="night",
        controller=this_process(),
        hosts=("h0", "h1"),
        nprocs=2,
        command="train",
        log_dir=str(folder / "logs"),
        begun=1.0,
        updated=1.0,
        grace=30.0,
        **{"state": "running", "attempt": 2, "step": 7, "ranks": ranks, "ran": True, **more},
    )


def test_a_run_with_its_job(tmp_path):
    run = made_run(tmp_path / "one", 20)
    last = Restart(attempt=30, time=1.0, step=5, cause="killed")
    found = samples(exposition([RunReader(run).read(record(run, step=22, restarts=(last,)))]))
    assert one(found, "roxxel_step") == 21, "the step that is entered is not done"
    assert one(found, "roxxel_train_loss", run_id="night") == pytest.approx(1 + 4 / math.sqrt(20), abs=1e-6)
    assert one(found, "roxxel_tokens_per_second", run=str(run)) == 1000
    assert one(found, "roxxel_restarts_total") == 31, "the record keeps 20 of them"
    assert one(found, "roxxel_ranks") == 2
    assert one(found, "roxxel_rank_step", rank="1", host="h1") == 6
    assert one(found, "roxxel_rank_wait_seconds", rank="0") >= 30
    assert one(found, "roxxel_logged", metric="lr") == 0.001
    assert one(found, "roxxel_run_info", path=str(run)) == 1


def test_the_time_of_a_real_run(trained):
    found = samples(exposition([RunReader(trained).read()]))
    assert 0 < one(found, "roxxel_goodput_ratio") < 1
    assert one(found, "roxxel_spent_seconds", activity="compiling") > 0
    assert one(found, "roxxel_checkpoint_step") == one(found, "roxxel_step") == one(found, "roxxel_last_step")
    assert one(found, "roxxel_active") == 0
    assert not [name for name, _ in found if name.startswith(("roxxel_restarts", "roxxel_rank"))]


def test_a_job_without_a_run_and_a_study(tmp_path):
    states = [
        JobReader(record(tmp_path)).read(),
        *(item.reader.read() for item in items_of([str(made_study(tmp_path))])),
    ]
    found = samples(exposition(states))
    assert one(found, "roxxel_step", run_id="night") == 7
    assert one(found, "roxxel_restarts_total") == 0
    trials = {labels["state"]: value for name, labels, value in rows(found) if name == "roxxel_study_trials"}
    assert sum(trials.values()) == 24
    assert trials["failed"] == 2
    assert one(found, "roxxel_study_best") > 0


def rows(found):
    return [(name, dict(labels), value) for (name, labels), value in found.items()]


@pytest.mark.parametrize("name", ['a"b', "back\\slash", "two\nlines", "ü😀", "\udce9", "{}=,", "\\n", ""])
def test_names_of_every_kind(tmp_path, name):
    run = made_run(tmp_path / "one", 3, name="x")
    add(run, [4], **{"val_loss/" + (name if name.isprintable() else "y"): float("nan"), "grad": float("inf")})
    state = RunReader(run, name).read()
    found = rows(samples(exposition([state])))
    shown = name.encode(errors="backslashreplace").decode() or str(run)
    assert {labels["run"] for _, labels, _ in found} == {shown}
    values = {labels["metric"]: value for family, labels, value in found if family == "roxxel_logged"}
    assert values["grad"] == math.inf
    assert math.isnan(next(value for metric, value in values.items() if metric.startswith("val_loss/")))


def test_nothing_at_all():
    assert samples(exposition([])) == {}


@contextlib.contextmanager
def served(scrapes, token=TOKEN):
    with MetricsServer(scrapes, 0, token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(60)


def ask(port, path="/metrics", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


BEARER = {"Authorization": f"Bearer {TOKEN}"}
# (the status, the path, the headers)
REQUESTS = [
    (200, "/metrics", BEARER),
    (200, "/metrics?x=1", BEARER | {"Accept": "text/plain"}),
    (200, "/metrics", {"authorization": f"bearer  {TOKEN} "}),
    (401, "/metrics", {}),
    (401, f"/metrics?token={TOKEN}", {}),
    (401, "/metrics", {"Authorization": TOKEN}),
    (401, "/metrics", {"Authorization": f"Basic {TOKEN}"}),
    (401, "/metrics", {"Authorization": f"Bearer {TOKEN}x"}),
    (401, "/metrics", {"Authorization": "Bearer \xe4"}),
    (401, "/metrics", {"Authorization": "Bearer"}),
    (404, "/", BEARER),
    (404, "/events", BEARER),
    (421, "/metrics", BEARER | {"Host": "attacker.example"}),
]


def test_who_can_read_it(tmp_path):
    made_run(tmp_path / "secretrun")
    with served(Scrapes(lambda: items_of([str(tmp_path)]), all_items=True)) as server:
        for status, path, headers in REQUESTS:
            got, answered, text = ask(server.port, path, **headers)
            assert got == status, (path, headers)
            assert ("secretrun" in text) == (status == 200)
            assert TOKEN not in text
            if status == 200:
                assert answered["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
                assert samples(text)
                assert ask(server.port, path, "HEAD", **headers)[::2] == (200, "")
            if status == 401:
                assert answered["WWW-Authenticate"] == "Bearer"


def test_without_names_what_has_ended_before_is_left_out(tmp_path):
    """A run that ends is shown on, for its last numbers; one that had ended is not, and nothing to see is no error."""
    made_run(tmp_path / "old")
    job = record(tmp_path)
    (tmp_path / "logs").mkdir()
    living = [Item(name="night", reader=JobReader(job))]
    found = [*living, *items_of([str(tmp_path / "old")])]
    scrapes = Scrapes(lambda: found, all_items=False)
    assert {labels["run"] for _, labels, _ in rows(samples(scrapes.text()))} == {str(tmp_path)}
    scrapes._find, scrapes._until = lambda: list(map(os.stat, ["gone"])), 0.0  # as a folder between two looks
    assert {labels["run"] for _, labels, _ in rows(samples(scrapes.text()))} == {str(tmp_path)}

    def nothing():
        raise UserError("there is none")

    assert samples(Scrapes(nothing, all_items=False).text()) == {}


def test_the_token_file_stays_and_is_of_this_user_alone(tmp_path):
    path = tmp_path / "new" / "token"
    token = token_of(path)
    assert token == token_of(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(f"  {'x' * 20}\n\n")
    assert token_of(path) == "x" * 20
    for wrong in ("", "short", "two words of a length", "ä" * 30):
        path.write_text(wrong)
        with pytest.raises(UserError, match=re.escape(str(path))):
            token_of(path)


def test_it_is_served_by_the_command_until_ctrl_c(tmp_path):
    made_run(tmp_path / "runs" / "one")
    env = environment(XDG_STATE_HOME=str(tmp_path / "state"))
    words = command("top", "--metrics", "0", "runs/one")
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, file = (process.stdout.readline().split(": ", 1)[1].strip() for _ in range(2))
        port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/metrics", address)[1])
        assert file == str(tmp_path / "state" / "roxxel-dist" / "metrics-token")
        _, _, text = ask(port, Authorization=f"Bearer {Path(file).read_text().strip()}")
        assert one(samples(text), "roxxel_step", run="runs/one") == 20
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, -signal.SIGINT, 130)


def test_what_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = str(made_run(tmp_path / "one"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = str(other.getsockname()[1])
        cases = [
            (["--metrics", busy, run], "use 0 for a free one"),
            (["--metrics", "70000", run], "use 0 for a free one"),
            (["--metrics", "0", "--once", run], "leave --once and --json out"),
            (["--metrics", "0", "--web", run], "use two commands"),
            (["--metrics", "0", "--host", "0.0.0.0", run], "listens at this machine alone"),
            (["--metrics", "0", str(tmp_path / "none")], "none"),
            (["--metrics", "0", "--token-file", os.devnull, run], "one word of 16 characters"),
            (["--token-file", "x", run], "is for --metrics PORT"),
        ]
        for words, why in cases:
            assert main(["top", *words]) == 2, words
            assert why in capsys.readouterr().err
