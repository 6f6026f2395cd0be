"""Attention weights of every block and head, and the audit of what they must satisfy.

The weights come from a second functional model over the same layer objects; the
model that is looked at is not changed.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_tinygpt.inspection.parts import (
    attend_in,
    block_input,
    block_output,
    evaluator,
    find_blocks,
    readable_keys,
    text_ids,
)


class _Weights(keras.layers.Layer):
    """The attention weights of a block, as a node of its own.

    A Keras graph refuses a layer that returns one tensor at one call and two at
    another, so the block is called inside this layer.
    """

    def __init__(self, block: keras.Layer):
        super().__init__(dtype=block.dtype_policy, name=f"{block.name}_weights")
        self.block = block
        self.supports_masking = True
        self.built = True

    def call(self, inputs, mask=None):
        return attend_in(self.block, inputs, mask)[2]

    def compute_output_spec(self, inputs, mask=None):
        batch, length = inputs.shape[:2]
        shape = (batch, self.block.num_heads, length, length)
        return keras.KerasTensor(shape, dtype="float32")

    def compute_mask(self, inputs, mask=None):
        return None


def inspection_model(model: keras.Model, calls: str = "few") -> keras.Model:
    """Returns a model over the same layers that also gives what lies inside.

    Its outputs are a dict: `logits` (B, T, V); `weights`, a list of (B, N, T, T), one
    a block; `hidden`, a list of (B, T, D): the input of the first block, then the
    output of each. `calls` is as in `evaluator`.
    """
    blocks = find_blocks(model)
    outputs = {
        "logits": model.output,
        "weights": [_Weights(block)(block_input(block)) for block in blocks],
        "hidden": [
            block_input(blocks[0]),
            *[block_output(block) for block in blocks],
        ],
    }
    return evaluator(model.inputs, outputs, calls)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention weights of one text.

    Args:
        weights: float32 array (L, N, T, T), L blocks; row i is what query i reads.
        logits: float32 array (T, V), the same as the model's own.
        forbidden_weight: largest weight on a key that may not be read; must be 0.
        row_sum_error: largest |sum of a row - 1|.
    """

    weights: np.ndarray
    logits: np.ndarray
    forbidden_weight: float
    row_sum_error: float

    def __str__(self) -> str:
        blocks, heads, length = self.weights.shape[:3]
        return (
            f"attention audit, {blocks} blocks of {heads} heads, {length} tokens: "
            f"largest forbidden weight {self.forbidden_weight:g}, "
            f"largest |row sum - 1| {self.row_sum_error:.1e}"
        )


def attention_maps(model: keras.Model, ids: Any) -> AttentionMaps:
    """Returns the attention weights of every block and head for one text.

    Args:
        model: functional model of our blocks, int (B, T) -> logits (B, T, V).
        ids: int array (T,).

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
    outputs = inspection_model(model).predict_on_batch(ids[None])
    weights = np.stack([np.asarray(x[0], "float32") for x in outputs["weights"]])
    readable = [readable_keys(block, len(ids)) for block in find_blocks(model)]
    return AttentionMaps(
        weights, np.asarray(outputs["logits"][0]), *audit(weights, np.stack(readable))
    )


def audit(weights: np.ndarray, readable: np.ndarray) -> tuple[float, float]:
    """Largest forbidden weight and largest |row sum - 1|.

    Args:
        weights: array (L, N, T, T).
        readable: bool array (L, T, T).
    """
    forbidden = np.where(readable[:, None], 0.0, np.abs(weights))
    sums = np.sum(weights, axis=-1, dtype="float64")
    return float(forbidden.max()), float(np.abs(sums - 1.0).max())
