"""Sound models: of none of them a layout is said to differ."""

import pytest

SOUND = {"model": "layouts.planted.sound:build", "loss": "layouts.planted.sound:loss"}
BY_HAND = {"model": "layouts.planted.sound:build", "loss": "layouts.planted.sound:summed_by_hand"}
MOE = {"use_moe": True, "n_experts": 4}
# Fields of a config -> the model and loss are sound in all layouts that they can be computed in.
CONFIGS = [
    {},
    {"n_heads": 4, "kv_heads": 2},
    {"n_heads": 4, "kv_heads": 1},
    {"pos_encoding": "learned"},
    {"pos_encoding": "none"},
    {"pos_encoding": "alibi"},
    {"dropout_rate": 0.1},
    {"dropout_rate": 0.1, "attention_dropout": 0.1},
]
