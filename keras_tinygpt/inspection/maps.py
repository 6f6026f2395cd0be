"""Attention weights of every block and head, and the audit of what they must satisfy.

The weights come from a second functional model over the same layer objects; the
model that is looked at is not changed.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_tinygpt.checks import check_ids
from keras_tinygpt.inspection.parts import (
    attend_in,
    block_input,
    block_output,
    call_masks,
    evaluator,
    find_blocks,
    find_stacks,
    readable_keys,
    real_tokens,
    text_ids,
)
from keras_tinygpt.models.configured import count_tokens


class _Weights(keras.layers.Layer):
    """The self-attention weights of a block, as a node of its own.

    A Keras graph refuses a layer that returns one tensor at one call and two at
    another, so the block is called inside this layer.
    """

    def __init__(self, block: keras.Layer):
        super().__init__(dtype=block.dtype_policy, name=f"{block.name}_weights")
        self.block = block
        self.supports_masking = True
        self.built = True

    def call(self, inputs, mask=None, attention_mask=None):
        return attend_in(self.block, inputs, mask, attention_mask)[2]

    def compute_output_spec(self, inputs, mask=None, attention_mask=None):
        batch, length = inputs.shape[:2]
        shape = (batch, self.block.num_heads, length, length)
        return keras.KerasTensor(shape, dtype="float32")

    def compute_mask(self, inputs, mask=None):
        return None


class _CrossWeights(keras.layers.Layer):
    """The cross-attention weights of a block, as a node of its own."""

    def __init__(self, block: keras.Layer):
        super().__init__(dtype=block.dtype_policy, name=f"{block.name}_cross_weights")
        self.block = block
        self.built = True

    def call(self, inputs, **context):
        return self.block(inputs, return_attention_scores=True, **context)[2]

    def compute_output_spec(self, inputs, **context):
        return self.block.compute_output_spec(
            inputs, return_attention_scores=True, **context
        )[2]


def _self_weights(block: keras.Layer):
    """Symbolic weights (B, N, T, T) of a block in its model."""
    mask = call_masks(block).get("attention_mask")
    return _Weights(block)(block_input(block), attention_mask=mask)


def inspection_model(model: keras.Model, calls: str = "few") -> keras.Model:
    """Returns a model over the same layers that also gives what lies inside.

    Its outputs are a dict: `logits` (B, T, V); `weights`, a list of (B, N, T, T), one
    a block; `hidden`, a list of (B, T, D): the input of the first block, then the
    output of each. `calls` is as in `evaluator`.
    """
    blocks = find_blocks(model)
    outputs = {
        "logits": model.output,
        "weights": [_self_weights(block) for block in blocks],
        "hidden": [
            block_input(blocks[0]),
            *[block_output(block) for block in blocks],
        ],
    }
    return evaluator(model.inputs, outputs, calls)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention weights of one text, or of a target and its source.

    Args:
        weights: float32 array (L, N, T, T), L blocks; row i is what query i reads.
        logits: float32 array, the same as the model's own.
        forbidden_weight: largest weight on a key that may not be read; must be 0.
        row_sum_error: largest |sum of a row - 1|.
        source_weights: float32 array (L, N, S, S), an encoder's; None without one.
        cross_weights: float32 array (L, N, T, S), what the target reads of the source.
    """

    weights: np.ndarray
    logits: np.ndarray
    forbidden_weight: float
    row_sum_error: float
    source_weights: np.ndarray | None = None
    cross_weights: np.ndarray | None = None

    def __str__(self) -> str:
        blocks, heads, length = self.weights.shape[:3]
        return (
            f"attention audit, {blocks} blocks of {heads} heads, {length} tokens: "
            f"largest forbidden weight {self.forbidden_weight:g}, "
            f"largest |row sum - 1| {self.row_sum_error:.1e}"
        )


def attention_maps(
    model: keras.Model, ids: Any, source_ids: Any = None
) -> AttentionMaps:
    """Returns the attention weights of every block and head for one text.

    Args:
        model: functional model of our blocks, int (B, T) -> logits (B, T, V), or from
            `build_encoder_decoder`.
        ids: int array (T,); the target of an encoder-decoder.
        source_ids: int array (S,), what an encoder-decoder reads.

    Returns:
        `AttentionMaps`; print it to see the audit.

    Raises:
        ValueError: for a model without our layers or ids it cannot read.

    Example:
    >>> import keras_tinygpt as tg
    >>> model = tg.build_gpt(tg.GPTConfig(11, 16, 2, 2, hidden_dim=12))
    >>> maps = tg.inspection.attention_maps(model, [3, 1, 4, 1, 5])
    >>> maps.weights.shape, maps.forbidden_weight
    ((2, 2, 5, 5), 0.0)
    """
    ids = text_ids(model, ids)
    if source_ids is not None:
        return _maps_of_pair(model, source_ids, ids)
    blocks = find_blocks(model)
    outputs = inspection_model(model).predict_on_batch(ids[None])
    weights = _stacked(outputs["weights"])
    found = audit(weights, _readable(blocks, len(ids)) & real_tokens(model, ids))
    return AttentionMaps(weights, np.asarray(outputs["logits"][0]), *found)


def _maps_of_pair(model, source_ids, ids: np.ndarray) -> AttentionMaps:
    """What `attention_maps` returns for a target and the source it reads."""
    encoder, decoder = find_stacks(model)
    source = check_ids(source_ids, count_tokens(model), "source_ids", least=1)
    source = source.astype("int32")
    parts = {
        "source": [_self_weights(block) for block in encoder],
        "target": [_self_weights(block) for block in decoder],
        "cross": [
            _CrossWeights(block)(block_input(block), **call_masks(block))
            for block in decoder
        ],
    }
    outputs = evaluator(
        model.inputs, {"logits": model.output, **parts}
    ).predict_on_batch([source[None], ids[None]])
    weights = {part: _stacked(outputs[part]) for part in parts}
    real = real_tokens(model, source)
    readable = {
        "source": _readable(encoder, len(source)) & real,
        "target": _readable(decoder, len(ids)),
        "cross": np.broadcast_to(real, (len(decoder), len(ids), len(source))),
    }
    audits = [audit(weights[part], readable[part]) for part in parts]
    return AttentionMaps(
        weights["target"],
        np.asarray(outputs["logits"][0]),
        *np.max(audits, axis=0).tolist(),
        weights["source"],
        weights["cross"],
    )


def _stacked(weights: list) -> np.ndarray:
    """The weights of the first text, float32 (L, N, T, S)."""
    return np.stack([np.asarray(x[0], "float32") for x in weights])


def _readable(blocks: list, length: int) -> np.ndarray:
    """Bool array (L, T, T)."""
    return np.stack([readable_keys(block, length) for block in blocks])


def audit(weights: np.ndarray, readable: np.ndarray) -> tuple[float, float]:
    """Largest forbidden weight and largest |row sum - 1|.

    Args:
        weights: array (L, N, T, S).
        readable: bool array (L, T, S).
    """
    forbidden = np.where(readable[:, None], 0.0, np.abs(weights))
    sums = np.sum(weights, axis=-1, dtype="float64")
    return float(forbidden.max()), float(np.abs(sums - 1.0).max())
