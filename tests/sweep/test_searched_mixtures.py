"""What a report says of mixtures is within what the most passes over the data leave."""

import shutil

import numpy as np
import pytest
import yaml
from made_mixtures import PHASES, made_mixtures

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.report.mixture import mixtures_of, searched_mixtures
from roxxel_dist.sweep.study.folder import read_study


def test_the_law_proposes_what_may_be_trained(tmp_path):
    """160 rows are read, and code has 108: half of them are a share of a third, less what rounding may add."""
    sets = {name: str(tmp_path / f"{name}.npy") for name in ("self", "code")}
    for name, count in {"self": 50_000, "code": 1_000}.items():
        np.save(sets[name], np.zeros(count, np.uint16))
    base = Config(datasets=sets, validation=sets, phases=PHASES, vocab_size=64, dim=16, max_context=8)
    study = made_mixtures(tmp_path, 2, 24, base=base)
    assert searched_mixtures(read_study(study))[0].caps[1] == pytest.approx(1.0)
    extras = yaml.safe_load((study / "extras.yaml").read_text())
    extras["mixtures"][0]["max_passes"] = 0.5
    (study / "extras.yaml").write_text(yaml.safe_dump(extras, sort_keys=False))
    read = read_study(study)
    (space,) = searched_mixtures(read)
    assert space.caps[1] == pytest.approx(0.306, abs=0.001)
    found = mixtures_of(read)
    assert found is not None
    (entry,) = found.entries
    assert entry.shares["law"][1] <= space.caps[1] + 1e-9
    assert max(point.shares[1] for point in entry.surface) == pytest.approx(space.caps[1])
    shutil.move(sets["code"], tmp_path / "elsewhere.npy")
    assert searched_mixtures(read_study(study))[0].caps[1] == pytest.approx(1.0), "a report needs no data"
