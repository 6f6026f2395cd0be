"""Initial weights that are byte-equal on every backend.

Every random tensor is drawn by NumPy from a stream keyed by (seed, variable path), so
it depends neither on the backend nor on what else the model holds: two variants of a
model start from the same tensors wherever their paths and shapes agree.
"""

import hashlib
import math
from collections.abc import Callable, Iterable

import keras
import numpy as np

from keras_tinygpt.checks import check_int

# Logits of the untrained models have at most about this standard deviation, so that
# their loss stays within 0.05 nats of the uniform one on real text too.
INITIAL_LOGIT_STDDEV = 0.1
# Of a transformer's kernels. At 1 / sqrt(fan in), four times as much at width 128, 600
# updates of AdamW took the mini GPT to 1.78 nats instead of 1.73.
KERNEL_STDDEV = 0.02


def initialize(
    model: keras.Model, seed: int, stddev: Callable[[str, tuple[int, ...]], float]
) -> None:
    """Overwrites the random initial weights of `model`; constant ones stay.

    Recurrent kernels become orthogonal, all other kernels and embeddings normal.

    Args:
        model: a built model, fresh from its constructor.
        seed: any integer from 0 to 2**32 - 1.
        stddev: gives the standard deviation for a variable path and shape.
    """
    check_int("seed", seed, 0, 2**32 - 1)
    for variable in model.weights:
        name = variable.path.rsplit("/", 1)[-1]
        if name not in ("kernel", "embeddings", "recurrent_kernel"):
            continue
        stream = _stream(seed, variable.path)
        shape = tuple(variable.shape)
        if name == "recurrent_kernel":
            values = _orthogonal(stream, shape)
        else:
            values = stream.standard_normal(shape) * stddev(variable.path, shape)
        variable.assign(values.astype("float32"))


def _stream(seed: int, path: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "little")))


def _orthogonal(stream: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A matrix (rows, columns) whose shorter side is orthonormal."""
    rows, columns = shape
    normal = stream.standard_normal((max(shape), min(shape)))
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))  # the sign makes the factorisation unique
    return q if rows >= columns else q.T


def fan_in_stddev(shape: tuple[int, ...]) -> float:
    """Returns `1 / sqrt(fan in)`, which keeps the variance of a product at one."""
    return 1.0 / math.sqrt(shape[0])


def fingerprint(model: keras.Model) -> str:
    """Returns the sha256 (hex) of all weights: names, shapes and float32 bytes.

    The states of random generators are left out.
    """
    return fingerprint_weights(model.weights)


def fingerprint_weights(weights: Iterable[keras.Variable]) -> str:
    """Returns the fingerprint of some of a model's weights."""
    digest = hashlib.sha256()
    for variable in sorted(weights, key=lambda weight: weight.path):
        values = keras.ops.convert_to_numpy(variable)
        values = np.ascontiguousarray(values, dtype="<f4")
        digest.update(f"{variable.path}{values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()
