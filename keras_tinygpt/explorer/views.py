"""What lies inside a model as JSON holds it: rounded, named, as short as needed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_tinygpt.inspection.heads import MapSums
from keras_tinygpt.inspection.predictions import Candidate

DIGITS = 5  # after the point, of every figure
WEIGHT_UNIT = 10.0**-DIGITS  # attention weights are whole numbers of it, to be short
METRICS = ("distance", "entropy", "entropy_share", "own", "previous", "first")


def rounded(values: Any) -> Any:
    """Nested lists of numbers, or one number, with few digits."""
    return np.round(np.asarray(values, "float64"), DIGITS).tolist()


def view_maps(weights: np.ndarray) -> list:
    """Maps (L, N, T, T) as rows of whole `WEIGHT_UNIT`s, later keys left out."""
    units = np.rint(weights / WEIGHT_UNIT).astype("int32")
    return [
        [[row[: i + 1].tolist() for i, row in enumerate(head)] for head in block]
        for block in units
    ]


def view_metrics(
    weights: np.ndarray, readable: Sequence[np.ndarray]
) -> dict[str, list] | None:
    """Metrics of each head over one text; None for a single token, which has none.

    Args:
        weights: array (L, N, T, T).
        readable: bool array (T, T) of each block: whether query i may read key j.
    """
    if weights.shape[-1] < 2:
        return None
    sums = MapSums(readable)
    sums.add(weights[:, None])
    metrics = sums.metrics()
    return {name: rounded(getattr(metrics, name)) for name in METRICS}


def view_candidates(
    found: Sequence[Candidate], whole: np.ndarray, tokenizer: Any
) -> list[dict[str, Any]]:
    """The candidates for the next token, with their probability by the whole model.

    Args:
        found: from `inspection.predictions.candidates`.
        whole: array (V,), probabilities with no head switched off.
        tokenizer: the model's.
    """
    return [
        {
            "token": each.token,
            "text": tokenizer.decode([each.token]),
            "probability": rounded(each.probability),
            "chance": rounded(each.chance),
            "whole": rounded(whole[each.token]),
        }
        for each in found
    ]


def view_stages(
    hidden: np.ndarray, probabilities: np.ndarray, tokenizer: Any, guesses: int
) -> list[dict[str, Any]]:
    """The stream of one token at each depth, first to last.

    Args:
        hidden: float64 array (S, D), as in `inspection.Trace`.
        probabilities: array (S, V), of the guesses that can be read there.
        tokenizer: the model's.
        guesses: how many of them are listed.
    """
    lengths = np.linalg.norm(hidden, axis=-1)
    changes = [None, *rounded(np.linalg.norm(np.diff(hidden, axis=0), axis=-1))]
    best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :guesses]
    parts = ["embedding", *["attention", "feed-forward"] * (len(hidden) // 2)]
    return [
        {
            "block": None if depth == 0 else (depth - 1) // 2,
            "part": part,
            "length": rounded(lengths[depth]),
            "change": changes[depth],
            "guesses": [
                {
                    "text": tokenizer.decode([token]),
                    "probability": rounded(probabilities[depth, token]),
                }
                for token in best[depth].tolist()
            ],
        }
        for depth, part in enumerate(parts)
    ]
