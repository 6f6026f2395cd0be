"""Cause against weight: what the logits lose when a head cannot read one key.

A weight says how much of a key's value vector a head mixes in. What that vector does to
the prediction is another matter: it may be small, be cancelled by another head, or be
ignored further up. Here the value vector of one key is replaced in one head and the
change of the logits measured.

Reference: Jain and Wallace, 2019, "Attention is not Explanation"; Kobayashi et al.,
2020 (weights against norms of values).
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_choice, check_int
from keras_tinygpt.inspection.maps import attention_maps
from keras_tinygpt.inspection.parts import (
    block_input,
    block_output,
    check_unpadded,
    evaluator,
    find_blocks,
    head_values,
    project_heads,
    readable_keys,
    run_block,
    text_ids,
)

REPLACEMENTS = ("zero", "mean")
MEASURES = ("norm", "kl")


@dataclasses.dataclass(frozen=True, eq=False)
class Causes:
    """Attention weights beside the effects of what they let through.

    Args:
        weights: array (L, N, T, T), attention weights.
        effects: array (L, N, T, T), change of query i's logits when key j is replaced.
        correlation: array (L, N), Spearman's rank correlation of weight and effect
            over the keys a query may read, averaged over the queries with at least 3;
            NaN where it is not defined.
        last_correlation: array (L, N), that of the last query alone.
    """

    weights: np.ndarray
    effects: np.ndarray
    correlation: np.ndarray
    last_correlation: np.ndarray


class _EditedBlock(keras.layers.Layer):
    """A block in which one head does not find the value vector of one key."""

    def __init__(self, block: keras.Layer, replacement: str):
        super().__init__(dtype=block.dtype_policy, name=f"edited_{block.name}")
        self.block = block
        self.replacement = replacement
        self.supports_masking = True
        self.built = True

    def call(self, inputs, heads, keys, mask=None):
        def edit(attention, hidden, weights):
            return _change(attention, hidden, weights, heads, keys, self.replacement)

        return run_block(self.block, inputs, mask=mask, edit=edit)

    def compute_output_spec(self, inputs, heads, keys, mask=None):
        return keras.KerasTensor(inputs.shape, dtype=self.block.compute_dtype)

    def compute_mask(self, inputs, mask=None):
        return None  # the layers above make it from the tokens


def _change(attention, hidden, weights, heads, keys, replacement: str):
    """What the replaced value adds to the output of attention, (B, T, D).

    Args:
        attention: a `CausalMultiHeadAttention`.
        hidden: its inputs (B, T, D).
        weights: (B, N, T, T).
        heads: one-hot (B, N), the head of each row.
        keys: one-hot (B, T), the key of each row.
        replacement: "zero" or "mean".
    """
    values = head_values(attention, hidden)  # (B, N, T, H)
    heads, keys = ops.cast(heads, "float32"), ops.cast(keys, "float32")
    lost = ops.einsum("bnth,bt->bnh", values, keys)
    if replacement == "mean":
        lost = lost - ops.mean(values, axis=2)
    weight = ops.einsum("bnts,bs->bnt", weights, keys)
    changes = -ops.einsum("bnt,bnh,bn->btnh", weight, lost, heads)
    return project_heads(attention, changes)


def causes(
    model: keras.Model,
    ids: Any,
    *,
    replacement: str = "zero",
    measure: str = "norm",
    batch_size: int = 32,
) -> Causes:
    """Replaces each value vector of each head in turn and measures the logits.

    The cost is L x N x T passes through the model. In the last block the effect on a
    query is nearly its weight times the size of the value, so a high correlation there
    is no discovery; further down other tokens pass the change on.

    Args:
        model: functional model of our blocks.
        ids: int array (T,), T at least 3.
        replacement: "zero", or "mean" for the mean of the head's values over all keys.
        measure: "norm", the L2 norm of the change of a query's logits less their mean
            (a constant changes no prediction), or "kl", the divergence in nats of the
            new distribution from the old one.
        batch_size: keys replaced per pass.

    Returns:
        `Causes`.

    Raises:
        ValueError: for a bad argument or a model without our layers.
    """
    check_choice("replacement", replacement, REPLACEMENTS)
    check_choice("measure", measure, MEASURES)
    check_int("batch_size", batch_size)
    ids = text_ids(model, ids, least=3)
    check_unpadded(model, ids)
    blocks = find_blocks(model)
    maps = attention_maps(model, ids)
    effects = np.zeros(maps.weights.shape)
    passes = blocks[0].num_heads * len(ids) // batch_size
    calls = "many" if passes > 8 else "few"  # per block, each a model of its own
    for index, block in enumerate(blocks):
        edited = _edited_model(model, block, replacement, calls)
        # The same graph without an edit, so that what is not touched differs by 0.
        plain = _edited_logits(edited, ids, 0, [None], block.num_heads, batch_size)[0]
        for head in range(block.num_heads):
            for first in range(0, len(ids), batch_size):
                keys = list(range(first, min(first + batch_size, len(ids))))
                logits = _edited_logits(
                    edited, ids, head, keys, block.num_heads, batch_size
                )
                effects[index, head, :, keys] = _effect(logits, plain, measure)
    readable = [readable_keys(block, len(ids)) for block in blocks]
    rows = _row_correlations(maps.weights, effects, np.stack(readable))  # (L, N, T)
    defined = np.isfinite(rows)
    mean = np.where(defined, rows, 0.0).sum(axis=-1) / np.maximum(defined.sum(-1), 1)
    mean = np.where(defined.any(axis=-1), mean, np.nan)
    return Causes(maps.weights, effects, mean, rows[..., -1])


def _edited_model(model, block, replacement: str, calls: str) -> keras.Model:
    """(tokens (B, T), one-hot heads (B, N) and keys (B, T)) -> logits (B, T, V).

    What lies above the block may need the tokens for their padding mask.
    """
    heads, keys = keras.Input((block.num_heads,)), keras.Input((None,))
    above = keras.Model([model.inputs[0], block_output(block)], model.output)
    hidden = _EditedBlock(block, replacement)(block_input(block), heads, keys)
    outputs = above([model.inputs[0], hidden])
    return evaluator([model.inputs[0], heads, keys], outputs, calls)


def _edited_logits(edited, ids, head, keys, num_heads, batch_size) -> np.ndarray:
    """Logits (keys, T, V) with one key after the other replaced; None edits nothing."""
    marks = np.zeros((batch_size, len(ids)), "float32")  # whole batches compile once
    for row, key in enumerate(keys):
        if key is not None:
            marks[row, key] = 1.0
    heads = np.eye(num_heads, dtype="float32")[np.full(batch_size, head)]
    tokens = np.tile(ids, (batch_size, 1))
    return np.asarray(edited.predict_on_batch([tokens, heads, marks]))[: len(keys)]


def _effect(logits, plain, measure: str) -> np.ndarray:
    """Size of the change of logits (keys, T, V) from plain ones (T, V): (keys, T)."""
    logits, plain = logits.astype("float64"), plain.astype("float64")
    if measure == "norm":
        change = logits - plain
        change = change - change.mean(axis=-1, keepdims=True)
        return np.sqrt(np.sum(change**2, axis=-1))
    new, old = _log_softmax(logits), _log_softmax(plain)
    return np.maximum(np.sum(np.exp(old) * (old - new), axis=-1), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _row_correlations(weights, effects, readable) -> np.ndarray:
    """Rank correlation (L, N, T) of each query; NaN for fewer than 3 readable keys."""
    rows = np.full(weights.shape[:3], np.nan)
    for index, head, query in np.ndindex(*rows.shape):
        keys = readable[index, query]
        if keys.sum() >= 3:
            at = (index, head, query)
            rows[at] = rank_correlation(weights[at][keys], effects[at][keys])
    return rows


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation of two arrays (n,), equal values sharing a rank.

    NaN if one of them is constant.

    Example:
    >>> rank_correlation(np.array([1.0, 2.0, 4.0]), np.array([0.1, 0.2, 7.0]))
    1.0
    """
    ranks = [_ranks(np.asarray(values)) for values in (first, second)]
    first, second = (values - values.mean() for values in ranks)
    scale = np.sqrt(np.sum(first**2) * np.sum(second**2))
    return float(np.sum(first * second) / scale) if scale else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks (n,) from 0 on; equal values get the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[places]
