"""Mistakes as users make them, each in a model, a loss or an optimizer of their own (`planted/`): all are found.

Each is named by layout and by what differs first: by the parameter where the loss is right.
"""

import pytest

HEAD, FIRST_UP = "head.bias", "blocks.1.up.kernel"
# Of each file: what it has (the rest is of `sound`), a layout that is wrong and one that is not, what must be named and
# how many times the reference it is.
PLANTED = {
    "missing_psum": ("loss", "rows", None, ("loss", "loss"), None, "copies on the devices differ"),
    "double_psum": ("loss", "rows", None, ("gradient", HEAD), 8, "added up twice"),
    "local_count": ("loss", "rows", "accum", ("gradient", HEAD), 8, "a sum where the mean belongs"),
    "mean_of_device_means": ("loss", "rows", None, ("gradient", HEAD), None, "unequal counts"),
    "mean_of_micro_batches": ("loss", "accum", "rows", ("gradient", HEAD), None, "unequal counts"),
    "mean_of_rows": ("loss", "packing", "fsdp", ("gradient", HEAD), None, "mean of means"),
    "scaled_balance": ("loss", "rows", "accum", ("scalar", "balance_loss"), None, "the number of devices"),
    "dropped_token": ("loss", "tokens", "rows", ("gradient", HEAD), None, "tokens at a border"),
    "shifted_labels": ("loss", "tokens", "rows", ("gradient", HEAD), None, "tokens at a border"),
    "restarted_positions": ("model", "tokens", "rows", ("gradient", HEAD), None, "a part is missing"),
    "leaking_documents": ("model", "packing", "rows", ("gradient", HEAD), None, "a part is missing"),
    "local_statistics": ("model", "rows", None, ("gradient", HEAD), None, "statistic of one part"),
    "batch_norm": ("model", "accum", "rows", ("state", "batch_norm.mean"), None, "changes the state anew"),
    "local_average": ("model", "rows", "packing", ("state", "average"), None, "copies on the devices differ"),
    "shared_dropout": ("model", "rows", "accum", ("stream", "noise.noise.key"), 1 / 8, "same noise"),
    "unshared_dropout": ("model", "tensor", "accum", ("stream", "noise.noise.key"), 2, "draw their own"),
    "missing_psum_backward": ("model", "tensor", "rows", ("gradient", "blocks.1.down.kernel"), 1 / 2, "psum"),
    "wrong_gather": ("model", "tensor", "rows", ("gradient", HEAD), None, "a part is missing"),
    "stopped_gradient": ("model", "tensor", "rows", ("gradient", FIRST_UP), 0, "stop_gradient"),
    "averaged_weight": ("model", "fsdp", "rows", ("gradient", "blocks.1.down.kernel"), 1 / 8, "a mean where the sum"),
    "local_norm": ("optimizer", "fsdp", "rows", ("update", HEAD), None, ""),
    "constant_count": ("loss", "accum", "rows", ("gradient", HEAD), 1 / 4, "divided twice"),
    "divided_by_devices": ("loss", "rows", "accum", ("gradient", HEAD), 1 / 8, "divided twice"),
    "local_smoothing": ("loss", "rows", "accum", ("gradient", HEAD), None, "another weight"),
    "balance_in_the_sum": ("loss", "accum", "rows", ("gradient", HEAD), None, "a small term has another weight"),
    "local_probabilities": ("loss", "rows", None, ("scalar", "balance_loss"), None, "copies on the devices differ"),
    "labels_of_the_next": ("loss", "packing", "rows", ("gradient", HEAD), None, "a part is missing"),
    "continued_positions": ("model", "packing", "rows", ("gradient", HEAD), None, "a part is missing"),
    "segments_at_border": ("model", "tokens", "rows", ("gradient", HEAD), None, "a part is missing"),
    "local_mask": ("model", "tokens", "rows", ("gradient", HEAD), None, "a part is missing"),
    "pieces_behind": ("model", "tokens", "rows", ("gradient", HEAD), None, "a part is missing"),
    "local_capacity": ("model", "rows", None, ("gradient", HEAD), None, "a part is missing"),
    "local_experts_balance": ("loss", "experts", "fsdp", ("scalar", "balance_loss"), None, "copies on the devices"),
    "dropped_by_experts": ("model", "experts", "rows", ("gradient", HEAD), None, "nearly the same"),
    "shared_expert_twice": ("model", "experts", "accum", ("gradient", "blocks.1.shared"), 2, "added up twice"),
    "local_rms": ("model", "tensor", "rows", ("gradient", HEAD), None, "nearly the same"),
    "narrow_weight": ("model", "fsdp", "rows", ("gradient", HEAD), None, "a narrower type"),
    "bias_on_each": ("model", "tensor", "rows", ("gradient", HEAD), None, "another weight"),
    "unsummed_bias": ("model", "rows", "accum", ("gradient", "blocks.1.mix.bias"), None, "copies on the devices"),
    "unsummed_scale": ("model", "tensor", "rows", ("gradient", "norm.scale"), None, "copies on the devices differ"),
    "partial_gradient": ("model", "tensor", "rows", ("gradient", "norm.scale"), None, "copies on the devices differ"),
    "tied_in_one_copy": ("model", "tensor", "rows", ("gradient", "embedding.embedding"), None, "a part is missing"),
    "frozen_table": ("model", "fsdp", "rows", ("gradient", "position.embedding"), None, "the reference is 0"),
    "clipped_in_parts": ("model", "accum", "rows", ("gradient", "norm.scale"), 1 / 2, "of one part"),
    "constant_key": ("model", "accum", "rows", ("gradient", HEAD), None, "a part is missing"),
    "drawn_in_parts": ("model", "rows", "accum", ("initial", FIRST_UP), None, "with one key"),
    "counted_twice": ("optimizer", "rows", "accum", ("update", HEAD), 8**-0.5, "counts each copy"),
    "rate_of_devices": ("optimizer", "rows", "accum", ("update", HEAD), 8, "the number of devices"),
    "one_copy": ("optimizer", "rows", "fsdp", ("update", HEAD), None, "copies on the devices differ"),
}
PACKED = {"phases": [{"steps": 1, "batch_size": 16, "seq_len": 33, "packing": "documents"}]}
EXTRA = {"segments_at_border": PACKED, "local_experts_balance": {"model": "layouts.planted.mixture:build"}}
"""More fields of a config."""


def fields(name, part):
    """The fields of a config with one part of a file, and the others of the sound one."""
    parts = {"model": "sound:build", "loss": "sound:loss"} | {part: f"{name}:{'build' if part == 'model' else part}"}
    return {field: f"layouts.planted.{value}" for field, value in parts.items()}


def of_kind(result, kind):
    return next(each for each in result.differences if each.kind == kind)


def check(checked, name):
    part, wrong, right, (kind, what), ratio, words = PLANTED[name]
    report = checked(*{wrong, right} - {None}, **fields(name, part) | EXTRA.get(name, {}))
    results = {result.layout: result for result in report.results}
    assert not report.agree
    assert right is None or results[right].status == "agrees", results[right]
    assert results[wrong].status == "differs", results[wrong]
    found = of_kind(results[wrong], kind)
    assert found.name == what
    assert words in found.meaning
    if ratio is not None:
        assert found.ratio == pytest.approx(ratio, abs=1e-3)
    return results[wrong]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PLANTED.keys() - {"stopped_gradient"}))
def test_every_mistake_is_named(checked, name):
    check(checked, name)


@pytest.mark.long
def test_the_order_is_of_the_backward_pass(checked):
    """The loss is right: what is named first is where the backward pass comes first, and what follows is behind it."""
    result = check(checked, "stopped_gradient")
    assert not [each for each in result.differences if each.kind in ("loss", "scalar")]
    names = [each.name for each in result.differences]
    assert names[:2] == ["blocks.1.up.kernel", "blocks.1.norm.scale"]
    assert names.index("blocks.0.up.kernel") > names.index("blocks.1.norm.scale")
    assert names[-1] in ("embedding.embedding", "position.embedding")
    assert result.first_gradient.name == "blocks.1.up.kernel"
