"""Argument checks that name the argument, the rule and the value received."""

import math
import numbers
from collections.abc import Sequence
from typing import Any


def check_int(name: str, value: Any, low: int = 1, high: int | None = None) -> int:
    """Returns `value` as an int, or raises ValueError unless `low <= value <= high`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {rule}, got {value}")
    return int(value)


def check_float(
    name: str,
    value: Any,
    low: float = 0.0,
    high: float = math.inf,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> float:
    """Returns `value` as a finite float inside the interval, or raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (math.isfinite(value) and above and below):
        left = "(" if low_open else "["
        right = ")" if high_open or math.isinf(high) else "]"
        raise ValueError(
            f"{name} must be a finite number in {left}{low:g}, {high:g}{right}, "
            f"got {value!r}"
        )
    return float(value)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Returns `value`, or raises ValueError unless it is one of `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")
    return value


def check_bool(name: str, value: Any) -> bool:
    """Returns `value`, or raises ValueError unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value
