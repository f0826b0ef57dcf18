"""What a compiled program costs, from its text; and what a traced one must cost."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import one_test

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.devices.hlo import _instruction
from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.devices.traced_flops import cudnn_flops, splash_flops, traced_flops
from roxxel_dist.model.attention.attend import attention

F32 = jnp.float32


def entry(*lines, before=""):
    return (
        f"HloModule m\n\n{before}\nENTRY %main (p: f32[8,8]) -> f32[8,8] {{\n"
        + "\n".join(f"  {x}" for x in lines)
        + "\n}\n"
    )


A, B = "%a = f32[8,16]{1,0} parameter(0)", "%b = f32[16,4]{1,0} parameter(1)"
DOT = "%d = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@one_test(
    ("lines", "flops"),
    [
        ((A, B, f"ROOT {DOT}"), 2 * 8 * 16 * 4),
        # A plain product as a TPU has it.
        (
            ("%a = bf16[8,2048,64]{2,1,0:T(8,128)(2,1)} parameter(0)", "%b = bf16[64,512,1]{1,0,2} parameter(1)",
             "ROOT %c = bf16[8,2048,512]{2,1,0:T(8,128)(2,1)S(1)} convolution(%a, %b), window={size=1}, "
             "dim_labels=0bf_io0->0bf"),
            2 * 8 * 2048 * 64 * 512,
        ),
        # Heads as a padded window, of which most places meet padding.
        (
            ("%a = bf16[8,2048,512,1,1]{2,1,0,3,4} parameter(0)", "%b = bf16[512,8,3,64,1]{3,2,1,0,4} parameter(1)",
             "ROOT %c = bf16[8,2048,8,3,64]{4,1,2,0,3:T(8,128)(2,1)} convolution(%a, %b), "
             "window={size=3x1x8 pad=2_2x0_0x7_7 rhs_reversal=1x0x1}, dim_labels=1bf20_i20o1->1b20f"),
            2 * 8 * 2048 * 512 * 8 * 3 * 64,
        ),
        # A window of three over four places: two of the twelve meet padding.
        (
            ("%a = f32[4,1,5]{2,1,0} parameter(0)", "%b = f32[3,5,7]{2,1,0} parameter(1)",
             "ROOT %c = f32[4,1,7]{2,1,0} convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=0bf_0io->0bf"),
            2 * 10 * 5 * 7,
        ),
        (
            ("%a = bf16[8,16]{1,0} parameter(0)", "%b = bf16[16,4]{1,0} parameter(1)",
             'ROOT %c = (bf16[8,4]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
             'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'),
            2 * 8 * 16 * 4,
        ),
        (
            ("%q = bf16[4,2048,8,64]{3,2,1,0} parameter(0)",
             'ROOT %c = (bf16[4,8,2048,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), '
             'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL", '
             '"sliding_window_length": 0}'),
            2 * 2 * 4 * 8 * 2048 * 1024 * 64,
        ),
    ],
)  # fmt: skip
def test_flops_of_an_instruction(lines, flops):
    assert program_cost(entry(*lines), [0]).flops == flops


LOOP = """%body (s: (s32[], f32[8,16], f32[16,4])) -> (s32[], f32[8,16], f32[16,4]) {
  %s = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  %a = f32[8,16]{1,0} get-tuple-element(%s), index=1
  %b = f32[16,4]{1,0} get-tuple-element(%s), index=2
  DOT
  %k = s32[] get-tuple-element(%s), index=0
  %step = s32[] constant(STEP)
  %grown = s32[] add(%k, %step)
  ROOT %t = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) tuple(%grown, %a, %b)
}

%less (x: s32[], y: s32[]) -> pred[] {
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %lt = pred[] compare(%x, %y), direction=LT
}

%cond (s.1: (s32[], f32[8,16], f32[16,4])) -> pred[] {
  %s.1 = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(5)
  COND
}
""".replace("DOT", DOT)


@one_test(
    ("condition", "step", "known", "trips", "is_open"),
    [
        ("ROOT %lt = pred[] compare(%i, %n), direction=LT", 1, "", 5, False),
        ("ROOT %lt = pred[] compare(%i, %n), direction=LT", 2, "", 3, False),
        ("ROOT %lt = pred[] fusion(%i, %n), kind=kLoop, calls=%less", 1, "", 5, False),
        ("ROOT %lt = pred[] compare(%i, %n), direction=NE", 1, "", 1, True),
        (
            "ROOT %lt = pred[] compare(%i, %n), direction=NE", 1,
            ', backend_config={"known_trip_count":{"n":"7"}}', 7, False,
        ),
        (
            "ROOT %lt = pred[] compare(%i, %n), direction=NE", 1,
            ', metadata={op_name="jit(f)/transpose(jvp(mean_trips_2.5))/while"}', 2.5, False,
        ),
    ],
)  # fmt: skip
def test_what_is_in_a_loop_counts_as_often_as_it_runs(condition, step, known, trips, is_open):
    text = entry(
        "%zero = s32[] constant(0)", A, B, "%t = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) tuple(%zero, %a, %b)",
        f"ROOT %w = (s32[], f32[8,16]{{1,0}}, f32[16,4]{{1,0}}) while(%t), condition=%cond, body=%body{known}",
        before=LOOP.replace("COND", condition).replace("STEP", str(step)),
    )  # fmt: skip
    found = program_cost(text, [0])
    assert (found.flops, found.has_open_loops) == (trips * 2 * 8 * 16 * 4, is_open)


@one_test(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4,'b'=1] {'a'}", [[0, 1, 2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_which_devices_take_part(text, groups):
    line = f"  %x = f32[8]{{0}} all-reduce(%a), channel_id=1, {text}, to_apply=%add"
    assert _instruction(line).groups(4) == groups


@pytest.mark.parametrize(
    ("kind", "result", "sent", "network"),
    [
        ("all-gather", "f32[32]", 8 * 4 * 3, 64 / 2),
        ("all-reduce", "f32[8]", 2 * 32 * 3 / 4, 32 / 2),
        ("reduce-scatter", "f32[2]", 32 * 3 / 4, 16 / 2),
        ("all-to-all", "f32[8]", 32 * 3 / 4, 16 / 2),
    ],
)
def test_bytes_that_a_device_sends(kind, result, sent, network):
    """Of 32 bytes a device, over four devices on two hosts."""
    lines = (
        "%p = f32[8]{0} parameter(0)",
        f"ROOT %x = {result}{{0}} {kind}(%p), replica_groups=[1,4]<=[4], dimensions={{0}}",
    )
    found = program_cost(entry(*lines), [0, 0, 1, 1])
    assert dict(found.collectives) == {kind: sent}
    assert found.network_bytes == network
    assert program_cost(entry(*lines), [0, 0, 0, 0]).network_bytes == 0
    apart = [line.replace(f" {kind}(", f" {kind}-start(") for line in lines]
    assert program_cost(entry(*apart), [0, 0, 1, 1]).collectives == {kind: sent}


def test_a_collective_that_overlaps_with_computing_is_one():
    """Its start, the computing beside it and its end are fusions that all name it."""
    fused = "".join(
        f"""%fused.{i} (p.{i}: f32[8]) -> f32[32] {{
  %p.{i} = f32[8]{{0}} parameter(0)
  ROOT %g.{i} = f32[32]{{0}} all-gather(%p.{i}), channel_id=7, replica_groups=[1,4]<=[4], dimensions={{0}}
}}

"""
        for i in range(3)
    )
    lines = (
        "%a = f32[8]{0} parameter(0)",
        *(f"%f{i} = f32[32] fusion(%a), kind=kCustom, calls=%fused.{i}" for i in range(3)),
    )
    assert program_cost(entry(*lines, before=fused), [0] * 4).collectives == {"all-gather": 96}


def test_a_collective_that_overlaps_with_a_loop_is_one():
    """The loop's turns carry it on, and have one of their own."""
    gather = "all-gather(%p.{0}), channel_id={1}, replica_groups=[1,4]<=[4], dimensions={{0}}"
    fused = "".join(
        f"%fused.{i} (p.{i}: f32[8]) -> f32[32] {{\n"
        f"  %p.{i} = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %g.{i} = f32[32]{{0}} {gather.format(i, channel)}\n}}\n\n"
        for i, channel in enumerate([7, 7, 8])
    )
    body = """%turn (s: f32[8]) -> f32[8] {
  %s = f32[8]{0} parameter(0)
  %more = f32[32] fusion(%s), kind=kCustom, calls=%fused.1
  %new = f32[32] fusion(%s), kind=kCustom, calls=%fused.2
  ROOT %same = f32[8]{0} copy(%s)
}

"""
    lines = (
        "%a = f32[8]{0} parameter(0)",
        "%f = f32[32] fusion(%a), kind=kCustom, calls=%fused.0",
        'ROOT %w = f32[8]{0} while(%a), condition=%no, body=%turn, backend_config={"known_trip_count":{"n":"5"}}',
    )
    found = program_cost(entry(*lines, before=fused + body), [0] * 4)
    assert found.collectives == {"all-gather": (1 + 5) * 96}


def test_a_collective_that_another_core_of_the_chip_does_counts():
    """A TPU7x has cores for it, which a call starts."""
    called = """%apart (p: f32[8], t: token[]) -> f32[32] {
  %t = token[] parameter(1)
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[32]{0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}

"""
    lines = (
        "%a = f32[8]{0} parameter(0)",
        '%s = ((f32[8]{0}), f32[32]{0}, s32[]) call-start(%a), async_execution_thread="sparsecore", to_apply=%apart',
        "ROOT %d = f32[32]{0} call-done(%s)",
    )
    found = program_cost(entry(*lines, before=called), [0] * 4)
    assert (found.collectives, found.bytes_accessed) == ({"all-gather": 96}, 0)


def test_collectives_of_one_channel_are_several():
    """Keys and values of a `shard_map`, of which jax gives all one channel."""
    gather = "f32[32]{0} all-gather(%a), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}"
    lines = "%a = f32[8]{0} parameter(0)", f"%k = {gather}", f"%v = {gather}"
    assert program_cost(entry(*lines), [0] * 4).collectives == {"all-gather": 2 * 96}


def test_a_sum_that_is_scattered_is_no_whole_sum():
    fused = """%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %r = f32[8]{0} all-reduce(%p), channel_id=7, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %s = f32[2]{0} dynamic-slice(%r), dynamic_slice_sizes={2}
}
"""
    lines = "%a = f32[8]{0} parameter(0)", "%f = f32[2]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1"
    assert program_cost(entry(*lines, before=fused), [0] * 4).collectives == {"reduce-scatter": 24}


def test_a_slice_of_what_is_stacked_is_read_and_no_more():
    fused = """%fused (p0: f32[24,64,64], p1: s32[]) -> f32[64,64] {
  %p0 = f32[24,64,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,64,64]{2,1,0} dynamic-slice(%p0, %p1, %z, %z), dynamic_slice_sizes={1,64,64}
  ROOT %r = f32[64,64]{1,0} bitcast(%s)
}
"""
    lines = (
        "%w = f32[24,64,64]{2,1,0} parameter(0)", "%i = s32[] parameter(1)",
        "ROOT %f = f32[64,64]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused",
    )  # fmt: skip
    assert program_cost(entry(*lines, before=fused), [0]).bytes_accessed == 2 * 64 * 64 * 4 + 4
    on_chip = [line.replace("f32[64,64]{1,0} fusion", "f32[64,64]{1,0:T(8,128)S(1)} fusion") for line in lines]
    assert program_cost(entry(*on_chip, before=fused), [0]).bytes_accessed == 64 * 64 * 4 + 4


UPDATE = "%{} = f32[24,64] dynamic-update-slice(%{}, %s, %i, %z)"


@pytest.mark.parametrize(
    ("results", "lines", "moved"),
    [
        (1, ["ROOT " + UPDATE.format("r", "a")], 1),
        (1, [UPDATE.format("u", "a"), "ROOT %r = f32[24,64] bitcast(%u)"], 1),
        (2, [UPDATE.format("u", "a"), UPDATE.format("v", "b"), "ROOT %r = (f32[24,64]) tuple(%u, %v)"], 2),
        # the second result is written whole, and its operand read
        (2, [UPDATE.format("u", "a"), "%v = f32[24,64] copy(%c)", "ROOT %r = (f32[24,64]) tuple(%u, %v)"], 1 + 2 * 24),
    ],
)
def test_what_a_scan_keeps_is_written_a_slice_a_turn(results, lines, moved):
    operands = "f32[24,64]", "f32[24,64]", "f32[24,1,64]", "f32[1,64]", "s32[]"
    inner = [
        f"%{name} = {kind} parameter({number})"
        for number, (name, kind) in enumerate(zip("abcsi", operands, strict=True))
    ]
    fused = "\n  ".join(["%fused () -> () {", *inner, "%z = s32[] constant(0)", *lines]) + "\n}\n"
    outer = [f"%x{number} = {kind} parameter({number})" for number, kind in enumerate(operands)]
    result = f"({', '.join(['f32[24,64]'] * results)})" if results > 1 else "f32[24,64]"
    outer.append(f"ROOT %f = {result} fusion(%x0, %x1, %x2, %x3, %x4), kind=kLoop, calls=%fused")
    assert program_cost(entry(*outer, before=fused), [0]).bytes_accessed == (moved + 1) * 64 * 4 + 4


def layers(w, x):
    """Three layers, each used in a scan, and one product that no result needs."""
    _ = x @ w[0]
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()


def test_a_program_costs_what_its_trace_says():
    """Compiled for eight devices by the compiler that is here: each has an eighth, and the gradient is added once."""
    mesh = make_mesh()
    w, x = jax.ShapeDtypeStruct((3, 128, 128), F32), jax.ShapeDtypeStruct((64, 128), F32)
    step = jax.jit(jax.grad(layers))
    one = traced_flops(step.trace(w, x).jaxpr)
    assert one == (3 + 3 + 3) * 2 * 64 * 128 * 128  # forward, and two products backward
    rows = jax.ShapeDtypeStruct(x.shape, F32, sharding=NamedSharding(mesh, P("data")))
    whole = jax.ShapeDtypeStruct(w.shape, F32, sharding=NamedSharding(mesh, P()))
    text = step.lower(whole, rows).compile().as_text()
    found = program_cost(text, [0] * 8)
    assert found.flops * 8 == pytest.approx(one, rel=0.35)
    assert found.collectives["all-reduce"] >= 2 * 7 / 8 * 3 * 128 * 128 * 4


@pytest.mark.parametrize(("window", "blocks"), [(None, (16 + 1) / 2), (300, 2 - 1 / 16)])
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 8])
def test_attention_in_blocks_has_the_products_of_its_mask(devices, window, blocks):
    """Traced and compiled, forward and backward, whatever a device has of a row of 16 blocks: its loops run as often as
    the data says."""
    q = jax.ShapeDtypeStruct((1, 8192, 2, 16), F32)
    step = jax.jit(jax.grad(lambda q: attention(q, q, q, window=window).sum()))
    with jax.set_mesh(phase_mesh(make_mesh(devices), 1)):
        traced = step.trace(q)
        program = traced.lower().compile()
    flops = 7 * 2 * (2 * 16) * 8192 * 512 * blocks
    assert traced_flops(traced.jaxpr) == flops
    assert devices * program_cost(program.as_text(), [0] * devices).flops == flops


def _shard_map_of(devices):
    """A product whose rows lie on so many devices."""
    mesh = jax.make_mesh((devices,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))


@one_test(
    ("program", "flops"),
    [
        (lambda a: a @ a.T, 2 * 8 * 8 * 16),
        (jax.checkpoint(lambda a: (a @ a.T).sum()), 2 * 8 * 8 * 16),
        (lambda a: jax.lax.fori_loop(0, 4, lambda i, x: x @ x.T @ x, a), 4 * 2 * 2 * 8 * 8 * 16),
        (lambda a: jax.lax.cond(a[0, 0] > 0, lambda a: a @ a.T, lambda a: jnp.ones((8, 8)), a), 2 * 8 * 8 * 16),
        (lambda a: jax.vmap(lambda r: r @ a.T)(a), 2 * 8 * 8 * 16),
        (lambda a: jax.lax.ragged_dot(a, jnp.ones((3, 16, 4)), jnp.array([1, 2, 5])), 2 * 8 * 16 * 4),
        (lambda a: _shard_map_of(4)(a, jnp.ones((16, 4))), 2 * 8 * 16 * 4),
        (lambda a: jax.lax.conv(a[None, None], jnp.ones((1, 1, 1, 1)), (1, 1), "VALID"), 2 * 8 * 16),
    ],
)  # fmt: skip
def test_flops_of_a_trace(program, flops):
    assert traced_flops(jax.make_jaxpr(program)(jnp.ones((8, 16)))) == flops


def test_splash_attention_has_half_of_all_pairs_or_those_of_its_window():
    q = (4, 8, 2048, 64)
    whole = splash_flops("splash_mha_fwd", [(1, 4, 4), (1, 4, 4), q, q, q])
    assert whole == 2 * 2 * 4 * 8 * (2048 * 2048 / 2) * 64
    assert splash_flops("splash_mha_dkv", [q, q, q]) == 2 * whole
    assert splash_flops("splash_mha_fwd", [(1, 4, 1), (1, 4, 1), q, q, q]) == whole / 2
    part = (*q[:2], q[2] // 4, q[3])  # of a cut row a device has the keys of all, and half of its pairs with them
    assert splash_flops("splash_mha_fwd", [part, q, q]) == whole / 4


def test_a_window_of_cudnn_has_the_pairs_of_its_mask():
    """It is causal: the first tokens see as many as there are, and one of the whole row is as none."""
    q, k = (1, 1000, 2, 64), (1, 1000, 1, 64)
    for window in (1, 30, 999, 1000, 4096):
        pairs = sum(min(place + 1, window) for place in range(1000))
        assert cudnn_flops(q, k, False, True, window) == pytest.approx(2 * 2 * 2 * 64 * (pairs - min(window, 1000) / 2))
    assert cudnn_flops(q, k, True, True, 1000) == cudnn_flops(q, k, True, True, 0)


def test_kernels_of_a_loop_are_launched_in_each_turn():
    body = """%turn (s: f32[8]) -> f32[8] {
  %s = f32[8]{0} parameter(0)
  %new = f32[8]{0} add(%s, %s), metadata={op_name="jit(step)/while/body/add"}
  ROOT %same = f32[8]{0} copy(%new)
}

"""
    lines = (
        '%a = f32[8]{0} parameter(0), metadata={op_name="x"}',
        "%c = f32[8]{0} copy(%a)",
        'ROOT %w = f32[8]{0} while(%c), condition=%no, body=%turn, backend_config={"known_trip_count":{"n":"5"}}',
    )
    found = program_cost(entry(*lines, before=body), [0])
    assert [(kernel.name, kernel.launches) for kernel in found.kernels] == [("c", 1), ("new", 5), ("same", 5)]
    assert found.launches == 11
    assert sum(kernel.launches * kernel.bytes_accessed for kernel in found.kernels) == found.bytes_accessed
    # A copy that the compiler added belongs to its operand.
    assert [kernel.paths for kernel in found.kernels] == [(), *[("jit(step)/while/body/add",)] * 2]


def test_a_fusion_is_of_its_largest_product():
    fused = """%fused (p0: f32[8,16], p1: f32[16,4]) -> f32[8,4] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16,4]{1,0} parameter(1)
  %d = f32[8,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="mlp/dot"}
  ROOT %n = f32[8,4]{1,0} negate(%d), metadata={op_name="norms/neg"}
}

"""
    end = 'kind=kOutput, calls=%fused, metadata={op_name="norms/neg"}'
    lines = (A, B, f"ROOT %f = f32[8,4]{{1,0}} fusion(%a, %b), {end}")
    [kernel] = program_cost(entry(*lines, before=fused), [0]).kernels
    assert (kernel.flops, kernel.paths[0]) == (2 * 8 * 16 * 4, "mlp/dot")


def test_what_a_collective_sends_is_its_kernel():
    gather = "%g = f32[32]{0} all-gather(%a), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}"
    alone = "%n = f32[8]{0} all-reduce(%a), channel_id=2, replica_groups=[4,1]<=[4], to_apply=%add"
    found = program_cost(entry("%a = f32[8]{0} parameter(0)", gather, alone), [0, 0, 1, 1])
    [kernel] = found.kernels  # a group of one device sends nothing
    assert (kernel.sent_bytes, kernel.network_bytes) == (found.collectives["all-gather"], found.network_bytes)


def test_a_buffer_without_a_value_moves_nothing():
    lines = ('ROOT %a = f32[1024]{0} custom-call(), custom_call_target="AllocateBuffer"',)
    found = program_cost(entry(*lines), [0])
    assert (found.bytes_accessed, found.kernels) == (0, [])


@pytest.mark.parametrize(
    ("result", "target", "written"),
    [
        ("(bf16[8,4]{1,0}, s8[33554432]{0})", "__cublas$lt$matmul", 8 * 4 * 2),
        ("(bf16[8,4]{1,0}, f32[8]{0}, u8[4096]{0})", "__cudnn$norm", 8 * 4 * 2 + 8 * 4),
        ("s8[8,4]{1,0}", "__cublas$gemm", 8 * 4),  # a result
        ("(bf16[8,4]{1,0}, s8[32]{0})", "another", 8 * 4 * 2 + 32),
    ],
)
def test_the_scratch_memory_of_a_library_is_no_traffic(result, target, written):
    call = f'ROOT %c = {result} custom-call(%a), custom_call_target="{target}"'
    found = program_cost(entry("%a = bf16[8,16]{1,0} parameter(0)", call), [0])
    assert found.bytes_accessed == 8 * 16 * 2 + written


@pytest.mark.parametrize(
    ("source", "result", "moved"),
    [("", "S(1)", 1), ("S(1)", "", 1), ("", "", 2), ("S(1)", "S(1)", 0)],
    ids=["fetched", "written back", "within memory", "on the chip"],
)
@pytest.mark.parametrize(("opcode", "rows"), [("copy", 8), ("slice", 2)])
def test_an_asynchronous_copy_moves_what_it_copies(opcode, rows, source, result, moved):
    """Once, and not the whole of what a slice is of."""
    whole, part = f"f32[8,16]{{1,0:T(8,128){source}}}", f"f32[{rows},16]{{1,0:T(8,128){result}}}"
    types = f"({part}, {whole}, u32[]{{:S(2)}})" if opcode == "copy" else f"(({whole}), {part}, s32[]{{:S(2)}})"
    place = 'metadata={op_name="jit(step)/optimizer/add"}'
    lines = (
        f"%a = {whole} parameter(0), {place}",
        f"%s = {types} {opcode}-start(%a), slice={{[0:{rows}], [0:16]}}",
        f"ROOT %d = {part} {opcode}-done(%s)",
    )
    found = program_cost(entry(*lines), [0])
    assert found.bytes_accessed == moved * rows * 16 * 4
    assert [(kernel.name, kernel.bytes_accessed) for kernel in found.kernels] == [("s", found.bytes_accessed)]
