"""Splits, training schedules and batches of windows over one array of token ids.

A window is `sequence_length` inputs and the same tokens one place on as targets, so it
covers `sequence_length + 1` ids. Which windows a run sees is one array of start
indices, drawn before training; there is no other randomness and no padding.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_tinygpt.checks import check_float, check_ids, check_int, release_pages

PART_NAMES = ("train", "valid", "test")
_CHUNK_ITEMS = 1 << 20


def split_ids(
    ids: np.ndarray,
    fractions: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
) -> tuple[np.ndarray, ...]:
    """Cuts ids into contiguous parts, first to last, without copying them.

    Args:
        ids: integer array (n,), memory-mapped or not.
        fractions: shares of n that add up to 1; a part ends at the share's floor.
            (0.9, 0.1) if neither `fractions` nor `counts` is given.
        counts: sizes in tokens instead; the last may be -1 for all that is left.
            Tokens beyond the last count are in no part.

    Returns:
        One view per part, each of at least one token.

    Example:
    >>> [part.tolist() for part in split_ids(np.arange(7), counts=(3, 2, -1))]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    ids = check_ids(ids)
    if counts is None:
        ends = _ends_of_fractions(
            len(ids), (0.9, 0.1) if fractions is None else fractions
        )
    elif fractions is None:
        ends = _ends_of_counts(len(ids), counts)
    else:
        raise ValueError("give fractions or counts, got both")
    starts = [0, *ends[:-1]]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end <= start:
            raise ValueError(
                f"ids has {len(ids)} tokens, too few for part {index} of the split "
                "to have one"
            )
    return tuple(ids[start:end] for start, end in zip(starts, ends, strict=True))


def split_parts(ids: np.ndarray, split: Sequence[float]) -> dict[str, np.ndarray]:
    """The parts by name, from fractions or, if all numbers are whole, from counts."""
    if len(split) not in (2, 3):
        raise ValueError(f"split must be 2 or 3 numbers, got {len(split)}")
    for value in split:
        check_float("split", value, -math.inf)
    if all(value == int(value) and value != 0 and abs(value) >= 1 for value in split):
        cut = split_ids(ids, counts=[int(value) for value in split])
    else:
        cut = split_ids(ids, fractions=split)
    return dict(zip(PART_NAMES, cut, strict=False))


def window_schedule(
    num_ids: int,
    sequence_length: int,
    steps: int,
    batch_size: int,
    seed: int = 0,
    name: str = "train_ids",
) -> np.ndarray:
    """Draws the start index of every window of a training run, uniformly.

    A longer run of the same seed begins with the same windows.

    Args:
        num_ids: length of the array of ids the windows lie in.
        sequence_length: inputs per window.
        steps: batches in the run.
        batch_size: windows per batch.
        seed: of the Philox stream.
        name: what the error message calls the array of ids.

    Returns:
        int64 array (steps, B) with entries from 0 to num_ids - sequence_length - 1.

    Raises:
        ValueError: the ids are fewer than one window needs, or an argument is not
            a positive integer.
    """
    _check_length(num_ids, sequence_length, name)
    check_int("steps", steps)
    check_int("batch_size", batch_size)
    check_int("seed", seed, 0)
    random = np.random.Generator(np.random.Philox(seed))
    return random.integers(0, num_ids - sequence_length, (steps, batch_size), np.int64)


def even_starts(
    num_ids: int, sequence_length: int, stride: int | None = None, name: str = "ids"
) -> np.ndarray:
    """Returns the start indices of evenly spaced windows, from 0 on.

    Args:
        num_ids: length of the array of ids the windows lie in.
        sequence_length: inputs per window.
        stride: distance between starts; `sequence_length` if None, so that each token
            but the first is a target once, up to a rest shorter than a window.
        name: what the error message calls the array of ids.

    Returns:
        int64 array (windows,).
    """
    _check_length(num_ids, sequence_length, name)
    stride = sequence_length if stride is None else check_int("stride", stride)
    return np.arange(0, num_ids - sequence_length, stride, dtype=np.int64)


def fingerprint_array(array: np.ndarray) -> str:
    """Returns the sha256 of an integer array's contents as little-endian int64.

    The same numbers give the same fingerprint whatever their dtype, shape and machine.
    """
    array = np.asanyarray(array)
    if array.dtype.kind not in "iu":
        raise ValueError(f"array must hold integers, got dtype {array.dtype}")
    array = array.reshape(-1)
    digest = hashlib.sha256()
    for start in range(0, len(array), _CHUNK_ITEMS):
        digest.update(array[start : start + _CHUNK_ITEMS].astype("<i8").tobytes())
    return digest.hexdigest()


class WindowDataset(keras.utils.PyDataset):
    """The batches of a schedule, gathered as they are asked for.

    Item i is `(inputs, targets)`, both int32 (B, T), targets one token ahead. With
    `steps_per_epoch`, successive epochs of one `fit` go on through the schedule. Pass
    `shuffle=False`: `fit` otherwise shuffles the order of the batches, unseeded.
    With a length and items by index it is a data source for grain too:
    `grain.MapDataset.source(dataset)`.

    Args:
        ids: integer array (n,) of any width; may be memory-mapped.
        starts: integer array (steps, B) of start indices into `ids`.
        sequence_length: inputs per window, T.
        start_step: the row of `starts` that item 0 is made of, for a resumed run. It
            is an attribute too, which a callback may set when training begins.

    Raises:
        ValueError: a window would end past the ids, or an argument is not as above.
    """

    def __init__(
        self,
        ids: np.ndarray,
        starts: np.ndarray,
        sequence_length: int,
        start_step: int = 0,
    ):
        # One worker: with more, JAX and PyTorch leave the order of the schedule.
        super().__init__(workers=1, use_multiprocessing=False)
        self.ids = check_ids(ids)
        self.starts = np.asanyarray(starts)
        self.sequence_length = check_int("sequence_length", sequence_length)
        if self.starts.ndim != 2 or self.starts.dtype.kind not in "iu":
            raise ValueError(
                "starts must be an integer array (steps, batch), got shape "
                f"{self.starts.shape} and dtype {self.starts.dtype}"
            )
        if not self.starts.size:
            raise ValueError(f"starts must not be empty, got {self.starts.shape}")
        _check_length(len(self.ids), sequence_length, "ids")
        last = len(self.ids) - sequence_length - 1
        low, high = int(self.starts.min()), int(self.starts.max())
        if low < 0 or high > last:
            raise ValueError(
                f"starts must lie between 0 and {last} for {len(self.ids)} ids, "
                f"got {low if low < 0 else high}"
            )
        self.start_step = check_int("start_step", start_step, 0, len(self.starts))

    def __len__(self) -> int:
        return len(self.starts) - self.start_step

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"index must be between 0 and {len(self) - 1}, got {index}"
            )
        starts = self.starts[self.start_step + index].astype(np.int64)
        places = starts[:, None] + np.arange(self.sequence_length + 1)  # (B, T + 1)
        windows = np.asarray(self.ids[places]).astype(np.int32)
        release_pages(self.ids)
        return windows[:, :-1], windows[:, 1:]

    def as_tf_data(self) -> Any:
        """The batches as a `tf.data.Dataset`, in the order of the schedule.

        Its threads are not tuned while it runs: whoever closes a pipeline that is waits
        for its next turn, up to a minute.
        """
        import tensorflow as tf

        shape = (self.starts.shape[1], self.sequence_length)
        batch = tf.TensorSpec(shape, tf.int32)
        pipeline = tf.data.Dataset.from_generator(
            lambda: iter(self), output_signature=(batch, batch)
        )
        pipeline = pipeline.apply(tf.data.experimental.assert_cardinality(len(self)))
        options = tf.data.Options()
        options.autotune.enabled = False
        return pipeline.prefetch(2).with_options(options)


def _check_length(num_ids: int, sequence_length: int, name: str) -> None:
    check_int("num_ids", num_ids, 0)
    check_int("sequence_length", sequence_length)
    if num_ids <= sequence_length:
        raise ValueError(
            f"{name} has {num_ids} tokens, at least {sequence_length + 1} are needed "
            f"for one window of {sequence_length}"
        )


def _ends_of_fractions(num_ids: int, fractions: Sequence[float]) -> list[int]:
    fractions = [
        check_float(f"fractions[{index}]", fraction, 0.0, 1.0, low_open=True)
        for index, fraction in enumerate(fractions)
    ]
    if not math.isclose(math.fsum(fractions), 1.0, abs_tol=1e-9):
        raise ValueError(f"fractions must add up to 1, got {fractions}")
    shares = [math.fsum(fractions[: index + 1]) for index in range(len(fractions))]
    # The tolerance keeps 0.7 + 0.2 of 10 from ending at 8.
    return [*(math.floor(num_ids * share + 1e-6) for share in shares[:-1]), num_ids]


def _ends_of_counts(num_ids: int, counts: Sequence[int]) -> list[int]:
    if not len(counts):
        raise ValueError("counts must have at least one entry, got none")
    takes_rest = counts[-1] == -1
    given = counts[:-1] if takes_rest else counts
    for index, count in enumerate(given):
        check_int(f"counts[{index}]", count)
    if sum(given) + takes_rest > num_ids:
        raise ValueError(
            f"counts must add up to at most the {num_ids} ids, got {tuple(counts)}"
        )
    ends = [sum(given[: index + 1]) for index in range(len(given))]
    return [*ends, num_ids] if takes_rest else ends
