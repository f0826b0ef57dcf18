"""`sweep --transfer_to`: what a search at a small width found, as the config of a wider model."""

import pytest
from made_study import made_study

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.run import wide_config, write_transferred
from roxxel_dist.sweep.study.folder import read_study

NARROW = {"dim": 64, "num_blocks": 2, "head_size": 32}


def wide_file(tmp_path, **fields):
    path = tmp_path / "wide.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in ({"dim": 512, "head_size": 32} | fields).items()))
    return path


def test_the_best_values_go_into_the_wider_config(tmp_path):
    study, base = read_study(made_study(tmp_path, 4)), Config(**NARROW, lr=1e-3)
    searched = {"lr", "weight_decay", "init_std"}
    wide = wide_config(wide_file(tmp_path, num_blocks=8, lr=0.7), base, searched)
    best = Config(**NARROW, lr=4e-3, weight_decay=0.2, init_std=0.1, warmup_steps=7)
    path = write_transferred(study, wide, base, best, searched)
    written = Config.from_yaml(path)
    assert path == study.path / "transferred.yaml"
    assert (written.dim, written.num_blocks, written.head_size) == (512, 8, 32)
    assert (written.parametrization, written.base_dim) == ("mup", 64)
    assert (written.lr, written.weight_decay, written.init_std, written.warmup_steps) == (4e-3, 0.2, 0.1, 7)


@pytest.mark.parametrize(
    ("wide", "searched", "message"),
    [
        ({}, {"lr", "dim"}, "the sweep searches dim, and what carries over to another width"),
        ({"head_size": 64}, {"lr"}, r"at dim 64 its .* would be \(1, 1, 64\), and in the sweep they are \(2, 2, 32\)"),
        ({"model": "net:build"}, {"lr"}, "its model is net:build, and the sweep's is the built-in one"),
        ({"dim": 0}, {"lr"}, "dim is 0"),
        ({"dimm": 3}, {"lr"}, "did you mean 'dim'"),
    ],
)
def test_what_cannot_carry_over(tmp_path, wide, searched, message):
    with pytest.raises(ValueError, match=message):
        wide_config(wide_file(tmp_path, **wide), Config(**NARROW), searched)
