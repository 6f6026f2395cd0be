"""Scores of a language model on token ids: nats, perplexity, bits per token.

Three ways to cut a long text into what the model can read, each scoring every target
once: `windows` (state and context reset at each window), `strided` (overlapping
windows, so that a GPT's targets have context) and `stateful` (an LSTM's state carried
across the whole text).
"""

import dataclasses
import math
from collections.abc import Iterator

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_choice, check_ids, check_int
from keras_tinygpt.models.configured import check_predicts_next_tokens
from keras_tinygpt.models.lstm import LSTM
from keras_tinygpt.text.windows import even_starts
from keras_tinygpt.training import model_window

METHODS = ("strided", "windows", "stateful")
STATEFUL_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Scores:
    """Mean loss of a model on a text.

    Args:
        nats: mean negative log-probability per token, natural logarithm.
        perplexity: exp(nats).
        bits_per_token: nats / ln 2.
        tokens: number of tokens scored; the first token of a text is not.
    """

    nats: float
    perplexity: float
    bits_per_token: float
    tokens: int

    @classmethod
    def from_losses(cls, total_nats: float, tokens: int) -> "Scores":
        """Scores of `tokens` losses that sum to `total_nats`."""
        nats = total_nats / tokens
        perplexity = math.exp(nats) if nats < 700 else math.inf
        return cls(nats, perplexity, nats / math.log(2), tokens)


def evaluate(
    model: keras.Model,
    ids: np.ndarray,
    method: str | None = None,
    *,
    sequence_length: int | None = None,
    batch_size: int = 64,
) -> Scores:
    """Scores `model` on `ids`; every token but the first is a target exactly once.

    Args:
        model: int (B, T) -> logits (B, T, V).
        ids: int array (n,), n >= 2.
        method: "windows": windows of T tokens one after another; "strided": windows
            moved by T // 2 of which the second half is scored, the first window whole;
            "stateful": the recurrent state is carried across the text (LSTM only).
            None means "stateful" for an LSTM and "strided" for all others.
        sequence_length: T; None means the model's window. Not for "stateful".
        batch_size: windows per forward pass.

    Returns:
        `Scores`.

    Raises:
        ValueError: for too few tokens, ids outside the vocabulary, or a method the
            model cannot be scored with.
    """
    if method is None:
        method = "stateful" if isinstance(model, LSTM) else "strided"
    check_choice("method", method, METHODS)
    check_int("batch_size", batch_size)
    check_predicts_next_tokens(model)
    ids = check_ids(ids, model.output_shape[-1], least=2)
    if method == "stateful":
        if not isinstance(model, LSTM):
            raise ValueError(
                'method="stateful" needs a model from build_lstm, got '
                f"{type(model).__name__}"
            )
        if sequence_length is not None:
            raise ValueError(
                'sequence_length must be left out with method="stateful", which has no '
                f"windows, got {sequence_length}"
            )
        return Scores.from_losses(_stateful(model, ids), len(ids) - 1)
    length = model_window(model, sequence_length)
    length = min(length, len(ids) - 1)
    stride = length if method == "windows" else max(1, length // 2)
    pieces = windowed_losses(model, ids, length, stride, batch_size)
    total = sum(float(np.sum(nats, dtype="float64")) for nats in pieces)
    return Scores.from_losses(total, len(ids) - 1)


def token_losses(model: keras.Model) -> keras.Model:
    """Returns a model (inputs (B, T), targets (B, T)) -> nats per target (B, T)."""
    inputs = keras.Input((None,), dtype="int32", name="inputs")
    targets = keras.Input((None,), dtype="int32", name="targets")
    losses = ops.sparse_categorical_crossentropy(
        targets, model(inputs, training=False), from_logits=True
    )
    return keras.Model([inputs, targets], losses, name="token_losses")


def windowed_losses(
    model: keras.Model, ids: np.ndarray, length: int, stride: int, batch_size: int
) -> Iterator[np.ndarray]:
    """Yields the nats of every target in order, the new ones of window after window.

    A window scores the targets that no window before it did.

    Args:
        model: int (B, T) -> logits (B, T, V).
        ids: int array (n,).
        length: tokens per window, below n.
        stride: distance between windows, at most `length`.
        batch_size: windows per forward pass.
    """
    last = len(ids) - 1 - length
    starts = np.append(np.arange(0, last, stride), last)
    scored = np.append(0, starts[:-1] + length)  # first target of each window
    losses = token_losses(model)
    for first in range(0, len(starts), batch_size):
        batch = starts[first : first + batch_size]
        batch = np.resize(batch, batch_size)  # whole batches compile once
        windows = ids[batch[:, None] + np.arange(length + 1)].astype("int32")
        nats = losses.predict_on_batch([windows[:, :-1], windows[:, 1:]])
        for row, start in enumerate(starts[first : first + batch_size]):
            skip = max(0, scored[first + row] - start)
            yield nats[row, skip:]


def losses_by_position(
    model: keras.Model,
    ids: np.ndarray,
    sequence_length: int | None = None,
    batch_size: int = 64,
) -> np.ndarray:
    """Mean loss at each place of the window, over separate windows.

    Args:
        model: int (B, T) -> logits (B, T, V).
        ids: int array (n,), more than one window.
        sequence_length: T; None means the model's window.
        batch_size: windows per forward pass.

    Returns:
        float64 array (T,); entry i is the mean nats of the target after i + 1 tokens.
        A rest shorter than a window is left out.
    """
    ids = check_ids(ids, model.output_shape[-1], least=2)
    length = model_window(model, sequence_length)
    count = len(even_starts(len(ids), length))
    windows = windowed_losses(
        model, ids[: count * length + 1], length, length, batch_size
    )
    return np.mean(list(windows)[:count], axis=0, dtype="float64")


def _stateful(model: LSTM, ids) -> float:
    stepper = model.with_state()
    vocab_size = model.output_shape[-1]
    logits = keras.Input((None, vocab_size))
    targets = keras.Input((None,), dtype="int32")
    losses = keras.Model(
        [logits, targets],
        ops.sparse_categorical_crossentropy(targets, logits, from_logits=True),
    )
    states = keras.tree.map_structure(ops.convert_to_numpy, model.zero_states(1))
    total = 0.0
    for start in range(0, len(ids) - 1, STATEFUL_CHUNK):
        window = np.zeros((1, STATEFUL_CHUNK + 1), "int32")
        piece = ids[start : start + STATEFUL_CHUNK + 1]
        window[0, : len(piece)] = piece
        live = np.arange(STATEFUL_CHUNK)[None] < len(piece) - 1
        outputs, states = stepper.predict_on_batch([window[:, :-1], live, states])
        nats = losses.predict_on_batch([outputs, window[:, 1:]])
        total += float(np.sum(nats[live], dtype="float64"))
    return total
