"""The table of failures in the documentation is what the launcher does, and the other pages link to it."""

import re
import signal
from pathlib import Path

import pytest
from tables import one_test

from roxxel_dist.launcher.policy.outcome import (
    INFRASTRUCTURE,
    PREEMPTED,
    AttemptResult,
    Cause,
    RankExit,
    classify,
)
from roxxel_dist.process.exit_codes import EXIT_GIVEN_UP
from roxxel_dist.process.interrupt import BATCH_JOB, kills

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "concepts" / "failures.md"
LINK = "failures.md#table-of-failures"
CLASSES = {
    "Success": Cause.DONE,
    "Restart": Cause.INFRASTRUCTURE,
    "Free restart": Cause.PREEMPTED,
    "Program error": Cause.USER,
    "Command error": Cause.USER,
}
"""By the words of a result: those with which a sentence begins."""
OF_THE_LAUNCHER = {69, 124, EXIT_GIVEN_UP, 137}
"""Codes that a job has by another way than the end of a rank."""


def table() -> list[list[str]]:
    """The cells of each row."""
    lines = PAGE.read_text().partition("## Table of failures")[2].partition("\nNotes:")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def senders() -> list[list[str]]:
    """The cells of each row about who asks a job to end."""
    lines = PAGE.read_text().partition("## Who asks a job to end")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def ended(code: int) -> AttemptResult:
    end = RankExit(rank=0, host="h", pid=1, code=code, killed_by_us=False, step=3)
    return AttemptResult(exits=[end])


def rows_of(kind: str) -> list[list[str]]:
    return [row for row in table() if re.search(rf"(?:^|\. ){kind}\b", row[1])]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_code_of_the_table_has_the_class_of_the_table(kind: str) -> None:
    rows = rows_of(kind)
    assert rows
    for row in rows:
        for code in map(int, re.findall(r"(?<![+\d] )\b\d+\b", row[2].replace("128 + s", ""))):
            if code not in OF_THE_LAUNCHER:
                assert classify(ended(code)) is CLASSES[kind], row
        if "128 + s" in row[2]:
            for name in re.findall(r"SIG[A-Z0-9]+", row[0]):
                assert classify(ended(-signal.Signals[name])) is CLASSES[kind], (name, row)


@pytest.mark.parametrize(("codes", "kind"), [(INFRASTRUCTURE, "Restart"), (PREEMPTED, "Free restart")])
def test_each_code_that_leads_to_a_restart_is_in_the_table(codes: set[int], kind: str) -> None:
    text = " ".join(f"{row[0]} {row[2]}" for row in rows_of(kind))
    missing = [
        code
        for code in codes
        if not re.search(rf"\b{code}\b", text) and (code < 128 or signal.Signals(code - 128).name not in text)
    ]
    assert not missing


def test_a_row_has_all_its_cells_and_a_person_reads_what_follows() -> None:
    for row in table():
        assert len(row) == 4, row
        assert row[0], row
        assert row[1], row


HOWTOS = [f"howto/{name}" for name in ("launching", "ssh", "slurm", "ray", "kubernetes")]


@one_test("page", [*HOWTOS, "concepts/guarantees", "reference/exit-codes"])
def test_other_pages_link_to_the_table(page: str) -> None:
    assert LINK in (DOCS / f"{page}.md").read_text()


def test_no_other_page_has_a_row_about_the_end_of_a_rank_or_an_agent() -> None:
    repeated = re.compile(r"^\| (?:A rank|An agent|The agent|A hang)\b[^|]*\|.*\b[Rr]estart", re.MULTILINE)
    pages = [page for page in DOCS.rglob("*.md") if page != PAGE]
    assert {page.name: found for page in pages if (found := repeated.findall(page.read_text()))} == {}


@one_test("row", senders())
def test_the_signals_of_a_sender_are_one_request(row: list[str]) -> None:
    """At the times of the page, and late by a second, as on a busy machine."""
    sender, signals, _ = row
    in_batch_job = sender.startswith(("SLURM", "LSF", "PBS", "Grid Engine", "Flux"))
    numbers = [signal.Signals[name] for name in re.findall(r"SIG[A-Z0-9]+", signals)]
    apart = re.search(r"(\d+) s apart", signals)
    assert numbers or signals.startswith("as systemd"), row
    assert len(numbers) < 2 or apart or "together" in signals or "GraceTime" in signals, "when does the second come?"
    gap = float(apart[1]) if apart else 30.0 if "GraceTime" in signals else 0.0
    for late in (0.0, 1.0):
        sent = [(number, place * (gap + late)) for place, number in enumerate(numbers)]
        for place, (number, when) in enumerate(sent):
            assert not kills(number, sent[:place], when, batch_job=in_batch_job), (row, number)


@one_test("sender", ["systemd", "timeout", "supervisord", "SLURM", "LSF", "PBS", "Kubernetes", "docker", "spot"])
def test_each_kind_of_sender_has_a_row_with_its_time(sender: str) -> None:
    rows = [row for row in senders() if sender in row[0]]
    assert rows
    assert all(len(row) == 3 and row[2] for row in rows)


def test_a_batch_system_of_the_page_is_known_by_a_variable() -> None:
    known = {
        "SLURM": "SLURM_JOB_ID",
        "LSF": "LSB_JOBID",
        "PBS": "PBS_JOBID",
        "Grid Engine": "SGE_O_HOST",
        "Flux": "FLUX_JOB_ID",
    }
    assert {*known.values()} <= {*BATCH_JOB}
    assert all(any(row[0].startswith(name) for row in senders()) for name in known)
