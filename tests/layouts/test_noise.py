"""Random draws: those of every layout are the draws of one device, or the stream and the line are named."""

import pytest
from layouts.planted import noise

from roxxel_dist.process.exit_codes import UserError

STREAM = "noise.noise.key"
# A mistake of `planted/noise.py` -> words of the message.
PLANTED = {
    "index_of_the_device": "depend on the layout: the loss with them is",
    "number_of_devices": "depend on the layout: the loss with them is",
    "size_of_the_mesh": "depend on the layout: the loss with them is",
    "split_by_the_rows_of_a_device": "the same noise is used on several parts",
    "one_mask_for_all_devices": "the same noise is used on several parts",
    "rows_in_another_order": "depend on the layout: the loss with them is",
}
SOUND = (
    "whole_array",
    "a_key_for_each_row",
    "keys_of_rows_on_devices",
    "a_slice_of_the_whole",
    "by_a_scan",
    "drawn_and_not_used",
)


def of_kind(checked, kind, *layouts):
    fields = {"model": "layouts.planted.noise:build", "loss": "layouts.planted.noise:loss"}
    return checked(*layouts, seq_len=17, model_args={"kind": kind}, **fields)


@pytest.mark.long  # of the first test_the_command looks too
@pytest.mark.parametrize("kind", PLANTED)
def test_noise_that_depends_on_the_devices_is_named(checked, kind):
    (result,) = of_kind(checked, kind, "rows").results
    assert result.status == "differs"
    (found,) = result.differences
    assert (found.kind, found.name) == ("stream", STREAM)
    assert PLANTED[kind] in found.meaning
    if "depend" in found.meaning:
        assert f" (noise.py:{noise.kept.__code__.co_firstlineno + 1}) depend" in found.meaning


@pytest.mark.long
@pytest.mark.parametrize("kind", SOUND)
def test_sound_noise_agrees(checked, kind):
    layouts = ["rows", "tokens", "fsdp", "tensor", "accum", "virtual"]
    report = of_kind(checked, kind, *layouts)
    assert report.agree, report.results
    assert {result.layout for result in report.results if result.status == "agrees"} == set(layouts)


@pytest.mark.long
def test_a_stream_of_several_is_named(checked):
    """A layer of two draws the whole of its mask, and the other one that of a device."""
    report = checked("rows", seq_len=17, model="layouts.planted.noise:build_two", loss="layouts.planted.noise:loss")
    assert [each.name for each in report.results[0].differences] == ["second.key"]


@pytest.mark.long
def test_a_loss_that_asks_for_its_process(checked):
    report = of_kind(checked, "index_of_the_process", "rows")
    first, rows = report.results
    assert (first.layout, first.status, rows.status) == ("processes", "differs", "agrees")
    assert "ask for jax.process_index()" in first.differences[0].meaning
    assert not report.agree


@pytest.mark.long
def test_a_loss_that_asks_for_the_number_of_processes_is_a_note(checked):
    report = of_kind(checked, "number_of_processes", "rows")
    assert report.agree
    assert any("ask for jax.process_count()" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["of_numpy", "of_python"])
def test_noise_that_is_not_of_jax_is_a_line(checked, kind):
    with pytest.raises(UserError, match="random by itself: two traces"):
        of_kind(checked, kind, "rows")


@pytest.mark.long
def test_a_function_that_is_made_anew_in_each_trace_is_not_random(checked):
    assert of_kind(checked, "a_rule_of_its_own", "rows").agree


@pytest.mark.long
def test_what_is_not_looked_at_is_said(checked):
    report = of_kind(checked, "whole_array", "rows")
    assert report.notes[-1].startswith("not looked at: several processes at work")
