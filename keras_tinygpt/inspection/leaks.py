"""Does a model that should be causal read later tokens?

The test needs no knowledge of the model: it changes one token and looks whether the
logits at an earlier position move.
"""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_float, check_int
from keras_tinygpt.generation.compiled import compile_function
from keras_tinygpt.training import model_window

DEFAULT_LENGTH = 32


class Leak(NamedTuple):
    """A position whose logits depend on a later token.

    Attributes:
        changed: position of the token that was changed.
        earlier: position before it whose logits moved.
        difference: the largest absolute change among those logits.
    """

    changed: int
    earlier: int
    difference: float


def leak_test(
    model: keras.Model,
    vocab_size: int | None = None,
    length: int | None = None,
    *,
    batch_size: int = 2,
    training: bool = False,
    tolerance: float = 0.0,
    seed: int = 0,
) -> Leak | None:
    """Returns the first leak from a later token to an earlier position, or None.

    Every position from the second on is changed in turn, in random ids; only calls of
    one shape are compared, so that an honest model differs by exactly 0.

    Args:
        model: any Keras model or function, int (B, T) -> (B, T, V).
        vocab_size: ids are drawn below it; None means the width of the model's output.
        length: T, at least 2; None means the model's window, at most 32.
        batch_size: texts per call B, all changed at the same position.
        training: whether the model is called as in training, which shows what only
            then looks ahead, such as batch statistics. No call changes the model's
            state (statistics, seeds), so dropout repeats its draws.
        tolerance: largest change that counts as none.
        seed: of the ids.

    Returns:
        None or a `Leak`: the first changed position, the first earlier position it
        moved, and by how much.

    Raises:
        ValueError: for a bad argument, or logits that are not finite.

    Example:
    >>> import keras_tinygpt as tg
    >>> model = tg.build_gpt(tg.GPTConfig(11, 16, 2, 2, hidden_dim=12))
    >>> tg.inspection.leak_test(model, vocab_size=11, length=7) is None
    True
    """
    if vocab_size is None:
        vocab_size = model.output_shape[-1]
    if length is None:
        length = min(model_window(model), DEFAULT_LENGTH)
    check_int("vocab_size", vocab_size, 2)
    check_int("length", length, 2)
    check_int("batch_size", batch_size)
    check_float("tolerance", tolerance)
    random = np.random.default_rng(check_int("seed", seed, 0))
    ids = random.integers(0, vocab_size, (batch_size, length)).astype("int32")
    shifts = random.integers(1, vocab_size, (batch_size, length)).astype("int32")

    call = _stateless(model, training, ids)

    def logits(tokens):
        outputs = ops.convert_to_numpy(ops.cast(call(tokens), "float32"))
        if not np.isfinite(outputs).all():
            raise ValueError("model must give finite logits, got NaN or infinity")
        return outputs

    plain = logits(ids)
    for changed in range(1, length):
        other = ids.copy()
        other[:, changed] = (other[:, changed] + shifts[:, changed]) % vocab_size
        moved = np.abs(logits(other) - plain)[:, :changed]
        moved = moved.max(axis=(0, 2))  # (changed,)
        for earlier in np.flatnonzero(moved > tolerance)[:1]:
            return Leak(changed, int(earlier), float(moved[earlier]))
    return None


def _stateless(model, training: bool, ids: np.ndarray) -> Callable:
    """A function of ids (B, T) that calls the model and leaves its state alone."""
    if isinstance(model, keras.Layer) and not model.built:
        model(ops.convert_to_tensor(ids))  # its variables are made here

    def call(tokens):
        return ops.stop_gradient(model(tokens, training=training))

    if keras.backend.backend() == "jax":  # which compiles every loop at every call
        return compile_function(call, list(getattr(model, "variables", [])))

    def eager(tokens):
        with keras.StatelessScope():
            return call(ops.convert_to_tensor(tokens))

    return eager
