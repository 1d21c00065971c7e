"""The checks of shapes and types in paceline's signatures, at a fraction of jaxtyping's own price.

jaxtyping's import hook wraps every function in `jaxtyping.jaxtyped`, which binds the arguments of each call and checks
them twice, for the shapes' sake, whether the signature has shapes or not. beartype alone checks both in one pass;
it needs jaxtyping's memory of axes around it only where the signature has a shape.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

# The same error as jaxtyping's, which is a TypeError: what code that reads foreign data would meet without checks.
_strict = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
stock: Callable[..., Any] = jaxtyping.jaxtyped


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, list | tuple):  # the parameters of a Callable
        return any(map(_has_shape, hint))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))


def jaxtyped(checked: Any = None, *, typechecker: Any = None) -> Any:
    """Stand in for `jaxtyping.jaxtyped`: the same violations raise the same error. `typechecker` means beartype."""
    if checked is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    hints = getattr(checked, "__annotations__", {}).values()
    plain = isinstance(checked, types.FunctionType) and not (
        inspect.isgeneratorfunction(checked)
        or inspect.iscoroutinefunction(checked)
        or any(isinstance(hint, str) for hint in hints)  # beartype would want to resolve it
    )
    if not plain:
        return stock(checked, typechecker=typechecker)
    if not hints:
        return checked
    strict = _strict(checked)
    shapes = any(map(_has_shape, hints))

    @functools.wraps(checked)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return checked(*args, **kwargs)
        if not shapes:
            return strict(*args, **kwargs)
        with stock("context"):
            return strict(*args, **kwargs)

    return call


jaxtyping.jaxtyped = jaxtyped  # what the import hook names in every module of paceline
