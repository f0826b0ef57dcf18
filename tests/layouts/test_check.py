"""Sound models agree in all layouts, and what cannot be checked says why."""

import json

import jax
import pytest
from flax import nnx
from layouts.planted import drawn_in_parts, sound

from roxxel_dist import Config
from roxxel_dist.cli import main
from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
from roxxel_dist.layouts import own_code
from roxxel_dist.layouts.layout import Layout, reference_layout
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step import state

NOISE = ["--model", "layouts.planted.noise:build", "--loss", "layouts.planted.noise:loss"]
OWN = {"model": "layouts.planted.sound:build", "loss": "layouts.planted.sound:loss"}


def statuses(report):
    return {result.layout: result.status for result in report.results}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_built_in_model_agrees_in_all_layouts(checked):
    report = checked(dropout_rate=0.1, use_moe=True, num_blocks=1, seq_len=17)
    assert report.agree, report.results
    layouts = ["rows", "tokens", "fsdp", "tensor", "experts", "accum", "packing", "virtual"]
    assert statuses(report) == dict.fromkeys(layouts, "agrees")


@pytest.mark.long
def test_an_own_model_agrees_in_all_layouts(checked):
    report = checked(**OWN)
    assert report.agree, report.results
    assert {name for name, status in statuses(report).items() if status != "agrees"} == {"experts"}
    assert "no parameter names the axis 'expert'" in [result.text for result in report.results]
    whole = [result.layout for result in report.results if "each parameter is whole" in result.text]
    assert whole == ["fsdp", "tensor"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"loss": "layouts.odd:random_by_callback"}, "random by itself: two runs", marks=pytest.mark.long),
        ({"loss": "layouts.odd:without_return"}, "returned None"),
        pytest.param({"loss": "layouts.odd:random_by_numpy"}, "random by itself: two traces", marks=pytest.mark.long),
        pytest.param(
            {"model": "layouts.odd:build_of_ten_tokens"},
            "the loss is nan on one device.*Token ids go up to 36",
            marks=pytest.mark.long,
        ),
        ({"model": "layouts.odd:build_with_integers"}, "has no gradient"),
        ({"model": "layouts.odd:build_huge"}, "does not fit"),
    ],
)
def test_what_cannot_be_checked_is_a_line(checked, fields, words):
    with pytest.raises(UserError, match=words):
        checked("rows", **OWN | fields)


@pytest.mark.long
def test_integers_in_the_state_are_compared_and_refused_by_virtual_shards(checked):
    report = checked("rows", "accum", "virtual", **OWN | {"model": "layouts.odd:build_counting"})
    assert statuses(report) == {"rows": "agrees", "accum": "agrees", "virtual": "left out"}
    assert "'calls' of int32" in report.results[-1].text


@pytest.mark.long
def test_a_layout_that_is_left_out_says_why(checked):
    report = checked("packing", **OWN | {"loss": "layouts.odd:plain_loss"})
    assert statuses(report) == {"packing": "left out"}
    assert "do not take documents" in report.results[0].text
    with pytest.raises(UserError, match="no layout 'row'"):
        checked("row")


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ([], 0),
        ([*NOISE, "--model_args.kind", "index_of_the_device"], 1),
        (["--devices", "1"], 2),
        (["--devices", "100000"], 2),
    ],
)
def test_the_command(tokens, capsys, monkeypatch, flags, code):
    monkeypatch.setattr(state, "SLOW_S", 0)  # what a long start says is no part of the JSON
    words = ["check-layouts", "--data_path", str(tokens), "--layouts", "rows", "--json"]
    words += ["--dim", "32", "--num_blocks", "1", "--n_heads", "2", "--max_context", "32", *flags]
    assert main(words) == code
    out, error = capsys.readouterr()
    if code == 2:
        assert f"devices is {flags[-1]}: it must be from 2 to 64" in error
        return
    report = json.loads(out)
    assert report["agree"] is (code == 0)
    (result,) = report["results"]
    assert result["layout"] == "rows"
    named = {each["what"]: each["meaning"] for each in result["differences"]}
    assert list(named) == (["random stream noise.noise.key"] if code else [])
    assert all("depend on the layout: the loss with them is" in meaning for meaning in named.values())


@pytest.mark.parametrize(
    ("model", "partitionable", "made"), [(sound, True, 0), (drawn_in_parts, True, 2), (sound, False, 2)]
)
def test_the_initial_weights_are_computed_only_where_they_may_depend_on_the_devices(
    monkeypatch, model, partitionable, made
):
    mesh, computed = make_mesh(4), []
    monkeypatch.setattr(own_code, "_values", lambda build, layout: computed.append(layout) or {})
    single = reference_layout(mesh, batch_sharding(mesh), "rows")
    rows = Layout(name="rows", text="rows over 4 devices", mesh=mesh, sharding=batch_sharding(mesh))
    check = own_code.InitialCheck(lambda: model.build(Config(dim=32, vocab_size=40), nnx.Rngs(0)), single)
    with jax.threefry_partitionable(partitionable):
        assert check.differences(rows, []) == []
    assert len(computed) == made
