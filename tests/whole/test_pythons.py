"""The Python that `make` takes for the environment of the tests."""

import pytest
import pythons


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        (["3 11 0.2"], 0),
        (["3 11 0.2", "3 11 0.16"], 1),
        (["3 11 0.2", "3 11 0.3", "3 11 0.16"], 2),
        (["3 11 0.2", "3 11 0.19"], 0),  # no more than two measurements of one build differ
        (["3 12 0.2", "3 11 0.1"], 0),  # another version has other packages
        (["3 9 0.1", "3 11 0.2", "3 11 0.1"], 2),
        (["exit 1", "3 11 0.2"], 1),  # without `venv` or `ensurepip`
        (["3 10 0.1"], None),
        ([], None),
    ],
)
def test_the_first_one_or_a_faster_one_of_its_version(monkeypatch, tmp_path, there, taken):
    paths = []
    for number, says in enumerate(there):
        paths.append(path := tmp_path / str(number) / "python3")
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{says if says.startswith('exit') else f'echo {says} {path}'}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", ":".join(str(path.parent) for path in paths))
    assert pythons.usual() == ("python3" if taken is None else str(paths[taken]))
