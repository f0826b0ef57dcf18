"""A user-defined model, loss and optimizer, imported by the names of their functions and called."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.component import component


@component
class UserCodeConfig:
    """Replacements of the built-in Transformer and its cross-entropy."""

    model: str | None = None
    """Model of your own, "module:function": build(config, rngs) returns an nnx.Module from int32[B, L] tokens to [B, L,
    vocab_size] logits, or to the input of your loss. Default: the built-in Transformer."""
    loss: str | None = None
    """Loss of your own, "module:function": loss(model, batch) returns a scalar, (scalar, aux), or a mapping with "loss"
    and, if you minimize a second term, "balance_loss". Default: the mean cross-entropy of the next token."""
    base_widths: str | None = None
    """For parametrization mup of a model whose widths are other fields than dim, "module:function": base_widths(config)
    returns the fields at the base width, such as {"dim": 64, "hidden_dim": 256}."""
    model_args: dict[str, Any] | None = None
    """Values of your own, which the build of your model or optimizer reads as config.model_args; --model_args.NAME
    VALUE sets a single one."""

    def __post_init__(self) -> None:
        for name in ("model", "loss", "base_widths"):
            split_name(name, getattr(self, name) or "module:function")
        for key in self.model_args or {}:
            if not isinstance(key, str):
                raise UserError(f"model_args: {key!r} is not a name: its keys must be text")


def import_function(field: str, name: str) -> Callable[..., Any]:
    """The function `name`, "module:function", of a config's `field`; modules in the working directory are found too.

    Raises ValueError where there is no such module, or no callable of that name in it. Errors while importing an
    existing module pass through.
    """
    module_name, attributes = split_name(field, name)
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)  # as with `python -m`, so that a name is found however the run was started
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise  # the module itself needs another module that is missing
        raise UserError(
            f"{field} is {name!r}: there is no module {error.name!r}. Start in the folder that has it ({here} is "
            f"looked in), put that folder on PYTHONPATH, or install it"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(target, attribute):
            raise UserError(
                f"{field} is {name!r}: {getattr(target, '__file__', None) or module_name} has no {attribute!r}. Write "
                f"the name of a function that it defines"
            )
        target = getattr(target, attribute)
    if not callable(target):
        raise UserError(f"{field} is {name!r}: that is a {type(target).__name__}. Write the name of a function")
    return target


def call_function(field: str, name: str, function: Callable[..., Any], form: str, *arguments: Any) -> Any:
    """The result of a function of `import_function`, called with `arguments`. `form`: how it is to be written, such as
    "def build(config, rngs)".

    Raises ValueError where the arguments do not match its signature, or its own module raises one. Other errors are
    mistakes in the function, and pass through.
    """
    try:
        return function(*arguments)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # a mistake in the function; otherwise the call does not match its signature
        raise UserError(f"{field} is {name!r}: {error}: write it as `{form}`") from error
    except ValueError as error:
        path = getattr(sys.modules.get(function.__module__), "__file__", None)
        last = traceback.extract_tb(error.__traceback__)[-1]
        if last.filename != path:
            raise  # it does not come from a check of the arguments: a mistake in the function
        raise UserError(f"{field} is {name!r}: {error} ({path}, line {last.lineno})") from error


def is_function(name: str) -> bool:
    """Whether the value of a field is meant as "module:function", and not as a name of ours."""
    return ":" in name


def split_name(field: str, name: str) -> tuple[str, str]:
    """(module, function) of "module:function"; raises ValueError, which names the `field`, where it is no such name."""
    module, _, function = name.partition(":")
    words = [*module.split("."), *function.split(".")]
    if not all(word.isidentifier() for word in words):
        raise UserError(f'{field} is {name!r}: it must be "module:function", such as "mypkg.net:build"')
    return module, function
