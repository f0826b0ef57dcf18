"""What a run would be, against what it is: every number compared with the real thing."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from runs import rows
from states import init_state
from tables import one_test

from roxxel_dist import Config, Curriculum, Experiment, Phase
from roxxel_dist.cli.plan_table import layouts_table, table
from roxxel_dist.cluster.mesh import AXES, make_mesh
from roxxel_dist.devices.targets import Target
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.split import split_module
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import build_components
from roxxel_dist.run.estimate import target_layouts
from roxxel_dist.run.estimate.estimate import estimate
from roxxel_dist.run.estimate.figures import EstimateRequest
from roxxel_dist.run.estimate.inputs import spans
from roxxel_dist.run.estimate.target_layouts import LayoutComparison, LayoutCost, compare, ways
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetStep
from roxxel_dist.train.step.batch_layout import batch_layout
from roxxel_dist.train.step.optimizer import InitialState
from roxxel_dist.utils.display import size

SIMULATED = EstimateRequest(devices=8)
"""As many as the tests have anyway; what is compiled for them is compiled in half the time."""
SMALL = {
    "dim": 16, "num_blocks": 1, "n_heads": 2, "max_context": 16, "eval_iters": 1, "log_every": 1, "n_devices": 1,
    "phases": [{"steps": 4, "batch_size": 8, "seq_len": 17}, {"steps": 3, "batch_size": 8, "seq_len": 17}],
}  # fmt: skip
ONE = {**SMALL, "phases": SMALL["phases"][:1]}
ALL = {**ONE, "n_devices": 0}
OWN = {"model": "runs:build"}
"""Where the model is not the matter: it compiles soon."""
WIDE = {**ALL, "dim": 256, "phases": [{"steps": 4, "batch_size": 16, "seq_len": 17}]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the small config on a text, beside that text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    Experiment(Config(**SMALL, tokenizer_type="byte")).fit(folder / "text.txt", folder / "run")
    return folder / "run"


def on_first_device(tree):
    """Bytes of the buffers that a tree of arrays has on one device."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return sum(
        shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.device == jax.devices()[0]
    )


def real_state(config, data):
    """(the state before the first step, settings) as training makes them."""
    made = build_components(config, data)
    dtype = jnp.bfloat16 if config.use_bf16 else None
    return init_state(made.build, InitialState(made.optimizer), made.mesh(), fsdp=config.fsdp, dtype=dtype)[1:]


def test_it_is_what_the_run_is(run):
    found = estimate(Config(**SMALL, tokenizer_type="byte"), run / "data", EstimateRequest())
    summary, logged = json.loads((run / "model_summary.json").read_text()), rows(run)
    assert found.parameters == sum(found.parts.values()) == summary["parameters"]
    assert (found.steps, found.tokens) == (logged[-1]["step"], logged[-1]["tokens"]) == (7, 7 * 8 * 17)
    assert found.state["parameters"] / 1e6 == summary["weights_mem_MB"]
    assert found.state["optimizer"] / 1e6 == summary["optimizer_mem_MB"]
    ends = [[row for row in logged if row["phase"] == phase.phase][-1] for phase in found.phases]
    assert [row["step"] for row in ends] == [phase.first_step + phase.steps - 1 for phase in found.phases]
    assert np.diff([0, *(row["tokens"] for row in ends)]).tolist() == [phase.tokens for phase in found.phases]
    told = (run / "logs" / "rank-0.log").read_text()
    assert all(line in told for line in found.description.splitlines())
    assert found.validation.keys() == {""}
    assert found.validation[""] > 0
    assert (found.devices, found.processes, found.platform, found.simulated) == (1, 1, "cpu", False)
    assert found.seconds is None
    assert found.speed == "unknown: give tokens_per_s=NUMBER"
    assert found.problems == ()


def test_a_text_has_the_tokens_that_training_makes_of_it(run):
    found = estimate(Config(**SMALL, tokenizer_type="byte"), run.parent / "text.txt", EstimateRequest())
    assert found.datasets["self"]["tokens"] % 17, "no whole number of windows"
    counts = f"{found.datasets['self']['tokens']:,} tokens to train on, {found.validation['']:,} held out"
    assert counts in (run / "logs" / "rank-0.log").read_text()
    assert f"vocabulary {found.vocab_size:,}" in (run / "logs" / "rank-0.log").read_text()


def test_a_run_is_planned_with_its_data_and_speed(run):
    found = estimate(Config.from_yaml(run / "config.yaml"), None, EstimateRequest(run=run))
    measured = np.median([row["tokens_per_s"] for row in rows(run) if "tokens_per_s" in row])
    assert found.seconds == pytest.approx(found.predicted_tokens / measured)
    assert sum(phase.seconds for phase in found.phases) == pytest.approx(found.seconds)
    assert str(run) in found.speed
    given = estimate(Config(**ONE, tokenizer_type="byte"), None, EstimateRequest(run=run, tokens_per_s=100.0))
    assert given.seconds == given.predicted_tokens / 100
    assert given.predicted_tokens * 17 == given.tokens * 16
    assert "at 100 tokens/s (given)" in table(given)


@pytest.mark.long
def test_an_amended_run_keeps_its_plan(run, tmp_path):
    phases = [*SMALL["phases"], {"steps": 2, "batch_size": 8, "seq_len": 9}]
    config = Config(**{**SMALL, "phases": phases}, tokenizer_type="byte")
    new = Experiment(config).fit(None, tmp_path / "fork", fork=f"{run}@7")
    found = estimate(Config.from_yaml(new / "config.yaml"), None, EstimateRequest(run=new))
    assert "step 8: amended" in found.description
    assert (found.steps, found.tokens) == (rows(new)[-1]["step"], rows(new)[-1]["tokens"])


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"fsdp": True, "use_bf16": True, "optimizer": "lion", "grad_accum": 2},
    ],
)
def test_memory_is_that_of_the_real_state(corpus, more):
    config = Config(**{**WIDE, **more})
    state, settings = real_state(config, corpus)
    found = estimate(config, corpus_path(corpus), SIMULATED)
    [phase] = found.phases
    held = {"parameters": on_first_device(state.params), "optimizer": on_first_device(state.opt_state)}
    assert {name: found.state[name] for name in held} == held
    numbers = 4 * 7  # what a schedule is made of and the spike factor, float32[] each
    batch = 16 // 8 * 17 * 4
    assert phase.memory.arguments == on_first_device((state, settings)) + numbers + batch
    assert phase.memory.temporaries > 0
    assert phase.memory.peak == sum(
        (phase.memory.arguments, phase.memory.temporaries, phase.memory.results, phase.memory.code)
    )
    whole = {name: leaf.size * leaf.dtype.itemsize for name, leaf in state.params.items()}
    cut = {one["name"] for one in found.arrays if any(one["cut"])}
    assert cut == ({name for name, leaf in state.params.items() if leaf.size >= 1 << 16} if config.fsdp else set())
    assert found.state["parameters"] == sum(n // 8 if name in cut else n for name, n in whole.items())
    assert [one["name"] for one in found.arrays] == list(state.params)


@pytest.mark.parametrize(("count", "pieces", "shards"), [(0, 8, 0), (2, 2, 8), (1, 1, 0)])
def test_so_many_devices_share_a_copy_of_the_parameters(corpus, count, pieces, shards):
    made = build_components(Config(**WIDE, fsdp=True, fsdp_devices=count, virtual_shards=shards), corpus)
    state = made.steps(made.mesh(), 4).state
    for tree in (state.params, state.opt_state):
        large = [leaf for leaf in jax.tree.leaves(tree) if leaf.size >= 1 << 16]
        assert {leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in large} == {pieces}


@one_test(
    ("shape", "grad_accum", "shared"),
    [
        ((16, 17), 1, ("rows", 8, 0, "16 rows over 8 devices")),
        ((16, 17), 2, ("rows", 8, 0, "8 rows over 8 devices")),
        ((1, 17), 1, ("tokens", 8, 0, "1 row, cut along the tokens over 8 devices")),
        ((1, 10), 1, ("tokens", 8, 0, "1 row, cut along the tokens over 8 devices")),  # a remainder
        ((3, 17), 1, ("tokens", 8, 0, "3 rows, each cut along the tokens over 8 devices")),
        ((8, 17), 2, ("both", 8, 0, "4 rows over 8 devices, each cut along the tokens over 2")),
        ((6, 17), 1, ("both", 8, 0, "6 rows over 8 devices, each cut along the tokens over 4")),
        ((1, 8), 1, ("nothing", 1, 7, "1 row on each device; 7 of 8 devices repeat the work of others")),
    ],
)
def test_how_devices_share_a_batch(shape, grad_accum, shared):
    found = batch_layout(NamedSharding(make_mesh(), P("data", None)), *shape, grad_accum)
    assert (found.cut, found.pieces, found.repeated, str(found)) == shared


@pytest.mark.parametrize(
    ("axes", "spec", "text"),
    [
        (("x",), P("x", None), "would cut their tokens, and this one has the axes x 8)"),
        (AXES, P(None, "data"), "(without data_sharding, which is "),
    ],
)
def test_a_layout_of_the_users_own_is_told_what_would_cut_its_rows(axes, spec, text):
    mesh = jax.make_mesh((8, 1, 1, 1)[: len(axes)], axes, (AxisType.Auto,) * len(axes))
    found = str(batch_layout(NamedSharding(mesh, spec), 1, 18, 1))
    assert "1 row on each device; 7 of 8 devices repeat the work of others" in found
    assert text in found


def test_a_phase_ends_where_the_run_does(corpus):
    plan = Curriculum(corpus, [Phase(4, 8, 17), Phase(3, 16, 33)]).plan(1)
    assert [spans(plan, last) for last in (7, 5, 4)] == [[(0, 4), (4, 7)], [(0, 4), (4, 5)], [(0, 4)]]
    phases = [{"steps": steps, "batch_size": 16, "seq_len": 17} for steps in (4, 3)]  # one program for both
    config = Config(**{**ALL, **OWN, "phases": phases, "max_steps": 5, "grad_accum": 2})
    request = EstimateRequest(devices=8, processes=4, tokens_per_s=100.0)
    found = estimate(config, corpus_path(corpus), request).phases[1]
    assert (found.phase, found.first_step, found.steps, found.batch_size, found.seq_len) == (2, 5, 1, 16, 17)
    assert (found.tokens, found.flops) == (16 * 17, found.flops_per_token * 16 * 16)
    assert (found.rows_a_process, found.seconds) == (4, 16 * 16 / 100)


def test_the_devices_that_repeat_the_work_of_others_are_told(corpus):
    phases = [{"steps": 1, "batch_size": 1, "seq_len": 8}]
    config = Config(**{**ALL, **OWN, "phases": phases})
    found = estimate(config, corpus_path(corpus), EstimateRequest(devices=8, processes=4))
    assert [phase.rows_a_process for phase in found.phases] == [1]
    text = table(found)
    assert "8 cpu device(s) in 4 processes" in text
    assert "phase 1: a batch of 1 rows x 8 tokens: 1 row on each device; 7 of 8 devices repeat the work" in text


@pytest.mark.parametrize(
    ("rows", "length", "model"),
    [(16, 17, OWN), pytest.param(1, 33, {}, marks=pytest.mark.long)],
)
def test_devices_that_do_not_divide_virtual_shards(corpus, monkeypatch, rows, length, model):
    monkeypatch.setenv("PJRT_NPROC", "16")
    phases = [{"steps": 1, "batch_size": rows, "seq_len": length}]
    config = Config(**{**ALL, **model, "n_devices": 5, "max_context": 32, "virtual_shards": 8, "phases": phases})
    [phase] = estimate(config, corpus_path(corpus), EstimateRequest(processes=2)).phases
    assert (str(phase.layout), phase.rows_a_process) == ("8 virtual shards over 5 devices, 1 or 2 on each", rows)


def test_passes_are_what_the_rows_read(corpus, tmp_path):
    phases = [{"epochs": 1.5, "batch_size": 8, "seq_len": 17, "weights": {"self": 3, "more": 1}, "blend": "row"}]
    fields = SMALL | OWN | {"phases": phases, "datasets": {"more": corpus_path(corpus)}, "val_fraction": 0.0}
    config = Config(**fields)
    found = estimate(config, corpus_path(corpus), SIMULATED)
    plan = build_components(config, corpus).curriculum.plan(config.seed)
    read = np.bincount(np.concatenate([plan.rows(step).dataset for step in range(plan.total_steps)])) * 17
    for name, tokens in zip(plan.datasets, read, strict=True):
        assert found.datasets[name]["passes"] == pytest.approx(tokens / found.datasets[name]["tokens"], abs=0.05)
    assert found.phases[0].weights == {"self": 0.75, "more": 0.25}
    assert found.flops == pytest.approx(found.predicted_tokens * found.phases[0].flops_per_token)


def test_a_run_that_max_steps_ends(corpus):
    found = estimate(Config(**SMALL | OWN, max_steps=3), corpus_path(corpus), SIMULATED)
    assert (found.steps, found.tokens, len(found.phases)) == (3, 3 * 8 * 17, 1)
    assert found.notes == ("max_steps ends the run after step 3 of 7; the learning rate follows all 7",)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        pytest.param({"grad_accum": 1}, "", marks=pytest.mark.long),
        ({"grad_accum": 2, "fsdp": True}, "the gradient of 2 micro-batches is summed on each device, which takes "),
        pytest.param({"grad_accum": 2, "virtual_shards": 8}, "", marks=pytest.mark.long),
    ],
    ids=["one batch", "micro-batches", "virtual shards"],
)
def test_what_micro_batches_send_is_told(corpus, monkeypatch, fields, note):
    monkeypatch.setenv("PJRT_NPROC", "16")
    found = estimate(Config(**WIDE | fields), corpus_path(corpus), SIMULATED)
    told = [line for line in found.notes if "micro-batches" in line]
    assert len(told) == bool(note)
    assert all(line.startswith(note) for line in told)


def test_max_steps_makes_no_run_longer(corpus):
    found = estimate(Config(**ONE | OWN, max_steps=8), corpus_path(corpus), SIMULATED)
    assert found.notes == ("max_steps is 8, and the phases end after 4: give them more epochs, or steps, for more",)


def test_a_model_of_ones_own(corpus):
    config = Config(**ONE, model="own_model:build", loss="own_model:loss", model_args={"depth": 1})
    found = estimate(config, corpus_path(corpus), SIMULATED)
    params = split_module(nnx.eval_shape(build_components(config, corpus).build))[1]
    assert found.parameters == sum(leaf.size for leaf in params.values())
    assert list(found.parts) == ["embedding", "layers", "out"]
    assert found.phases[0].flops_per_token == 6 * found.parameters


def test_what_is_too_large_is_a_problem(corpus):
    config = Config(**ONE)
    fits = estimate(config, corpus_path(corpus), EstimateRequest(devices=8, device_memory_gb=1.0))
    [needs] = [phase.memory.peak for phase in fits.phases]
    assert (fits.problems, fits.memory_limit) == ((), 10**9)
    found = estimate(config, corpus_path(corpus), EstimateRequest(devices=8, device_memory_gb=(needs - 100) / 1e9))
    [problem] = found.problems
    assert problem.startswith(f"phase 1: 8 rows x 17 tokens: its step needs {size(needs)} of each device")
    cures = (
        "a smaller batch_size, a larger grad_accum, gradient_checkpointing, use_bf16 or bf16_compute, or more devices"
    )
    assert problem.endswith(f"use {cures}")
    again = estimate(config, corpus_path(corpus), SIMULATED)  # its program is in the cache by now
    assert again.phases[0].memory == fits.phases[0].memory


def test_the_kernel_of_attention_and_its_scores(corpus):
    fields = {"max_context": 2048, "batch_size": 8, "max_steps": 1, "head_size": 8}
    config = Config(**ONE | fields | {"phases": None, "attention": "cudnn"})
    found = estimate(config, corpus_path(corpus), SIMULATED)
    [phase] = found.phases
    heads, rows = config.dim // 8, 8 // found.devices
    assert (phase.attention, phase.score_bytes) == ("xla", rows * heads * (512 * 512 + 2048) * 4)
    assert "attention by cudnn is not simulated: the memory of phases is that of xla, in its place" in found.notes
    told = table(found)
    assert f"attention of phase 1: xla, scores in blocks, {size(phase.score_bytes)} per layer" in told
    with pytest.raises(UserError, match="attention is cudnn: cuDNN is for GPUs, and the devices here are cpu"):
        estimate(config, corpus_path(corpus), EstimateRequest())


def test_what_cannot_be_asked(corpus):
    config, data = Config(**ALL), corpus_path(corpus)
    for asked, message in (
        ({"devices": 0}, "devices is 0: it must be at least 1"),
        ({"processes": -1}, "processes is -1: it must be at least 1"),
        ({"tokens_per_s": 0.0}, "tokens_per_s is 0.0: it must be above 0"),
        ({"device_memory_gb": math.inf}, "device_memory_gb is inf: it must be above 0, and finite"),
        ({"devices": 4}, "devices is 4, and jax has made 8 cpu"),
        ({"processes": 3}, r"processes is 3, which does not divide the 8 device\(s\)"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate(config, data, EstimateRequest(**asked))
    with pytest.raises(UserError, match="n_devices is 2, which leaves none to 3 of 4 processes"):
        estimate(Config(**{**ONE, "n_devices": 2}), data, EstimateRequest(devices=8, processes=4))


def corpus_path(corpus):
    return str(corpus.shards[0].path.parent)


class Here(Target):
    """The devices of this process, by XLA's compiler for CPUs."""

    def devices(self):
        return jax.devices()[:2]

    def device_bytes(self, device):
        return None


def cost(fits, roofline_s, sent=0.0, peak=1, **fields):
    """A layout as a target's compiler finds it."""
    known = {
        "fits": fits,
        "peak_bytes": peak,
        "device_bytes": 8,
        "roofline_seconds": roofline_s,
        "compile_seconds": 1.0,
    }
    figures = {"flops_per_device": 1.0 if fits else None, "flops_ratio": 1.0, "bound_seconds": {"compute": 1.0}}
    step = TargetStep(**known, **figures, collectives={"all-gather": sent}, gathered={}, costs=())
    return LayoutCost(fields=fields, text="rows", state_bytes=peak, step=step)


def test_the_best_layout_is_first():
    """What fits before what does not, then by time, by what is sent and by memory; what was not compiled is last."""
    large = LayoutCost(fields={"fsdp": False}, text="rows", state_bytes=99, step=None)
    open_ways = [
        LayoutCost(fields={"fsdp": True}, text="", state_bytes=1, step=None, estimated_seconds=about, is_open=True)
        for about in (0.05, 0.3)
    ]
    best = [cost(True, 0.1, 5, 3, tensor_devices=2), cost(True, 0.2, 1), cost(True, 0.2, 2), cost(True, 0.2, 2, 4)]
    best += [*open_ways, cost(False, None, peak=9), large]
    assert sorted([*best[4:], *best[:4]], key=lambda each: each.order) == best
    about = {"target": "h100:1x8", "devices": 8, "device_kind": "NVIDIA H100", "device_bytes": 8, "phase": 2}
    found = LayoutComparison(**about, share=0.75, batch_size=32, seq_len=1025, layouts=tuple(best))
    text = layouts_table(found).splitlines()
    assert text[0].startswith("layouts of phase 2 (75% of the computed tokens), a batch of 32 rows x 1,025 tokens on 8")
    assert [line.split("  ")[0] for line in text[2:4]] == ["tensor_devices: 2", "nothing divided"]
    assert ["does not fit" in line for line in text[2:10]] == [False] * 6 + [True] * 2
    assert "not compiled, about 50 ms" in text[6]
    assert "tensor_devices: 2" in text[11:]
    assert any(line.startswith("not compiled: by FLOPs and bytes alone") for line in text)
    assert found.problems == ()
    [problem] = dataclasses.replace(found, layouts=(large,)).problems
    assert "phase 2: 32 rows x 1025 tokens: its training step fits the devices of h100:1x8 in no layout" in problem


def test_layouts_that_make_sense():
    """(fsdp_devices, 0 for all of them, or None without fsdp; tensor_devices) by model, devices and hosts; and those of
    experts."""
    moe = [way for way in ways(Config(use_moe=True, n_experts=6), 8, 2) if "expert_devices" in way]
    assert moe == [{"expert_devices": 2}, {"fsdp": True, "expert_devices": 2}]
    own = Config(model="own_model:build")
    for config, devices, hosts, expected in (
        (Config(), 1, 1, [(None, 1)]),
        (Config(), 2, 1, [(None, 1), (0, 1), (None, 2)]),
        (Config(), 6, 1, [(None, 1), (0, 1), (None, 2), (0, 2)]),
        (Config(), 8, 2, [(None, 1), (4, 1), (0, 1), (None, 2), (2, 2), (0, 2), (None, 4), (0, 4), (None, 8)]),
        (own, 8, 1, [(None, 1), (0, 1)]),
    ):
        found = [
            (way.get("fsdp_devices", 0) if way.get("fsdp") else None, way.get("tensor_devices", 1))
            for way in ways(config, devices, hosts)
        ]
        assert found == expected, (devices, hosts)


def test_layouts_are_compiled(corpus, monkeypatch):
    """On two devices of this process; where there is little memory, the step is tried with blocks computed again."""
    done = []
    compiler = TargetCompiler(Here("here", "cpu", (2,)), lambda what, is_done: done.append(what))
    components = build_components(Config(**ALL), corpus, devices=compiler.devices)
    found = compare(compiler, components)
    assert (found.devices, found.phase, found.share) == (2, 1, 1)
    assert {tuple(layout.fields) for layout in found.layouts} == {(), ("fsdp",), ("tensor_devices",)}
    assert all(layout.step.peak_bytes > layout.state_bytes > 0 for layout in found.layouts)
    assert not any("gradient_checkpointing" in what for what in done)
    kept = 8 * 17 // 2 * 16 * 4  # of a device's rows the input of the block, which is computed again
    compiler.device_bytes = sorted(layout.state_bytes for layout in found.layouts)[1] + kept  # so of two layouts
    small = compare(compiler, components)
    assert [layout.fits for layout in small.layouts] == [False] * 3
    assert [layout.step is None for layout in small.layouts] == [False, False, True]
    assert all(layout.fields["gradient_checkpointing"] is True for layout in small.layouts[:2])
    assert len(small.problems) == 1
    again = dataclasses.replace(components, config=dataclasses.replace(components.config, gradient_checkpointing=True))
    done.clear()
    compiler.device_bytes = None
    monkeypatch.setattr(target_layouts, "BUDGET_S", 0.0)  # the first two are compiled at once
    late = compare(compiler, again).layouts
    assert [layout.is_open for layout in late] == [False, False, True]
    assert late[2].step is None
    assert not any("gradient_checkpointing" in layout.fields for layout in late)


@pytest.mark.long
def test_a_run_with_virtual_shards_is_planned_for_a_target(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "16")  # of two shards; that of this process is another one
    phases = [{"steps": 4, "batch_size": 4, "seq_len": 17}]
    config = Config(**{**ONE, "dim": 192, "n_devices": 2, "virtual_shards": 2, "max_steps": 1, "phases": phases})
    run, programs = Experiment(config).fit(corpus_path(corpus), tmp_path / "run"), set()
    compiler = TargetCompiler(Here("here", "cpu", (2,)), lambda what, done: programs.add(what.split(", ")[-1]))
    config = Config.from_yaml(run / "config.yaml")
    found = estimate(config, None, EstimateRequest(run=run, target="v5e:1x2"), compiler=compiler)
    assert found.phases[0].target.flops_per_device > 0
    assert ("update" in programs, "update_block" in programs) == (False, True), programs


def test_a_table_of_its_own_for_looking_up_is_no_work():
    """The work of a token is counted on shapes alone, with embeddings that are not in the product too."""
    fields = {name: SMALL[name] for name in ("dim", "num_blocks", "n_heads", "max_context")}
    apart = {"weight_tying": False, "pos_encoding": "learned"}
    configs = [ModelConfig(**fields, vocab_size=256, **more) for more in ({}, apart)]
    tied, own = (nnx.eval_shape(lambda config=config: Transformer(config, nnx.Rngs(0))) for config in configs)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) for model in (tied, own)]
    assert sizes[0] < sizes[1]
    assert own.flops_per_token(16) == tied.flops_per_token(16)
