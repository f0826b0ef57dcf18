"""Which part of a step a kernel belongs to."""

import jax
import jax.numpy as jnp
from tables import one_test

from roxxel_dist.cluster.step_parts import part_of
from roxxel_dist.devices.program_cost import program_cost


@one_test(
    ("paths", "part"),
    [
        (["jit(step)/jvp(mlp)/dot_general"], "mlp"),
        (["jit(step)/transpose(jvp(mlp))/dot_general"], "mlp backward"),
        (["jit(step)/transpose(jvp())/checkpoint/rematted_computation/attention/exp"], "attention backward"),
        (["jit(step)/jvp(attention)/norms/mul"], "norms"),  # the innermost
        (["jit(step)/optimizer/add"], "optimizer"),
        (["jit(step)/mul;jit(step)/optimizer/mul"], "other"),  # of equal instructions the first counts
        (["jit(step)/jvp()/transpose", "jit(step)/jvp(casts)/transpose"], "casts"),
        (["jit(step)/jvp()/dot_product_attention_fwd", ""], "other"),  # a word that only contains a name
        (["state.params['embedding.embedding']"], "other"),
        (["params[\\'blocks\\'][0][\\'attention\\'][\\'qkv\\']"], "other"),
        (["jit(step)/transpose(jvp())/add"], "other backward"),
        ([], "other"),
    ],
)
def test_the_innermost_named_scope_decides(paths, part):
    assert part_of(paths) == part


def test_a_gradient_keeps_the_scopes_of_what_it_is_of():
    """Also of a function with its own gradient, and of blocks that are computed again."""

    @jax.custom_vjp
    def squared(x):
        return x @ x

    squared.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))

    @jax.named_scope("experts")
    def again(x):
        return jnp.sin(x @ x)

    def loss(x):
        with jax.named_scope("mlp"):
            x = squared(x)
        return jax.checkpoint(again)(x).sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((32, 32))).compile().as_text()
    found = {}
    for kernel in program_cost(text, [0]).kernels:
        part = part_of(kernel.paths)
        found[part] = found.get(part, 0) + kernel.flops * kernel.launches
    product = 2 * 32**3
    assert {part: flops for part, flops in found.items() if flops} == {
        "mlp": product,
        "mlp backward": 2 * product,
        "experts backward": 3 * product,
    }
