"""Keras layers for small transformers; each works alone in any Keras model.

Shape letters used in all docstrings and comments: B batch, T query length, S key
length, N heads, N_kv key and value heads, H head_dim, D hidden_dim, F
intermediate_dim, V vocab_size.
"""

from keras_tinygpt.layers.attention import (
    CausalMultiHeadAttention,
    CrossAttention,
    alibi_bias,
    attend,
    causal_mask,
)
from keras_tinygpt.layers.blocks import FeedForward, TransformerBlock
from keras_tinygpt.layers.positions import (
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    alibi_slopes,
)

__all__ = [
    "CausalMultiHeadAttention",
    "CrossAttention",
    "FeedForward",
    "LearnedPositions",
    "RotaryPositions",
    "SinusoidalPositions",
    "TransformerBlock",
    "alibi_bias",
    "alibi_slopes",
    "attend",
    "causal_mask",
]
