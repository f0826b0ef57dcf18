import fcntl
import os
import re

import pytest
from sweep_desk import write_sweep

from roxxel_dist.place.directory import is_held
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.study.folder import SERVER, StudyDir

SWEEP = {"method": "random", "metric": {"name": "val_loss"}, "parameters": {"lr": {"min": 0.001, "max": 0.01}}}


@pytest.fixture
def begun(tmp_path):
    """Begins a study that a sweep of a W&B server leads, or none."""

    def begin(server):
        write_sweep(tmp_path, SWEEP)
        study = StudyDir(tmp_path / "study")
        assert study.wandb_sweep_id(server) == server
        assert not study.is_there
        study.create(str(tmp_path / "sweep.yaml"), None, Config(), {SERVER: server})
        assert study.is_there
        return study

    return begin


def test_a_study_keeps_who_searches(begun):
    study = begun("e/p/a")
    assert [study.wandb_sweep_id(asked) for asked in (None, "", "e/p/a")] == ["e/p/a"] * 3
    with pytest.raises(ValueError, match=r"started with the W&B sweep e/p/a, not with e/p/b: name another --study"):
        study.wandb_sweep_id("e/p/b")


def test_a_study_searched_here_is_led_by_nobody(begun):
    study = begun(None)
    assert study.wandb_sweep_id(None) is None
    for asked in ("", "e/p/b"):
        with pytest.raises(ValueError, match="chooses its own trials"):
            study.wandb_sweep_id(asked)


def test_a_start_that_was_killed_before_the_study_was_there_decides_nothing(begun):
    study = begun("e/p/a")
    (study.path / "study.yaml").unlink()  # it is written last
    assert study.base_file is None
    assert study.metadata(SERVER) is None
    assert study.wandb_sweep_id(None) is None
    assert study.wandb_sweep_id("e/p/b") == "e/p/b"


def test_a_study_is_on_the_disk_before_it_is_there(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    write_sweep(tmp_path, SWEEP)
    (tmp_path / "more.yaml").write_text("resources: {CPU: 1}\n")
    study = tmp_path / "study"
    StudyDir(study).create(str(tmp_path / "sweep.yaml"), str(tmp_path / "more.yaml"), Config(), {SERVER: None})
    names = [re.sub(r"\.\w+\.tmp$", "", path).removeprefix(str(tmp_path)) for path in synced]
    assert names == [
        "",
        "/study/.config.yaml",
        "/study",
        "/study/.extras.yaml",
        "/study",
        "/study/.study.yaml",
        "/study",
    ]
    assert sorted(path.name for path in study.iterdir()) == ["config.yaml", "extras.yaml", "study.yaml"]


def test_what_a_killed_start_has_left_is_no_hindrance(tmp_path):
    write_sweep(tmp_path, SWEEP)
    study = tmp_path / "study"
    study.mkdir()
    for name in ("config.yaml", ".study.yaml.77.tmp", ".extras.yaml.77.tmp", ".lock"):
        (study / name).touch()
    StudyDir(study).open(str(tmp_path / "sweep.yaml"), None, Config(), None)
    (study / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not a study: name another folder"):
        StudyDir(study).open(str(tmp_path / "sweep.yaml"), None, Config(), None)


def test_a_study_that_begins_while_another_start_looks_is_no_other_folder(tmp_path):
    write_sweep(tmp_path, SWEEP)

    class Looking(StudyDir):
        @property
        def is_there(self):
            seen = super().is_there
            StudyDir(self.path).create(str(tmp_path / "sweep.yaml"), None, Config(), {SERVER: None})
            return seen

    Looking(tmp_path / "study").check_free()


@pytest.mark.parametrize("others", [(), ("notes.txt",)])
def test_a_start_that_begins_nothing_leaves_what_was_there(tmp_path, others):
    folder = tmp_path / "new" / "study"
    if others:
        folder.mkdir(parents=True)
    with StudyDir(folder).hold(pytest.fail):
        assert is_held(folder)
        for name in others:  # of somebody else, meanwhile
            (folder / name).touch()
    assert folder.exists() == bool(others)
    assert (tmp_path / "new").exists() == bool(others)
    assert not (folder / ".lock").exists()


def test_who_waits_for_a_study_that_is_taken_back_has_it_after_that(begun):
    study = begun(None)
    said = []

    def take_it_back(line):
        said.append(line)
        study.rollback()
        (study.path / ".lock").unlink()
        study.path.rmdir()
        os.close(lock)

    lock = os.open(study.path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with study.hold(take_it_back):
        assert not study.is_there
        assert is_held(study.path)
    assert len(said) == 1
    assert (
        not study.path.exists() or not list(study.path.iterdir()) or [*study.path.iterdir()] == [study.path / ".lock"]
    )
