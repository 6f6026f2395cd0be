"""From logits to the next token: filters, then a draw by inverse CDF.

`sample` is a pure function of tensors and runs inside the compiled loops of every
backend. The draw turns one uniform number per row into a token along the vocabulary
order, so one seed gives one text on every backend. Beam search is not sampling and
lives in `decoding`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_float, check_ids, check_int

FILTERED = -1e30
EXTREME = 1e29  # the largest logit that is told from a larger one
SMALL_VOCAB = 512  # up to it products of (V, V) are cheaper than sorts and scans
BRANCHLESS_VOCAB = 128  # up to it PyTorch's sampling can be recorded


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen; the filters apply in the order listed.

    Args:
        allowed_tokens: ids that may be chosen, or a function of the tokens so far (a
            1-D int array, one row) that returns them; None means all.
        repetition_penalty: at least 1; logits of tokens seen before are divided by it
            where positive and multiplied by it where negative.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keeps the k most probable tokens, of equal ones the first; more than
            vocab_size means all.
        top_p: keeps the fewest most probable tokens whose probabilities sum to at
            least p.
        min_p: keeps tokens at least this share as probable as the most probable one.

    The most probable allowed token always survives.

    Reference: Holtzman et al., 2020 (top_p); Keskar et al., 2019 (penalty); Fan et
    al., 2018 (top_k); Nguyen et al., 2024 (min_p).
    """

    allowed_tokens: Sequence[int] | Callable[[np.ndarray], Sequence[int]] | None = None
    repetition_penalty: float | None = None
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        check_float("temperature", self.temperature)
        if self.top_k is not None:
            check_int("top_k", self.top_k)
        if self.top_p is not None:
            check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        if self.min_p is not None:
            check_float("min_p", self.min_p, 0.0, 1.0)
        if self.repetition_penalty is not None:
            check_float("repetition_penalty", self.repetition_penalty, 1.0)

    def arrays(self, vocab_size: int) -> dict[str, Any]:
        """The settings as NumPy values, so that changing them compiles nothing anew."""
        allowed = self.allowed_tokens
        return {
            "allowed": np.ones(vocab_size, "bool")
            if allowed is None or callable(allowed)
            else allowed_mask(allowed, vocab_size),
            "repetition_penalty": np.float32(self.repetition_penalty or 1.0),
            "temperature": np.float32(self.temperature),
            "top_k": np.int32(min(self.top_k or vocab_size, vocab_size)),
            "top_p": np.float32(1.0 if self.top_p is None else self.top_p),
            "min_p": np.float32(self.min_p or 0.0),
        }

    def tensors(self, vocab_size: int) -> dict[str, Any]:
        """The same as tensors."""
        arrays = self.arrays(vocab_size)
        return {name: ops.convert_to_tensor(value) for name, value in arrays.items()}


def allowed_mask(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Returns a bool array (V,), True at `tokens`; ValueError if none or unknown."""
    tokens = check_ids(tokens, vocab_size, "allowed_tokens", least=1)
    mask = np.zeros(vocab_size, "bool")
    mask[tokens] = True
    return mask


def draw_uniforms(seeds: Sequence[int], count: int) -> np.ndarray:
    """Returns float32 (len(seeds), count) numbers in [0, 1), one stream per seed.

    Row r depends on `seeds[r]` alone, the key of a Philox 4x64 generator, and longer
    streams begin with shorter ones.

    Reference: Salmon et al., 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
    """
    rows = [
        np.random.Generator(np.random.Philox(key=seed)).random(count, dtype="float32")
        for seed in seeds
    ]
    return np.stack(rows)


def filter_logits(logits, seen, settings):
    """Applies the filters of `settings` to logits.

    Args:
        logits: float tensor (B, V).
        seen: bool tensor (B, V), tokens that have occurred in the row.
        settings: tensors made by `SamplingConfig.tensors`.

    Returns:
        float32 logits (B, V), shifted so that the largest is 0 and divided by the
        temperature (left as they are at temperature 0), and the bool tensor (B, V) of
        the tokens that survive.
    """
    logits = ops.cast(logits, "float32")
    keep = ops.broadcast_to(settings["allowed"], ops.shape(logits))
    penalty = settings["repetition_penalty"]
    punished = ops.where(logits > 0, logits / penalty, logits * penalty)
    logits = ops.where(seen, punished, logits)
    # Bounded, and NaN as the least: a token that is kept stays above one that is not.
    logits = ops.minimum(ops.where(logits > -EXTREME, logits, -EXTREME), EXTREME)
    logits = ops.where(keep, logits, FILTERED)
    logits = logits - ops.max(logits, axis=-1, keepdims=True)
    temperature = settings["temperature"]
    scaled = logits / ops.where(temperature > 0, temperature, 1.0)
    logits = ops.where(keep, ops.maximum(scaled, FILTERED), FILTERED)

    vocab_size = logits.shape[-1]
    top_k, top_p, min_p = (settings[name] for name in ("top_k", "top_p", "min_p"))
    if keras.backend.backend() == "torch" and vocab_size <= BRANCHLESS_VOCAB:
        chosen = _select_by_pairs(logits, top_k, top_p, min_p)
        return logits, ops.logical_and(keep, chosen)
    select = _select_by_pairs if vocab_size <= SMALL_VOCAB else _select_by_sorting
    everything = ops.logical_and(top_k >= vocab_size, top_p >= 1.0)
    everything = ops.logical_and(everything, min_p <= 0.0)
    chosen = ops.cond(
        everything,
        lambda: ops.ones_like(logits, dtype="bool"),
        lambda: select(logits, top_k, top_p, min_p),
    )
    return logits, ops.logical_and(keep, chosen)


def _select_by_pairs(logits, top_k, top_p, min_p):
    """The tokens that top_k, top_p and min_p keep, bool (B, V), without a sort.

    A token comes after those with larger logits and the equal ones with smaller ids.
    """
    ids = np.arange(logits.shape[-1])
    earlier = ops.convert_to_tensor(ids[:, None] < ids[None, :])  # (V, V)
    first, second = ops.expand_dims(logits, 2), ops.expand_dims(logits, 1)
    precedes = ops.logical_or(
        first > second, ops.logical_and(first == second, earlier)
    )  # (B, V, V): whether the one comes before the other
    masses = ops.exp(logits)
    both = ops.stack([ops.ones_like(masses), masses], axis=1)  # (B, 2, V)
    both = ops.matmul(both, ops.cast(precedes, "float32"))
    rank, before = both[:, 0], both[:, 1]
    within_k = rank < ops.cast(top_k, "float32")
    total = ops.sum(ops.where(within_k, masses, 0.0), axis=-1, keepdims=True)
    kept = _within(within_k, before / total, logits, top_p, min_p)
    return ops.logical_or(kept, rank < 0.5)


def _select_by_sorting(logits, top_k, top_p, min_p):
    """What `_select_by_pairs` returns, for vocabularies too large for pairs."""
    ranked = ops.flip(ops.sort(logits, axis=-1), axis=-1)  # (B, V), largest first
    within_k = ops.arange(logits.shape[-1], dtype="int32") < top_k
    masses = ops.where(within_k, ops.exp(ranked), 0.0)
    masses = masses / ops.sum(masses, axis=-1, keepdims=True)
    kept = _within(within_k, cumulative_sum(masses) - masses, ranked, top_p, min_p)
    count = ops.sum(ops.cast(kept, "int32"), axis=-1, keepdims=True)
    count = ops.maximum(count, 1)  # (B, 1)

    # The count most probable tokens, of equal ones those with the smallest ids.
    threshold = ops.take_along_axis(ranked, count - 1, axis=-1)
    above = logits > threshold
    tied = ops.cast(logits == threshold, "float32")
    room = count - ops.sum(ops.cast(above, "int32"), axis=-1, keepdims=True)
    first = cumulative_sum(tied) <= ops.cast(room, "float32") + 0.5
    return ops.logical_or(above, ops.logical_and(tied > 0, first))


def _within(within_k, before, logits, top_p, min_p):
    within_p = ops.logical_or(before < top_p, top_p >= 1.0)
    within_min = logits >= ops.log(ops.maximum(min_p, 1e-30))
    return ops.logical_and(within_k, ops.logical_and(within_p, within_min))


def cumulative_sum(values):
    """Cumulative sum along the last axis of a float32 tensor (B, V).

    XLA on CPU sums windows one by one; for small V a product with a triangle is faster.
    """
    size = values.shape[-1]
    if size > SMALL_VOCAB:
        return ops.cumsum(values, axis=-1)
    triangle = np.triu(np.ones((size, size), "float32"))
    return ops.matmul(values, ops.convert_to_tensor(triangle))


def sample(logits, seen, uniforms, settings):
    """Chooses one token per row.

    Args:
        logits: float tensor (B, V).
        seen: bool tensor (B, V), tokens that have occurred in the row.
        uniforms: float32 tensor (B,) in [0, 1).
        settings: tensors made by `SamplingConfig.tensors`.

    Returns:
        int32 tokens (B,).
    """
    filtered, keep = filter_logits(logits, seen, settings)
    masked = ops.where(keep, filtered, FILTERED)
    greedy = ops.argmax(masked, axis=-1)
    cdf = cumulative_sum(ops.where(keep, ops.exp(masked), 0.0))
    target = ops.expand_dims(uniforms, -1) * cdf[:, -1:]
    ids = ops.arange(logits.shape[-1], dtype="int32")
    last = ops.max(ops.where(keep, ids, 0), axis=-1, keepdims=True)
    # The first kept token beyond the target: a sum by products may fall in its last
    # bit, and u * total may round up to the total.
    beyond = ops.logical_and(keep, cdf > target)
    drawn = ops.min(ops.where(beyond, ids, last), axis=-1)
    tokens = ops.where(settings["temperature"] > 0, drawn, ops.cast(greedy, "int32"))
    return ops.cast(tokens, "int32")


def log_probabilities(logits, tokens):
    """Log-probability of `tokens` (B,) under plain `logits` (B, V), float32 (B,)."""
    logits = ops.cast(logits, "float32")
    chosen = ops.take_along_axis(logits, ops.expand_dims(tokens, -1), axis=-1)
    return chosen[:, 0] - ops.logsumexp(logits, axis=-1)


def allowed_rows(sampling: SamplingConfig, texts: list[list[int]], vocab_size: int):
    """Bool array (B, V) of what a callable `allowed_tokens` allows each row."""
    masks = [
        allowed_mask(sampling.allowed_tokens(np.asarray(text, "int32")), vocab_size)
        for text in texts
    ]
    return np.stack(masks)
