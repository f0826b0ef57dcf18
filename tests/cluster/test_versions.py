"""Versions that do not work together are refused at the start, by name, with the line that installs right ones."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import DEPRECATED, command, environment
from tables import one_test

from roxxel_dist.cli import COMPUTE
from roxxel_dist.cluster.versions import OLDEST, check_versions, number, text, why_not

ROOT = Path(__file__).parents[2]


@one_test(
    ("jax", "flax"),
    [
        *((jax, "0.12.8") for jax in ("0.10.0", "0.10.2", "0.11.0")),
        *(("0.11.1", flax) for flax in ("0.12.9", "0.12.10", "0.12.12")),
        *(("0.11.2", flax) for flax in ("0.12.10", "0.12.12")),
        *(("0.12.0.1", flax) for flax in ("0.12.10", "0.12.12")),
        ("0.13.0", "0.12.13"),  # newer than all that were tried
    ],
)
def test_what_works_is_not_refused(jax, flax):
    assert why_not({"jax": jax, "jaxlib": jax, "flax": flax, "jax-cuda12-plugin": jax}) is None


@one_test(
    ("installed", "said", "line"),
    [
        ({"jax": "0.11.1", "flax": "0.12.8"}, "needs 0.12.9 or newer", "pip install 'flax>=0.12.9'"),
        ({"jax": "0.11.2", "flax": "0.12.8"}, "needs 0.12.10 or newer", "pip install 'flax>=0.12.10'"),
        ({"jax": "0.11.2", "flax": "0.12.9"}, "needs 0.12.10 or newer", "pip install 'flax>=0.12.10'"),
        ({"jax": "0.12.0.1", "flax": "0.12.8"}, "needs 0.12.10 or newer", "pip install 'flax>=0.12.10'"),
        ({"jax": "0.12.0", "flax": "0.12.9"}, "needs 0.12.10 or newer", "pip install 'flax>=0.12.10'"),
        ({"jax": "0.13.0.dev20261101", "flax": "0.12.9"}, "needs 0.12.10", "pip install 'flax>=0.12.10'"),
        ({"jax": "0.10.2", "flax": "0.12.12"}, "a flax older than 0.12.9", "pip install 'flax>=0.12.8,<0.12.9'"),
        ({"jax": "0.11.0", "flax": "0.12.9"}, "a flax older than 0.12.9", "pip install 'flax>=0.12.8,<0.12.9'"),
        ({"jax": "0.9.2", "flax": "0.12.8"}, "jax 0.9.2 is too old", "pip install 'jax>=0.10'"),
        ({"jax": "0.10.2", "flax": "0.11.2"}, "flax 0.11.2 is too old", "pip install 'flax>=0.12.8'"),
        ({"jaxlib": "0.12.0.1", "jax-cuda12-plugin": "0.12.0"}, "on the CPU", "'jax[cuda12]==0.12.0.1'"),
        ({"jaxlib": "0.10.2", "jax-cuda13-pjrt": "0.12.0.1"}, "on the CPU", "'jax[cuda13]==0.10.2'"),
    ],
)
def test_what_does_not_work_is_named_with_its_cure(installed, said, line):
    why = why_not(installed)
    assert said in why
    assert line in why


def test_these_versions_work_and_the_oldest_are_those_that_pip_takes():
    check_versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, oldest in OLDEST.items():
        assert any(line.startswith(f"{name}>={text(oldest)},") for line in project["dependencies"])
    extras = project["optional-dependencies"]
    (jax,) = (line for line in project["dependencies"] if line.startswith("jax>"))
    for extra in ("cuda12", "cuda13", "tpu"):
        assert extras[extra] == [jax.replace("jax", f"jax[{extra}]")]
        assert extra in importlib.metadata.metadata("jax").get_all("Provides-Extra")


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-newest.txt"])
def test_the_pinned_versions_work_together(name):
    pinned = dict(re.findall(r"^([^=#\s]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE))
    assert pinned.keys() >= {"jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint"}
    assert why_not(pinned) is None
    if number(pinned["jax"])[:2] == number(importlib.metadata.version("jax"))[:2]:
        assert {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "flax")}.items() <= pinned.items()


def beside(folder, **versions):
    """The environment of a process that finds these packages installed in the folder, before all others."""
    for name, version in versions.items():
        made = folder / f"{name}-{version}.dist-info"
        made.mkdir(parents=True)
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return environment(PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))


def test_every_command_that_computes_refuses_them_before_it_imports_jax(tmp_path):
    env = beside(tmp_path / "site", flax="0.12.8", jax="0.12.0")
    code = (
        "import sys; from roxxel_dist.cli import main\n"
        "for name in sys.argv[1:]:\n    print(name, main([name, '--any', 'thing']))\n"
        "print('jax' in sys.modules, 'flax' in sys.modules)\n"
        "import roxxel_dist; roxxel_dist.Trainer"
    )
    words = [sys.executable, "-c", code, *sorted(COMPUTE)]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [*(f"{name} 2" for name in sorted(COMPUTE)), "False False"]
    why = "flax 0.12.8 does not work with jax 0.12.0, which needs 0.12.10 or newer: pip install 'flax>=0.12.10'"
    assert done.stderr.count(why) == len(COMPUTE) + 1
    assert done.stderr.splitlines()[-1].endswith(f"UserError: {why}")
    helped = subprocess.run(command("train", "--help"), env=env, cwd=tmp_path, capture_output=True, text=True)
    assert helped.returncode == 0, helped.stderr


@pytest.mark.parametrize(("platforms", "refused"), [("", True), ("cuda", True), ("cuda,cpu", True), ("cpu", False)])
def test_a_plugin_that_jax_would_not_use_is_refused_unless_the_cpu_is_asked_for(
    platforms, refused, tmp_path, monkeypatch
):
    beside(tmp_path, jax_cuda12_plugin="0.8.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    if refused:
        with pytest.raises(ValueError, match=r"jax-cuda12-plugin 0\.8\.0 does not work with jaxlib"):
            check_versions()
    else:
        check_versions()


def test_a_command_that_warns_of_what_will_be_removed_fails_its_test():
    """Of this package's own lines: `commands.run` looks for them in all that a command of a test prints."""
    said = "[rank 1] /home/me/roxxel_dist/train/state.py:3: {}Warning: jax.{} is deprecated"
    for kind in ("Deprecation", "PendingDeprecation", "VisibleDeprecation", "Future"):
        assert DEPRECATED.search("Step 1/2\n" + said.format(kind, "tree_map"))
    assert not DEPRECATED.search(said.format("Deprecation", "tree_map").replace("roxxel_dist", "site-packages/ray"))
    assert not DEPRECATED.search(said.format("Resource", "tree_map"))
