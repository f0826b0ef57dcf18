"""Which exceptions are the cluster's: the classes and messages of jax itself, where it raises them here."""

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError
from jax.experimental import checkify
from tables import one_test

from roxxel_dist.launcher.host.worker import is_runtime_failure


def caught(act):
    with pytest.raises(BaseException, match=r".") as error:
        act()
    return error.value


class OwnError(JaxRuntimeError):
    """Of a library on top of jax."""


class XlaRuntimeError(RuntimeError):
    """Of the user's own, with a name of jaxlib's."""


def caused(cause):
    try:
        raise ValueError("the step failed") from cause
    except ValueError as error:
        return error


def in_its_handler():
    try:
        raise JaxRuntimeError("UNAVAILABLE: connection reset")
    except JaxRuntimeError:
        raise TypeError("a mistake of the handler")  # noqa: B904


def callback():
    def wrong(x):
        raise ValueError("the user's function")

    kind = jax.ShapeDtypeStruct((), jnp.float32)
    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(wrong, kind, x))(jnp.float32(1)))


def checked():
    error, _ = checkify.checkify(lambda x: checkify.check(x > 0, "x must be above 0"))(jnp.float32(-1))
    error.throw()


def nan():
    with jax.debug_nans(True):
        jnp.log(jnp.float32(-1)).block_until_ready()


@one_test(
    ("error", "first_step", "infrastructure"),
    [
        (JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: connection abort"), False, True),
        (JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error"), False, True),
        (JaxRuntimeError("INTERNAL: NCCL operation ncclAllReduce failed: unhandled system error"), True, True),
        (JaxRuntimeError("UNAVAILABLE: the network card is gone"), True, True),
        (JaxRuntimeError("DEADLINE_EXCEEDED: barrier timed out"), True, True),
        (JaxRuntimeError("DATA_LOSS: HBM read error"), False, True),
        (JaxRuntimeError("ABORTED: the slice was reconfigured"), False, True),
        (JaxRuntimeError("the accelerator said nothing that is known"), False, True),
        (JaxRuntimeError("INVALID_ARGUMENT: shapes differ"), False, False),
        (JaxRuntimeError("UNIMPLEMENTED: no such operation"), False, False),
        (JaxRuntimeError("FAILED_PRECONDITION: DNN library initialization failed"), False, False),
        (JaxRuntimeError("Error dispatching computation: INVALID_ARGUMENT: INTERNAL is a name"), False, False),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 bytes"), True, False),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 bytes"), False, True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"), False, True),
        (ValueError("INVALID_ARGUMENT: shapes differ"), False, False),
        (ValueError("the field is UNKNOWN: 7"), False, False),
        (UnicodeError("UNKNOWN: x"), False, False),
        (OwnError("INTERNAL: x"), False, True),
        (XlaRuntimeError("INTERNAL: x"), False, False),
        (caused(JaxRuntimeError("INTERNAL: x")), False, True),
        (caused(caused(JaxRuntimeError("INVALID_ARGUMENT: x"))), False, False),
        (ExceptionGroup("of threads", [KeyError("x"), JaxRuntimeError("UNAVAILABLE: x")]), False, True),
        (KeyError("INTERNAL: x"), False, False),
        (MemoryError(), False, False),
    ],
)
def test_whose_an_exception_is(error, first_step, infrastructure):
    assert is_runtime_failure(error, first_step=first_step) == infrastructure


@pytest.mark.parametrize(
    "act",
    [in_its_handler, callback, checked, nan, lambda: jnp.ones(3) @ jnp.ones(4), lambda: jnp.zeros(1 << 52)],
)
def test_an_exception_that_jax_raises_for_the_program(act):
    """A callback of the user's, a check, a NaN, wrong shapes, and an array that no device has room for."""
    assert not is_runtime_failure(caught(act), first_step=True)
