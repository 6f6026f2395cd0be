"""What a model expects next, and how much a given text surprises it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from rich.console import Console
from rich.text import Text

from keras_tinygpt.checks import check_ids, check_int
from keras_tinygpt.evaluation import windowed_losses
from keras_tinygpt.generation.sampling import SamplingConfig, filter_logits
from keras_tinygpt.models.configured import check_predicts_next_tokens
from keras_tinygpt.training import model_window

# Upper ends in nats of the classes of surprise, and their colours from pale to dark.
SURPRISE_LEVELS = (0.5, 1.0, 2.0, 4.0)
SURPRISE_COLORS = ("#ffffff", "#fde8cf", "#fdbe85", "#f0803c", "#a63603")


class Candidate(NamedTuple):
    """A token that may come next.

    Attributes:
        token: its id.
        probability: by the model alone.
        chance: of being drawn, after temperature and filters.
    """

    token: int
    probability: float
    chance: float


def next_tokens(
    model: keras.Model,
    ids: Any,
    sampling: SamplingConfig | None = None,
    count: int = 10,
) -> list[Candidate]:
    """Returns the most probable next tokens, before and after the sampling filters.

    Args:
        model: int (B, T) -> logits (B, T, V).
        ids: int array (n,), the text so far; the last window of it is read.
        sampling: temperature and filters; None means the defaults of `generate`.
        count: number of candidates; more than V means all.
    """
    check_predicts_next_tokens(model)
    ids = check_ids(ids, model.output_shape[-1], least=1)
    window = ids[-model_window(model) :].astype("int32")
    logits = model(ops.convert_to_tensor(window[None]), training=False)
    return candidates(ops.convert_to_numpy(logits)[0, -1], ids, sampling, count)


def candidates(
    logits: np.ndarray,
    ids: np.ndarray,
    sampling: SamplingConfig | None = None,
    count: int = 10,
) -> list[Candidate]:
    """As `next_tokens`, from logits (V,) that are known already.

    Args:
        logits: float array (V,), of the place after `ids`.
        ids: int array (n,), the text so far.
        sampling: temperature and filters; None means the defaults of `generate`.
        count: number of candidates; more than V means all.
    """
    sampling = sampling or SamplingConfig()
    check_int("count", count)
    vocab_size = len(logits)
    if callable(sampling.allowed_tokens):
        raise ValueError("allowed_tokens must be a list of ids here, got a function")
    seen = np.isin(np.arange(vocab_size), ids)[None]
    filtered, keep = filter_logits(
        ops.convert_to_tensor(logits[None]),
        ops.convert_to_tensor(seen),
        sampling.tensors(vocab_size),
    )
    filtered = ops.convert_to_numpy(filtered)[0].astype("float64")
    kept = np.where(ops.convert_to_numpy(keep)[0], filtered, -np.inf)
    if sampling.temperature == 0:
        chances = np.eye(vocab_size)[np.argmax(kept)]
    else:
        chances = softmax(kept)
    probabilities = softmax(np.asarray(logits).astype("float64"))
    best = np.argsort(-probabilities, kind="stable")[:count]
    return [Candidate(int(i), float(probabilities[i]), float(chances[i])) for i in best]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities along the last axis."""
    masses = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return masses / masses.sum(axis=-1, keepdims=True)


def surprise(model: keras.Model, ids: Any) -> np.ndarray:
    """Nats of each token of a text given what stands before it, float64 (n - 1,).

    Longer texts are read in windows that overlap by half, each token but the first
    scored once.

    Args:
        model: int (B, T) -> logits (B, T, V).
        ids: int array (n,), n >= 2.
    """
    check_predicts_next_tokens(model)
    ids = check_ids(ids, model.output_shape[-1], least=2)
    length = min(model_window(model), len(ids) - 1)
    pieces = windowed_losses(model, ids, length, max(1, length // 2), batch_size=1)
    return np.concatenate(list(pieces)).astype("float64")


def character_surprise(
    tokenizer: Any, ids: Any, nats: np.ndarray
) -> list[tuple[str, float]]:
    """Pairs of text and nats; the nats of tokens that are part of a character add up.

    Args:
        tokenizer: the model's.
        ids: int array (n,).
        nats: array (n - 1,), from `surprise`; the first token has none and gets 0.
    """
    decoder = tokenizer.stream_decoder()
    pieces, waiting = [], 0.0
    costs = np.concatenate([[0.0], np.asarray(nats)])
    for token, cost in zip(np.asarray(ids).tolist(), costs.tolist(), strict=True):
        waiting += cost
        text = decoder.push(token)
        if text:
            pieces.append((text, waiting))
            waiting = 0.0
    rest = decoder.finish()
    return [*pieces, (rest, waiting)] if rest else pieces


def surprise_color(nats: float) -> str:
    """The colour of a surprise, from pale to dark."""
    return SURPRISE_COLORS[int(np.searchsorted(SURPRISE_LEVELS, nats, side="left"))]


def print_surprise(
    pieces: Sequence[tuple[str, float]], console: Console | None = None
) -> None:
    """Prints a text on backgrounds that darken with the surprise, under a legend.

    Args:
        pieces: from `character_surprise`.
        console: where to; None means standard output. Where that is not a terminal
            the text is printed without colours.
    """
    console = console or Console(highlight=False)
    legend = Text("nats:")
    lows = (0.0, *SURPRISE_LEVELS)
    for low, color in zip(lows, SURPRISE_COLORS, strict=True):
        legend.append(" ")
        legend.append(f" from {low:g} ", _style(color))
    text = Text()
    for piece, nats in pieces:
        text.append(piece, _style(surprise_color(nats)))
    console.print(legend)
    console.print(text, soft_wrap=True)


def _style(color: str) -> str:
    ink = "#ffffff" if color == SURPRISE_COLORS[-1] else "#000000"
    return f"{ink} on {color}"
