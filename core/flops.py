"""Floating-point operations of a function, counted from its jaxpr with every scan multiplied out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex

__all__ = ["count"]

_log = logging.getLogger(__name__)


def count(fn: Callable, *args: Any) -> float:
    """Returns the FLOPs of `fn(*args)`; args are arrays or ShapeDtypeStructs `[..]`, nothing is computed.

    Matrix products and convolutions count, at 2 a multiply-add; elementwise work does not. A scan counts its
    body `length` times (XLA's own cost analysis: once), a cond its dearest branch, a shard_map its body on
    every shard. A while loop, whose trips are not known, counts once, with a line in the log.
    """
    return _jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def _jaxpr(jaxpr: Any) -> float:
    return float(sum(_equation(equation) for equation in jaxpr.eqns))


def _equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot(equation)
    if name == "conv_general_dilated":
        return _conv(equation)
    inner = [_jaxpr(body) for body in _bodies(params)]
    if name == "cond":
        return max(inner, default=0.0)
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        shape = dict(params["mesh"].shape)
        manual = params.get("newly_manual_axes", params.get("manual_axes", shape))  # renamed within jax 0.x
        return math.prod(shape[axis] for axis in manual) * sum(inner)
    if name == "while" and any(inner):
        _log.warning("FLOPs: a while loop of unknown length counts once")
    return sum(inner)


def _bodies(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex.Jaxpr):
                yield item


def _dot(equation: Any) -> float:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracting)


def _conv(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    # The kernel's own input axis is already the channels of one group.
    _, inputs, *spatial = equation.params["dimension_numbers"].rhs_spec
    taps = kernel[inputs] * math.prod(kernel[axis] for axis in spatial)
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * taps
