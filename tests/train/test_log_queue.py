import threading

import pytest

from roxxel_dist.train.log import base as log_queue
from roxxel_dist.train.log.base import LogQueue, TrackerError

ROWS = [{"step": s, "train_loss": 1 / s} for s in (1, 10, 20)]


class Memory:
    def __init__(self):
        self.seen, self.closed = [], False

    def row(self, row):
        self.seen.append(row)

    def text(self, text):
        self.seen.append(text)

    def rewind(self, step):
        self.seen.append(("rewind", step))

    def crash(self, text):
        self.seen.append(text)

    def close(self):
        self.closed = True


class Durable(Memory):
    durable = True


class Display(Memory):
    def __init__(self):
        super().__init__()
        self.statuses, self.shown = [], threading.Event()

    def status(self, record):
        self.statuses.append(record["step"])
        self.shown.set()


class Broken:
    def row(self, row):
        raise OSError("disk full")

    def close(self):
        raise AssertionError("it failed and is left alone")


class Stuck:
    """As a tracker whose server never answers."""

    def __init__(self):
        self.inside, self.free, self.rows = threading.Event(), threading.Event(), []

    def row(self, row):
        self.inside.set()
        self.free.wait()
        self.rows.append(row["step"])

    def close(self):
        pass


class StuckDisplay(Stuck):
    def __init__(self):
        super().__init__()
        self.texts = []

    def text(self, text):
        self.texts.append(text)


@pytest.fixture
def stuck():
    tracker = Stuck()
    yield tracker
    tracker.free.set()


def test_everything_arrives_in_order():
    memory = Memory()
    with LogQueue([memory]) as log:
        log.text("begin")
        log.row(ROWS[0])
        log.row(ROWS[1])
        log.rewind(1)
        log.row(ROWS[2])
    assert memory.seen == ["begin", ROWS[0], ROWS[1], ("rewind", 1), ROWS[2]]
    assert memory.closed


def test_lines_that_are_said_before_there_are_trackers_wait_for_them():
    memory = Memory()
    with LogQueue() as log:
        log.text("early")
        log.open([memory])
        log.text("late")
    assert memory.seen == ["early", "late"]


def test_a_durable_tracker_has_a_row_before_the_call_returns(stuck):
    durable = Durable()
    log = LogQueue([stuck, durable])
    for row in ROWS:
        log.row(row)
        assert durable.seen[-1] == row
    log.rewind(1)
    assert durable.seen[-1] == ("rewind", 1)
    log.close(limit_s=0.1)
    assert durable.closed


@pytest.mark.parametrize("durable", [False, True])
def test_a_tracker_that_fails_is_dropped_with_a_line(durable):
    memory, broken = Memory(), Broken()
    broken.durable = durable
    with LogQueue([broken, memory]) as log:
        for row in ROWS:
            log.row(row)
    line = "Broken failed and writes no more: OSError('disk full')"
    assert [row for row in memory.seen if row != line] == ROWS
    assert memory.seen.count(line) == 1


def test_a_tracker_says_its_own_last_words():
    class Off(Broken):
        def row(self, row):
            raise TrackerError("no server: training goes on")

    memory = Memory()
    with LogQueue([Off(), memory]) as log:
        log.row(ROWS[0])
    assert "no server: training goes on" in memory.seen


def test_where_nobody_shows_lines_they_go_to_standard_error(capsys):
    with LogQueue([Broken()]) as log:
        log.row(ROWS[0])
    assert capsys.readouterr().err.count("disk full") == 1


def test_one_that_never_comes_back_holds_up_nobody(stuck):
    memory = Memory()
    log = LogQueue([stuck, memory])
    for row in ROWS:
        log.row(row)
    log.status({"step": 1})
    assert stuck.inside.wait(60)
    log.close(limit_s=0.5)
    assert memory.seen[:3] == ROWS
    assert memory.seen[3] == "Stuck is still busy after 0 s: continuing without it"
    assert memory.closed


def test_what_waits_for_a_slow_display_is_bounded_and_told(monkeypatch):
    monkeypatch.setattr(log_queue, "QUEUE_LIMIT", 100)
    slow, durable = StuckDisplay(), Durable()
    log = LogQueue([slow, durable])
    log.row({"step": 0})
    assert slow.inside.wait(60)
    for step in range(1, 1001):
        log.row({"step": step})
    log.rewind(500)
    slow.free.set()
    log.close()
    assert slow.rows == list(range(101)), "the first ones waited"
    assert slow.texts == ["900 lines were dropped here: this display was too slow"]
    assert len(durable.seen) == 1002, "a durable one misses nothing"


def test_a_display_gets_the_newest_status_and_the_last(monkeypatch):
    display = Display()
    with LogQueue([display]) as log:
        log.status({"step": 1})
        assert display.shown.wait(60), "shown without a row or a text"
        for step in range(2, 20_001):
            log.status({"step": step})
    assert display.statuses[-1] == 20_000
    assert len(display.statuses) < 1000, "those between are passed over"


def test_a_crash_reaches_the_trackers_before_it_goes_on():
    memory, durable = Memory(), Durable()

    def crash():
        with LogQueue([memory, durable]) as log:
            log.row(ROWS[0])
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        crash()
    for tracker in (memory, durable):
        assert "ZeroDivisionError: division by zero" in tracker.seen[-1]
        assert "return 1 / 0" in tracker.seen[-1]
        assert tracker.closed


@pytest.mark.parametrize("leave", [SystemExit(42), KeyboardInterrupt()])
def test_leaving_on_request_is_no_crash(leave):
    memory = Memory()
    with pytest.raises(type(leave)), LogQueue([memory]):
        raise leave
    assert memory.seen == []
    assert memory.closed
