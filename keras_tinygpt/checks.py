"""Argument checks that name the argument, the rule and the value received."""

import math
import mmap
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

_CHUNK_IDS = 1 << 24


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


def check_ids(
    ids: Any, vocab_size: int | None = None, name: str = "ids", least: int = 0
) -> np.ndarray:
    """Returns `ids` as a one-dimensional integer array, or raises ValueError.

    Args:
        ids: array or list; a memory-mapped array is not copied, and read (a piece at
            a time) only if `vocab_size` is given.
        vocab_size: if given, every id must be below it and at least 0.
        name: what the message calls the argument.
        least: fewest tokens there may be.
    """
    ids = np.asanyarray(ids)
    if ids.ndim and len(ids) < least:
        raise ValueError(f"{name} must hold at least {least} tokens, got {len(ids)}")
    if ids.shape == (0,):
        return ids.astype(ids.dtype if ids.dtype.kind in "iu" else np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a one-dimensional integer array, "
            f"got shape {ids.shape} and dtype {ids.dtype}"
        )
    if vocab_size is not None:
        for start in range(0, len(ids), _CHUNK_IDS):
            _check_range(ids, start, vocab_size, name)
    return ids


def _check_range(ids: np.ndarray, start: int, vocab_size: int, name: str) -> None:
    part = ids[start : start + _CHUNK_IDS]
    if part.min() < 0 or part.max() >= vocab_size:
        index = int(np.argmax((part < 0) | (part >= vocab_size)))
        raise ValueError(
            f"{name} must lie between 0 and {vocab_size - 1} "
            f"(vocab_size={vocab_size}), got {part[index]} at index {start + index}"
        )
    release_pages(ids)


def release_pages(array: np.ndarray) -> None:
    """Gives back the memory that a read-only memory map has been read into.

    The system would take it when it is short of memory; what is read again comes from
    the file. Other arrays stay as they are.
    """
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if isinstance(root.base, mmap.mmap) and getattr(root, "mode", None) == "r":
        if hasattr(mmap, "MADV_DONTNEED"):
            root.base.madvise(mmap.MADV_DONTNEED)
