"""How fast training is, beside what the machine can do.

A model's work is counted as is usual: six operations per token for each entry of a
matrix (two forward, four backward), and for attention 12 L D T, the causal half not
taken off. The ceiling is the rate of one large matrix product.
"""

import statistics
import time

import keras

from keras_tinygpt.models import LSTMConfig
from keras_tinygpt.training import model_window

CEILING_SIZE = 2048  # rows and columns of the product that is timed
CEILING_REPEATS = 7


def flops_per_token(model: keras.Model, sequence_length: int | None = None) -> int:
    """Floating-point operations of one training step per token.

    Args:
        model: from `build_gpt` or `build_lstm`.
        sequence_length: tokens per window T; None means the model's window.

    Reference: Kaplan et al., 2020, section 2.1; Chowdhery et al., 2022, appendix B.
    """
    length = model_window(model, sequence_length)
    matrices = sum(
        weight.shape[0] * weight.shape[1]
        for weight in model.trainable_variables
        if len(weight.shape) == 2 and weight.name != "embeddings"
    )
    config = model.config
    if isinstance(config, LSTMConfig):
        return 6 * matrices
    if config.tie_embeddings:
        matrices += config.vocab_size * config.hidden_dim
    attention = 12 * config.num_layers * length * config.hidden_dim
    return 6 * matrices + attention


def matmul_ceiling(dtype: str) -> float:
    """Operations per second of a large matrix product on the backend in use.

    Args:
        dtype: of the matrices.
    """
    matrix = keras.random.normal((CEILING_SIZE, CEILING_SIZE), dtype=dtype, seed=0)
    keras.ops.convert_to_numpy(keras.ops.matmul(matrix, matrix)[:1, :1])
    seconds = []
    for _ in range(CEILING_REPEATS):
        started = time.perf_counter()
        product = keras.ops.matmul(matrix, matrix)
        keras.ops.convert_to_numpy(product[:1, :1])  # waits for it
        seconds.append(time.perf_counter() - started)
    return 2 * CEILING_SIZE**3 / statistics.median(seconds)


def speed_line(
    model: keras.Model, tokens_per_second: float, sequence_length: int | None = None
) -> str:
    """One line: tokens per second, operations per second, share of the ceiling."""
    flops = flops_per_token(model, sequence_length)
    dtype = model.dtype_policy.compute_dtype
    ceiling = matmul_ceiling(dtype)
    rate = tokens_per_second * flops
    return (
        f"{tokens_per_second:,.0f} tokens/s at {flops / 1e6:.2f} MFLOP a token: "
        f"{rate / 1e9:,.1f} GFLOP/s, {rate / ceiling:.0%} of the "
        f"{ceiling / 1e9:,.0f} GFLOP/s of a {dtype} matrix product here"
    )
