"""What each head reads on average over a text: how far back, how widely, what places.

One pass and constant memory: every figure but the entropy is linear in the weights, so
the sum of the maps and the sum of the rows' entropies are all that is kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_tinygpt.checks import check_ids, check_int
from keras_tinygpt.inspection.maps import inspection_model
from keras_tinygpt.inspection.parts import find_blocks, readable_keys
from keras_tinygpt.models.configured import count_tokens
from keras_tinygpt.text.windows import even_starts
from keras_tinygpt.training import model_window


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMetrics:
    """Averages per block and head, arrays (L, N).

    Rows with a single readable key say nothing about a head and are left out. A share
    of a place is averaged over the rows that may read that place.

    Args:
        distance: mean |i - j|, in tokens, weighted by the attention weights.
        entropy: mean entropy of a row, in nats.
        entropy_share: mean entropy over the log of the number of readable keys; 1 is
            uniform attention.
        own: mean weight on the token itself.
        previous: mean weight on the token before.
        first: mean weight on the first token of the window.
        profile: array (L, N, T), mean weight k tokens back for k = 0 .. T - 1.
        windows: number of windows measured.
        mean_map: array (L, N, T, T), the weights averaged over the windows.
    """

    distance: np.ndarray
    entropy: np.ndarray
    entropy_share: np.ndarray
    own: np.ndarray
    previous: np.ndarray
    first: np.ndarray
    profile: np.ndarray
    windows: int
    mean_map: np.ndarray

    def table(self) -> str:
        """The averages as text, one line a head."""
        lines = ["block  head  distance  entropy  of max   self  previous  first"]
        for block, head in np.ndindex(*self.distance.shape):
            at = (block, head)
            lines.append(
                f"{block:>5}  {head:>4}  {self.distance[at]:>8.2f}  "
                f"{self.entropy[at]:>7.3f}  {self.entropy_share[at]:>6.3f}  "
                f"{self.own[at]:>5.3f}  {self.previous[at]:>8.3f}  "
                f"{self.first[at]:>5.3f}"
            )
        return "\n".join(lines)

    def numbers(self) -> dict[str, Any]:
        """Everything but the mean maps as lists."""
        return {
            field.name: np.asarray(getattr(self, field.name)).tolist()
            for field in dataclasses.fields(self)
            if field.name != "mean_map"
        }


def head_metrics(
    model: keras.Model,
    ids: Any,
    *,
    sequence_length: int | None = None,
    batch_size: int = 16,
    max_windows: int | None = None,
) -> HeadMetrics:
    """Measures every head over the separate windows of a text.

    Args:
        model: functional model of our blocks.
        ids: int array (n,), at least one window and one token more.
        sequence_length: tokens per window T; None means the model's window.
        batch_size: windows per forward pass.
        max_windows: measures no more than the first so many; None means all.

    Raises:
        ValueError: for too few ids or a model without our layers.
    """
    check_int("batch_size", batch_size)
    ids = check_ids(ids, count_tokens(model))
    length = check_int("sequence_length", model_window(model, sequence_length), 2)
    starts = even_starts(len(ids), length)
    if max_windows is not None:
        starts = starts[: check_int("max_windows", max_windows)]
    inspected = inspection_model(model, calls="many")
    sums = MapSums([readable_keys(block, length) for block in find_blocks(model)])
    for first in range(0, len(starts), batch_size):
        batch = starts[first : first + batch_size]
        rows = np.resize(batch, batch_size)  # whole batches compile once
        windows = ids[rows[:, None] + np.arange(length)].astype("int32")
        weights = inspected.predict_on_batch(windows)["weights"]
        sums.add([np.asarray(x)[: len(batch)] for x in weights])
    return sums.metrics()


class MapSums:
    """Sums over windows from which `HeadMetrics` follow.

    Args:
        readable: bool array (T, T) of each block: whether query i may read key j.
    """

    def __init__(self, readable: Sequence[np.ndarray]):
        self.readable = np.stack(readable)
        self.windows = 0
        self._maps: Any = 0.0
        self._entropies: Any = 0.0

    def add(self, weights: Sequence[np.ndarray]) -> None:
        """Adds the weights (B, N, T, T) of each block."""
        maps, entropies = [], []
        for block in weights:
            maps.append(block.sum(axis=0, dtype="float64"))  # (N, T, T)
            logs = np.log(block, where=block > 0, out=np.zeros_like(block))
            entropies.append(-np.einsum("bnij,bnij->ni", block, logs, dtype="float64"))
        self._maps = self._maps + np.stack(maps)
        self._entropies = self._entropies + np.stack(entropies)
        self.windows += len(weights[0])

    def metrics(self) -> HeadMetrics:
        """The averages of all that was added."""
        maps, entropies = self._maps / self.windows, self._entropies / self.windows
        counts = self.readable.sum(axis=-1)  # (L, T)
        counted = counts > 1
        length = maps.shape[-1]
        places = np.arange(length)
        offsets = places[:, None] - places  # (T, T), how far back
        distances = np.sum(maps * np.abs(offsets), axis=-1)  # (L, N, T)
        share = entropies / np.log(np.maximum(counts, 2))[:, None]
        usable = self.readable & counted[..., None]
        profile = _diagonals(maps * usable[:, None])
        profile /= np.maximum(_diagonals(usable), 1)[:, None]
        return HeadMetrics(
            distance=_mean_of_rows(distances, counted),
            entropy=_mean_of_rows(entropies, counted),
            entropy_share=_mean_of_rows(share, counted),
            own=profile[..., 0],
            previous=profile[..., 1],
            first=_mean_weight(maps, usable & (places == 0)),
            profile=profile,
            windows=self.windows,
            mean_map=maps,
        )


def _mean_of_rows(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Mean (L, N) of values (L, N, T) over the rows counted (L, T)."""
    values = np.where(counted[:, None], values, 0.0).sum(axis=-1)
    return values / np.maximum(counted.sum(axis=-1), 1)[:, None]


def _diagonals(maps: np.ndarray) -> np.ndarray:
    """Sums (..., T) of the diagonals of maps (..., T, T): k tokens back for each k."""
    lengths = range(maps.shape[-1])
    sums = [np.trace(maps, offset=-k, axis1=-2, axis2=-1) for k in lengths]
    return np.stack(sums, axis=-1).astype("float64")


def _mean_weight(maps: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Mean (L, N) of maps (L, N, T, T) over the places (L, T, T); 0 if there is none.

    At most one place a row is chosen.
    """
    total = np.einsum("lnij,lij->ln", maps, places.astype("float64"))
    return total / np.maximum(places.sum(axis=(-1, -2)), 1)[:, None]
