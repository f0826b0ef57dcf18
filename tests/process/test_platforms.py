"""An accelerator that is not there, and flags that XLA does not know, are one line before anything is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.process import platforms
from roxxel_dist.process.platforms import why_bad_flags, why_no_platform

COMMANDS = [
    ["train", "--data_path", "text.txt", "--run_dir", "runs/new"],
    ["plan", "--data_path", "text.txt"],
    ["find-lr", "--data_path", "text.txt"],
    ["check-layouts", "--data_path", "text.txt", "--devices", "0"],
    ["launch", "local", "--", "train", "--data_path", "text.txt"],
    ["launch", "local", "--devices-per-proc", "2", "--dry-run", "--", "train", "--data_path", "text.txt"],
]


def plugins(folder: Path, *names: str) -> None:
    """Modules of plugins as pip installs them, without what makes devices."""
    for name in names:
        (folder / "jax_plugins" / name).mkdir(parents=True)
        (folder / "jax_plugins" / name / "__init__.py").write_text("def initialize(): pass\n")


# (JAX_PLATFORMS, installed plugins, other variables, what the message has; None: nothing is known against it)
NAMES = [
    ("", (), {}, None),
    ("cpu", (), {}, None),
    ("cuda", (), {}, ["this jax has cpu", "[cuda12]", "unset it"]),
    ("gpu", (), {}, ["this jax has cpu", "[cuda12]"]),
    ("tpu", (), {}, ["this jax has cpu", "[tpu]"]),
    ("rocm", (), {}, ["this jax has cpu: unset it"]),
    ("foo", (), {}, ["JAX_PLATFORMS is foo", "unset it"]),
    ("CUDA", (), {}, ["JAX_PLATFORMS is CUDA"]),
    ("cuda,cpu", (), {}, None),  # jax goes on with the CPU
    ("cpu,cuda", (), {}, None),
    ("cuda,tpu", (), {}, ["JAX_PLATFORMS is cuda,tpu", "[tpu]"]),
    ("tpu,cpu", (), {}, ["JAX_PLATFORMS is tpu,cpu", "[tpu]"]),
    ("cpu,foo", (), {}, ["JAX_PLATFORMS is cpu,foo"]),
    ("cpu, tpu", (), {}, ["JAX_PLATFORMS is cpu, tpu"]),
    ("tpu", ("xla_cuda12",), {}, ["this jax has cpu, cuda"]),
    ("cuda", ("xla_rocm7",), {}, ["this jax has cpu, rocm", "[cuda12]"]),
    ("gpu", ("xla_rocm7",), {}, None),
    ("cuda", ("xla_cuda13",), {}, ["no NVIDIA GPU is here", "driver"]),
    ("cuda", ("metal",), {}, ["this jax has cpu", "[cuda12]"]),
    ("metal", ("metal",), {}, None),
    ("foo", (), {"PJRT_NAMES_AND_LIBRARY_PATHS": "foo:/lib/foo.so"}, None),
    ("tpu", (), {"TPU_LIBRARY_PATH": "/lib/nowhere.so"}, ["this jax has cpu", "[tpu]"]),
    ("tpu", (), {"TPU_LIBRARY_PATH": sys.executable}, None),
]


@pytest.mark.parametrize(
    ("names", "installed", "environ", "words"), NAMES, ids=[" ".join([n, *i]) for n, i, *_ in NAMES]
)
def test_a_platform_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, installed: tuple[str, ...], environ: dict[str, str],
    words: list[str] | None,
) -> None:  # fmt: skip
    plugins(tmp_path, *installed)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(platforms, "NVIDIA", (str(tmp_path / "nvidia0"), str(tmp_path / "nvidiactl")))
    why = why_no_platform(names, environ)
    assert (why is None) == (words is None), why
    assert all(word in (why or "") for word in words or ())
    (tmp_path / "nvidiactl").touch()
    if "no NVIDIA" in (why or ""):
        assert why_no_platform(names, environ) is None


FLAGS = [
    ("", None),
    ("  ", "takes for the name of a file: unset it"),
    ("--xla_force_host_platform_device_count=0", "count=0 leaves no device"),
    ("--xla_force_host_platform_device_count=-3 --xla_dump_to=/tmp", "count=-3 leaves no device"),
    ("--xla_force_host_platform_device_count=2", None),
    ("--xla_unheard_of=1", "--xla_unheard_of=1 is no flag of it"),
    ("--xla_dump_to=/tmp --xla_unheard_of", "(--xla_unheard_of is no flag of it)"),
    ("--xla_force_host_platform_device_count=two", "interpret value two"),
    ("nowhere.txt", "Could not open file"),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_flags_of_xla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, words: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    why = why_bad_flags({"XLA_FLAGS": flags})
    assert (why is None) == (words is None), why
    assert words is None or (words in str(why) and str(why).startswith(f"XLA_FLAGS is {flags!r}"))
    assert "\n" not in str(why)


@one_test("words", COMMANDS)
def test_each_command_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Of flags; platforms need a process whose jax has made no devices yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    monkeypatch.setenv("XLA_FLAGS", "--xla_unheard_of=1")
    assert main(words) == 2
    said = "".join(capfd.readouterr())
    assert said.count("\n") == 1
    assert "is no flag of it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


PROGRAM = """
import contextlib, io, os, sys
from roxxel_dist.cli import main
for words in {commands}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(words)
    print(code, repr(said.getvalue()))
"""


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS is cuda, and this jax has cpu: install it: "),
        pytest.param(
            {"JAX_PLATFORMS": "foo", "PJRT_NAMES_AND_LIBRARY_PATHS": "foo:/lib/no.so"}, "jax cannot make its devices: ",
            marks=pytest.mark.long,
        ),
    ],
    ids=["no plugin", "a plugin without its library"],
)  # fmt: skip
def test_platforms_in_commands(tmp_path: Path, environ: dict[str, str], shown: str) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    static = "jax cannot" not in shown
    commands = COMMANDS if static else COMMANDS[:4]  # the launcher does not open a plugin; its ranks do
    env = {name: value for name, value in os.environ.items() if not name.startswith("ROXXEL_")} | environ
    line = [sys.executable, "-c", PROGRAM.format(commands=repr(commands))]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), done.stderr
    for line in lines:
        assert line.startswith(f"2 'roxxel-dist: {shown}") or line.startswith(f'2 "roxxel-dist: {shown}'), line
        assert line.count("\\n") == 1, line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
