"""The page in a browser: every view, on a desk and on a phone, in light and in dark, by mouse and by keyboard."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import CHROMIUM, DESK, PHONE, Browser
from commands import command, environment, wait_for
from job_desk import LIMIT_S
from made_mixtures import made_mixtures
from made_rows import made_run
from made_study import EVERY_KIND, every_kind, made_study, made_versus
from ranks import RANK
from runs import train
from served_page import serve

from roxxel_dist.cli import main
from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.sweep.report.mixture import expected_confirmation
from roxxel_dist.sweep.report.text import best_config
from roxxel_dist.sweep.space.sweep_file import sweep_of
from roxxel_dist.sweep.study.folder import read_study

pytestmark = [
    pytest.mark.web,
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs chromium"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:selenium"),
]
SHOTS = Path(__file__).parent.parent.parent / ".cache" / "pages"
RUNS = 100
FITS = "return document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs, a hundred of them in one folder, and a study."""
    from corpora import write_corpus

    from roxxel_dist.data.dataset import Roxxel

    folder = tmp_path_factory.mktemp("page")
    with Roxxel(write_corpus(folder)) as corpus:
        train(corpus, folder / "runs" / "phases", [Phase(6, 8, 17), Phase(4, 8, 33)], checkpoint_every=4)
    for number in range(RUNS):
        made_run(folder / "many" / f"run-{number:03}", 40 + number, lr=0.001 * (1 + number % 3))
    made_run(folder / "runs" / "other", 60)
    made_study(folder, 40)
    return folder


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """The browser; at the end nothing may have gone wrong in it, and nothing may have left the machine."""
    chromium.logs()
    chromium.said.clear()
    chromium.requests.clear()
    yield chromium
    assert chromium.logs() == []
    assert chromium.outside() == []
    assert chromium.requests
    chromium.driver.get("about:blank")


def link_of(browser, server, name):
    """The address of an item, as the list links it."""
    browser.open(server.link)
    browser.wait(lambda: browser.find("table a"), "the list")
    links = {link.text: link.get_attribute("href") for link in browser.find("table a")}
    return next(address for text, address in links.items() if text.endswith(name))


def check(browser, name, sizes=(DESK, PHONE)):
    """Pictures of a view at each size and in both schemes; nothing sticks out, and axe has nothing against it."""
    from axe_core_python.selenium import Axe

    SHOTS.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        for scheme in ("light", "dark"):
            browser.look_like(size, scheme)
            browser.wait(lambda: browser.run(FITS), f"{name} fits {size}")
            browser.picture(SHOTS / f"{name}-{size[0]}-{scheme}.png")
            violations = Axe().run(browser.driver)["violations"]
            told = [f"{one['id']}: {node['html'][:200]}" for one in violations for node in one["nodes"][:4]]
            assert told == [], f"{name} {size} {scheme}"
    browser.look_like(DESK)


def test_the_list(browser, place):
    with serve(place / "many", place / "study") as server:
        browser.open(server.link)
        browser.wait(lambda: len(browser.find("tbody tr")) == RUNS + 1, "all runs")
        assert "100 runs" in browser.text(".lead")
        browser.wait(lambda: browser.find(".uplot canvas"), "the curves")
        check(browser, "list")
        (by_step,) = (button for button in browser.find("thead button") if button.text == "Step")
        by_step.click()
        by_step.click()
        assert by_step.find_element("xpath", "..").get_attribute("aria-sort") == "descending"
        assert browser.text("tbody tr th").endswith("run-099")
        search = browser.find("input[type=search]")[0]
        search.send_keys("run-01")
        browser.wait(lambda: len(browser.find("tbody tr")) == 10 + 1, "the filtered runs")
        boxes = browser.find("tbody input[type=checkbox]")
        for box in boxes[:2]:
            box.click()
        (compare,) = (button for button in browser.find("button") if button.text == "Compare 2")
        compare.click()
        browser.wait(lambda: "fields that differ" in browser.text(), "the comparison")
        browser.wait(lambda: "0.001" in browser.text(), "the difference")
        table = [row.text.split() for row in browser.find("[aria-label='Config differences'] tbody tr")]
        assert [row[0] for row in table] == ["lr"]
        check(browser, "compare")


def test_a_run_and_what_comes_to_it(browser, place, tmp_path):
    run = Path(shutil.copytree(place / "runs" / "phases", tmp_path / "phases"))
    log = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(log[:6]))
    with serve(run) as server:  # of one item there is no list
        browser.open(server.link)
        browser.wait(lambda: "phase 1 of 2" in browser.text(), "the first phase")
        browser.run("window.sameDocument = true")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(log[6])
        browser.wait(lambda: "phase 2 of 2" in browser.text(), "the second phase")
        assert "damaged" not in browser.text()
        (run / "checkpoints" / "10").rename(run / "checkpoints" / "10.damaged")
        browser.wait(lambda: "damaged, renamed" in browser.text(), "the damaged checkpoint")
        (run / "new").write_bytes(b"".join(log[:3]))  # a restart goes back
        (run / "new").rename(run / "metrics.jsonl")
        browser.wait(lambda: "Step 3 of 10" in browser.text(), "the run that went back")
        with (run / "metrics.jsonl").open("ab") as file:
            file.writelines(log[3:])
        browser.wait(lambda: "Step 10 of 10" in browser.text(), "the run that went on")
        assert browser.run("return window.sameDocument")
        check(browser, "run")


def test_curves_by_keyboard_and_mouse(browser, place):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    with serve(place / "runs" / "other") as server:
        browser.open(server.link)
        browser.wait(lambda: browser.find(".uplot canvas"), "the curves")
        plot = browser.find(".plot")[0]
        assert "Loss, 2 curves over step" in plot.get_attribute("aria-label")
        plot.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
        said = browser.run("return document.querySelector('.chart [aria-live]').textContent")
        assert said.startswith("step 2, train_loss 3.8284")
        span = "const chart = [...charts][0]; return [chart.uplot.scales.x.min, chart.uplot.scales.x.max]"
        assert browser.run(span) == [1, 60]
        plot.send_keys("+")
        assert browser.run(span) != [1, 60]
        plot.send_keys("0")
        assert browser.run(span) == [1, 60]
        over = browser.find(".u-over")[0]
        ActionChains(browser.driver).move_to_element_with_offset(over, -200, 0).click_and_hold().move_by_offset(
            200, 0
        ).release().perform()
        left, right = browser.run(span)
        assert 1 < left < right < 60
        assert "train_loss" in browser.text(".tip")
        (box,) = browser.find(".controls input[type=checkbox]")
        box.click()
        browser.wait(lambda: browser.run("return [...charts][0].uplot.scales.y.distr") == 3, "the logarithm")
        browser.find("select")[0].send_keys("tokens")
        browser.wait(lambda: browser.run(span) == [64, 3840], "tokens")


def test_a_study(browser, place):
    from selenium.webdriver.common.keys import Keys

    with serve(place / "study") as server:
        browser.open(server.link)
        browser.wait(lambda: len(browser.find("tbody tr")) == 40, "the trials")
        browser.wait(lambda: len(browser.find(".parallel polyline")) == 35, "a line a trial with a value")
        check(browser, "study")
        (axis,) = browser.find("[aria-label='Band of val_loss']")
        axis.send_keys(Keys.ARROW_UP)
        browser.wait(lambda: 0 < len(browser.find("tbody tr")) < 40, "the trials in the band")
        chosen = len(browser.find("tbody tr"))
        assert f"{chosen} of 35 trials are in all bands" in browser.text()
        assert len(browser.find(".parallel polyline.out")) == 35 - chosen
        axis.send_keys(Keys.DELETE)
        browser.wait(lambda: len(browser.find("tbody tr")) == 40, "all trials")


@pytest.mark.parametrize("sets", [2, 3, 4])
def test_a_report_of_mixtures(browser, tmp_path, sets):
    """A curve for two data sets, a triangle for three, tables for more, and the confirmation."""
    study = made_mixtures(tmp_path, sets)
    read = read_study(study)
    expected_confirmation(read, best_config(read, "")[1], 3).write(study)
    assert main(["report", str(study)]) == 0
    browser.requests.append("file")
    browser.driver.get((study / "report" / "report.html").as_uri())
    browser.wait(lambda: "Mixture of phase 1, 2" in browser.text(), "the mixture")
    assert len(browser.find(".surface svg circle")) == (21 if sets == 3 else 0)
    assert len(browser.find(".surface svg polyline")) == (1 if sets == 2 else 0)
    assert "Confirmation" in browser.text()
    check(browser, f"mixture-{sets}")


def test_a_report_of_a_comparison(browser, tmp_path):
    """The verdict, a bar for the interval after each pair from the third on, and a row for each pair."""
    study = made_versus(tmp_path, [-0.1, -0.3, -0.15, -0.2, -0.22])
    assert main(["report", str(study)]) == 0
    browser.requests.append("file")
    browser.driver.get((study / "report" / "report.html").as_uri())
    browser.wait(lambda: "A is better by 0.194" in browser.text(), "the verdict")
    assert len(browser.find(".surface svg line.line")) == len(browser.find(".surface svg circle")) == 3
    assert not [one for one in browser.find(".parallel") if one.is_displayed()]
    check(browser, "versus")


def test_a_study_with_values_of_every_kind(browser, tmp_path):
    """Null is a value, one trial far away flattens nothing, rates have a logarithmic axis, and nothing scrolls."""
    path = every_kind(tmp_path / "study")
    with serve(path) as server:
        browser.open(server.link)
        browser.wait(lambda: len(browser.find(".parallel polyline")) == 12, "a line a trial")
        axes = {axis.get_attribute("aria-label"): axis for axis in browser.find(".parallel .axis")}
        assert len(axes) == len(EVERY_KIND) + 2  # the rate and the loss too
        lines = [line.get_attribute("points").split() for line in browser.find(".parallel polyline")]
        assert {len(points) for points in lines} == {len(axes)}
        ends = [float(points[-1].split(",")[1]) for points in lines]
        assert len({*ends}) == 11  # all others are apart, and it is beside the worst of them
        ticks = axes["Band of warmup_steps"].text.split()
        assert ticks[-3:] == ["None", "1", "3"]
        assert [float(tick) for tick in axes["Band of lr"].text.split()[-5:]] == pytest.approx(
            [1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2], rel=0.01
        )
        cells = {cell.text for cell in browser.find("tbody td")}
        assert {"None", "True", "False"} <= cells
        assert "finished" in browser.text()
        assert browser.run(
            "return [...document.querySelectorAll('.chart .scroll')].every((one) => one.clientWidth >= 600)"
        )


LOG = {"distribution": "log_uniform_values"}
AXES: dict[str, tuple[Any, list[str]]] = {
    "uniform": ({"min": 0.0, "max": 1.0}, ["0", "0.25", "0.5", "0.75", "1"]),
    "narrow": ({"min": 0.001, "max": 1.0}, ["0.001", "0.251", "0.5", "0.75", "1"]),
    "rate": (
        {"distribution": "log_uniform_values", "min": 1e-5, "max": 0.1},
        ["1e-5", "0.0001", "0.001", "0.01", "0.1"],
    ),
    "listed": ({"values": [1, 2, 4, 8, 1024]}, ["1", "2", "4", "8", "1,024"]),
    "kind": ({"values": ["sgd", "adam"]}, ["sgd", "adam"]),
    "many": ({"min": 1, "max": 1001}, ["1", "251", "501", "751", "1,001"]),
    "momentum": ({"min": 0.1, "max": 0.9}, ["left", "out", "0.1", "0.3", "0.5", "0.7", "0.9"]),
}
"""Parameters, and the ticks of their axes; the last one is left out of every second trial."""


def test_axes_follow_the_study(browser, tmp_path):
    """Not the values that happen to be there: a linear one for uniform, a place for each choice."""
    path, noise = tmp_path / "study", random.Random(0)
    path.mkdir()
    metric = "Reward / Total reward (mean)"
    (path / "study.yaml").write_text(
        yaml.safe_dump(
            {
                "method": "random",
                "metric": {"name": metric, "goal": "maximize"},
                "parameters": {name: spec for name, (spec, _) in AXES.items()},
            }
        )
    )
    about = {"seed": 0, "metric": metric, "goal": "maximize", "method": "random"}
    space = sweep_of({"method": "random", "parameters": {name: spec for name, (spec, _) in AXES.items()}}).space
    events = [{"event": "study", "time": 0.0, "format": 1, **about}]
    for number in range(40):
        point = [noise.random() for _ in AXES]
        params = space.point(point)
        if number % 2:
            del params["momentum"]
        more = {
            "params": params,
            "metric": metric,
            "value": -noise.random(),
            "seconds": 1.0,
            "stopped": None,
            "more": {},
        }
        events.append({"event": "ask", "time": 1.0, "trial": number, "params": params, "point": point})
        events.append({"event": "result", "time": 2.0, "trial": number, **more})
    (path / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with serve(path) as server:
        browser.open(server.link)
        browser.wait(lambda: len(browser.find(".parallel polyline")) == 40, "a line a trial")
        axes = {axis.get_attribute("aria-label"): axis for axis in browser.find(".parallel .axis")}
        for name, (_, ticks) in AXES.items():
            assert axes[f"Band of {name}"].text.split()[1:] == ticks, name
        place = [*axes].index("Band of momentum")
        heights = {
            int(line.get_attribute("data-trial")): float(line.get_attribute("points").split()[place].split(",")[1])
            for line in browser.find(".parallel polyline")
        }
        bottom = max(height for number, height in heights.items() if number % 2 == 0)
        assert all((height > bottom + 10) == bool(number % 2) for number, height in heights.items()), "below the axis"
        box = "document.querySelector('.parallel').getBoundingClientRect()"
        inside = f"const box = {box}; return [...document.querySelectorAll('.parallel text')].filter((one) => "
        inside += "one.getBoundingClientRect().left < box.left || one.getBoundingClientRect().right > box.right).length"
        assert browser.run(inside) == 0, "no title is cut"
        scales = "return Object.fromEntries([...charts].map((one) => [one.axis, one.uplot?.scales.x.distr]))"
        found = browser.run(scales)
        assert (found["rate"], found["uniform"], found["narrow"], found["many"]) == (3, 1, 1, 1)
        browser.look_like(PHONE)
        browser.wait(lambda: browser.run(FITS), "a phone")
        browser.look_like(DESK)


def test_a_long_run_is_a_band_with_its_spike_and_its_gaps(browser, tmp_path):
    run = made_run(tmp_path / "run", 0)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            row = {"step": step, "train_loss": 9.0 if step == 10_000 else 3 + step % 7 / 10, "tokens": 64 * step}
            file.write(json.dumps(row | ({"train_loss": None} if step in (500, 501) else {})) + "\n")
    (run / "timeline.jsonl").write_text(
        "".join(
            json.dumps({"attempt": n, "activity": "step", "begin": n, "seconds": 1.0, "steps": steps}) + "\n"
            for n, steps in enumerate([[1, 9000], [8001, 20_000]])
        )
    )
    with serve(run) as server:
        browser.open(server.link)
        browser.wait(lambda: browser.find(".uplot canvas"), "the curves")
        chart = "const chart = [...charts].find((one) => one.title === 'Loss'); "
        assert browser.run(chart + "return Math.max(...chart.data[chart.firstBand].filter(isNumber))") == 9.0
        assert browser.run(chart + "return chart.uplot.scales.y.max") >= 9.0
        assert "train_loss: 2 values not finite, first at step 500" in browser.text(".chart .note")
        marked = chart + "return chart.marks"
        browser.wait(lambda: [8001, "resume"] in browser.run(marked), "the resume")  # the timeline comes by itself
        marks = browser.run(marked)
        assert sum(kind == "gap" for _, kind in marks) >= 1
        assert "training went on after a restart (1)" in browser.text(".controls")
        label = browser.find(".plot")[0].get_attribute("aria-label")
        assert "9.0000 highest" in label
        browser.find("select")[0].send_keys("tokens")
        place = chart + "return chart.marks.find(([, kind]) => kind === 'resume')[0]"
        browser.wait(lambda: browser.run(place) == pytest.approx(8001 * 64, rel=1e-3), "tokens")
        browser.find("select")[0].send_keys("step")
        check(browser, "long")


def test_three_axes_need_no_scroll_bar(browser, place):
    with serve(place / "study") as server:
        browser.open(server.link)
        box = "document.querySelector('.parallel').parentElement"
        fits = f"return {box}.scrollWidth <= {box}.clientWidth"
        for size in ((1300, 900), (1200, 900), (1400, 900)):
            browser.look_like(size, "light")
            browser.wait(lambda: browser.find(".parallel polyline") and browser.run(fits), f"no scroll bar at {size}")
        browser.look_like(DESK)


def test_a_job_whose_rank_is_stopped_and_which_is_restarted(browser, tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text(RANK)
    env = environment(XDG_STATE_HOME=str(tmp_path / "state"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = command("launch", "local", "--nprocs", 2, "--max-restarts", 2, "--warm-spares", "off", "--", "rank.py")
    with (tmp_path / "launcher").open("w") as log:
        job = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:

        def record():
            with contextlib.suppress(ValueError):
                (path,) = tmp_path.glob("runs/*/logs/launcher.json")
                return json.loads(path.read_text())
            return {"ranks": []}

        wait_for(lambda: len(record()["ranks"]) == 2, LIMIT_S, "the ranks")
        with serve(record()["run_id"]) as server:
            browser.open(server.link)
            browser.wait(lambda: "in a step" in browser.text(), "the ranks")
            stopped = record()["ranks"][1]["pid"]
            os.kill(stopped, signal.SIGSTOP)
            browser.wait(lambda: "stopped rank" in browser.text(), "the stopped rank")
            check(browser, "job")
            os.kill(stopped, signal.SIGCONT)
            (tmp_path / "die").touch()
            browser.wait(lambda: "1 restart" in browser.text() and "SIGKILL" in browser.text(), "the restart")
    finally:
        job.send_signal(signal.SIGQUIT)
        job.wait(LIMIT_S)


def test_a_report_needs_no_server(browser, place, monkeypatch):
    monkeypatch.chdir(place)
    assert main(["report", "runs/phases", "runs/other"]) == 0
    assert main(["report", "study"]) == 0
    for page, words in (("report", "2 runs"), ("study/report", "Which parameters matter")):
        browser.open((place / page / "report.html").as_uri())
        browser.wait(lambda words=words: words in browser.text(), "the report")
        browser.wait(lambda: browser.find(".uplot canvas"), "the curves")
        assert "as of " in browser.text("#status")
    check(browser, "report", [DESK])


def test_who_has_no_link_sees_nothing(browser, place):
    with serve(place / "runs") as server:
        browser.open(server.link.partition("?")[0])
        assert "its token is missing" in browser.text("body")
        assert any("403" in line for line in browser.logs())
        browser.said.clear()


def test_the_page_says_that_its_server_has_gone(browser, place):
    with serve(place / "runs") as server:
        browser.open(server.link)
        browser.wait(lambda: browser.text("#status") == "live", "the stream")
    browser.wait(lambda: "no connection" in browser.text("#status"), "the end of the stream")
    assert "other" in browser.text()
    browser.driver.get("about:blank")
    browser.logs()
    browser.said[:] = [line for line in browser.said if "ERR_CONNECTION_REFUSED" not in line]
