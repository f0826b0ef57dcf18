"""Bits per byte as the metric of a sweep: where the text is not known, the first trial never begins."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from roxxel_dist import Roxxel
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.driver.checks import check_of_trainings
from roxxel_dist.sweep.space.sweep_file import sweep_of

LR = {"lr": {"min": 0.1, "max": 0.2}}


def check(metric, fields, path, parameters=LR):
    check_of_trainings(sweep_of({"metric": metric, "parameters": parameters}), Config.from_dict(fields), path)


def test_bits_per_byte_need_text(tmp_path):
    path = tmp_path / "ids"
    path.mkdir()
    with Roxxel(path / "ids_*.rox") as data:
        data.write([np.arange(99, dtype=np.uint16)], vocab_size=257)
    validation = {"validation": {"code": str(path)}}
    for metric in ({"name": "val_bpb"}, {"name": "mean_bpb", "weights": {"code": 1}}):
        with pytest.raises(ValueError, match=r"val_bpb.* needs the bytes of the text, and .*ids has no tokenizer"):
            check(metric, validation, path)
    check({"name": "mean_loss", "weights": {"code": 1}}, validation, path)
    with pytest.raises(ValueError, match="val_bpb is counted with the built-in loss alone"):
        check({"name": "val_bpb"}, {"loss": "mine:loss"}, path)
    train_tokenizer("byte", []).save(path / "tokenizer.json")
    check({"name": "val_bpb"}, {}, path)
    changing = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    Tokenizer(changing).save(path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"val_bpb needs the bytes of the text, and the shards in .*ids do not have"):
        check({"name": "val_bpb"}, {}, path)
    with pytest.raises(ValueError, match=r"val_bpb/code needs the bytes of the text"):
        check({"name": "val_bpb/code"}, validation, path)
    (tmp_path / "text.txt").write_text("text gets a tokenizer")
    check({"name": "val_bpb"}, {}, tmp_path / "text.txt")


def test_a_set_without_validation_text():
    with pytest.raises(ValueError, match=r"val_bpb/math is the validation of the data set 'math', and `val"):
        check({"name": "mean_bpb", "weights": {"code": 1, "math": 1}}, {"validation": {"code": "c"}}, None)
    own = {"loss": "mine:loss", "validation": {"code": "c"}}
    with pytest.raises(ValueError, match=r"val_contrastive/math is the validation of the data set 'math', and `val"):
        check({"name": "val_contrastive/math"}, own, None)
    check({"name": "val_contrastive/code"}, own, None)
    check({"name": "val_contrastive"}, {"loss": "mine:loss"}, None)
    check({"name": "val_loss/math"}, {}, None, {"validation": {"values": [{"math": "a"}, {"math": "b"}]}})
