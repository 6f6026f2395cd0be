"""What the vectors between the blocks hold: their position, and how alike they are.

Positions are read by a linear probe: ridge regression in closed form, fitted on half of
the windows and scored on the rest.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_float, check_ids, check_int
from keras_tinygpt.inspection.maps import inspection_model
from keras_tinygpt.inspection.parts import (
    block_input,
    check_unpadded,
    evaluator,
    find_stack,
    run_block,
)
from keras_tinygpt.models.gpt import GPT
from keras_tinygpt.text.windows import even_starts
from keras_tinygpt.training import model_window

VARIANTS = {
    "as trained": {},
    "no feed-forward": {"feed_forward": False},
    "no residuals": {"residuals": False},
    "attention alone": {"residuals": False, "feed_forward": False},
}


@dataclasses.dataclass(frozen=True, eq=False)
class PositionProbe:
    """How well positions can be read, arrays (L + 1,): before the blocks, after each.

    Args:
        r_squared: share of the variance of the position explained on unseen windows;
            0 or below is no better than the mean position.
        mean_error: mean absolute error in tokens; guessing the middle gives T / 4.
    """

    r_squared: np.ndarray
    mean_error: np.ndarray


def position_probe(
    model: keras.Model,
    ids: Any,
    *,
    sequence_length: int | None = None,
    windows: int = 64,
    penalty: float = 1e-3,
) -> PositionProbe:
    """Fits linear probes from token vectors to positions, one at each depth.

    Args:
        model: functional model of our blocks.
        ids: int array (n,), more than two windows; windows are spread evenly over it.
        sequence_length: tokens per window T; None means the model's window.
        windows: most windows read; every second one is kept for the score.
        penalty: ridge penalty, relative to the variance of a standardised feature.

    Raises:
        ValueError: for a bad argument, too few ids or a model without our layers.
    """
    check_float("penalty", penalty, low_open=True)
    texts = _windows(model, ids, sequence_length, windows, least=2)
    hidden = inspection_model(model).predict_on_batch(texts)["hidden"]
    results = [_probe(np.asarray(x).astype("float64"), penalty) for x in hidden]
    return PositionProbe(*np.array(results).T)


def _windows(model, ids, sequence_length, windows, least) -> np.ndarray:
    """Windows (W, T) spread evenly over the ids."""
    check_int("windows", windows, least)
    ids = check_ids(ids, model.output_shape[-1])
    length = check_int("sequence_length", model_window(model, sequence_length), 2)
    starts = even_starts(len(ids), length)
    if len(starts) < least:
        raise ValueError(
            f"ids has {len(ids)} tokens, at least {least * length + 1} are needed "
            f"for {least} windows of {length}"
        )
    chosen = np.linspace(0, len(starts) - 1, min(windows, len(starts))).astype(int)
    return ids[starts[chosen][:, None] + np.arange(length)].astype("int32")


def _probe(hidden: np.ndarray, penalty: float) -> tuple[float, float]:
    """R squared and mean error of regressing positions on hidden (W, T, D)."""
    length = hidden.shape[1]
    positions = np.arange(length) - (length - 1) / 2  # (T,), centred
    fitted, scored = hidden[::2], hidden[1::2]
    mean, spread = fitted.mean(axis=(0, 1)), fitted.std(axis=(0, 1)) + 1e-9

    def features(x):
        return ((x - mean) / spread).reshape(-1, x.shape[-1])  # (W * T, D)

    x = features(fitted)
    gram = x.T @ x + penalty * len(x) * np.eye(x.shape[1])
    slopes = np.linalg.solve(gram, x.T @ np.tile(positions, len(fitted)))
    errors = features(scored) @ slopes - np.tile(positions, len(scored))
    return 1.0 - np.mean(errors**2) / np.mean(positions**2), np.mean(np.abs(errors))


def without_positions(model: GPT) -> GPT:
    """Returns a copy of a GPT, weights included, that has no positional signals.

    Learned or sinusoidal vectors are not added, queries and keys not rotated, scores
    not penalised. What is left of the order is the causal mask.
    """
    if not isinstance(model, GPT):
        raise ValueError(f"model must be made by build_gpt, got {type(model).__name__}")
    config = dataclasses.replace(model.config, positions="none")
    copy = GPT(config, seed=model.seed, dtype=model.dtype_policy)
    weights = {weight.path: weight for weight in model.weights}
    for weight in copy.weights:
        # Through NumPy: JAX would share the array, and free it with either model.
        weight.assign(ops.convert_to_numpy(weights[weight.path]))
    return copy


def token_similarity(
    model: keras.Model,
    ids: Any,
    *,
    sequence_length: int | None = None,
    windows: int = 16,
) -> dict[str, np.ndarray]:
    """Mean cosine similarity of two tokens of a window, by depth: 1 is collapse.

    The blocks are run with their trained weights and without some of their parts, not
    trained anew. Without residuals the output of attention, and then that of the
    feed-forward layer, replaces its input; without feed-forward the stream is passed
    on as it is after attention; norms stay.

    Args:
        model: functional model whose blocks follow one another.
        ids: int array (n,), at least one window and one token more.
        sequence_length: tokens per window T; None means the model's window.
        windows: most windows read.

    Returns:
        Array (L + 1,) for each of "as trained", "no feed-forward", "no residuals",
        "attention alone": before the blocks, then after each.

    Reference: Dong et al., 2021, "Attention is not all you need".
    """
    blocks = find_stack(model)
    texts = _windows(model, ids, sequence_length, windows, least=1)
    check_unpadded(model, texts)
    first = evaluator(model.inputs, block_input(blocks[0])).predict_on_batch(texts)
    similarities = {}
    for name, parts in VARIANTS.items():
        stack = _stack(blocks, first.shape[-1], parts)
        hidden = stack.predict_on_batch(first)
        hidden = hidden if isinstance(hidden, (list, tuple)) else [hidden]
        similarities[name] = np.array([_similarity(x) for x in [first, *hidden]])
    return similarities


class _Partial(keras.layers.Layer):
    """A block without some of its parts."""

    def __init__(self, block: keras.Layer, parts: dict[str, bool]):
        super().__init__(dtype=block.dtype_policy, name=f"partial_{block.name}")
        self.block = block
        self.parts = parts
        self.built = True

    def call(self, inputs):
        return run_block(self.block, inputs, **self.parts)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, dtype=self.block.compute_dtype)


def _stack(blocks, hidden_dim: int, parts: dict[str, bool]) -> keras.Model:
    """(B, T, D) -> the output of each block."""
    inputs = keras.Input((None, hidden_dim), dtype=blocks[0].compute_dtype)
    x, outputs = inputs, []
    for block in blocks:
        x = _Partial(block, parts)(x)
        outputs.append(x)
    return evaluator(inputs, outputs)


def _similarity(hidden: np.ndarray) -> float:
    """Mean cosine over the pairs of different tokens of each window (B, T, D)."""
    hidden = np.asarray(hidden).astype("float64")
    norms = np.linalg.norm(hidden, axis=-1, keepdims=True)
    total = np.sum(hidden / np.maximum(norms, 1e-30), axis=1)  # (B, D)
    length = hidden.shape[1]
    pairs = np.sum(total**2, axis=-1) - length
    return float(np.mean(pairs) / (length * (length - 1)))
