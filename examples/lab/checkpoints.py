"""The checkpoints of the lab: one function an exercise.

Each takes an answer, prints one line (passed, not done yet, or what is wrong) and
returns what the later parts go on with: the answer if it passed, the package's own way
otherwise. An answer that is wrong is compared with what typical mistakes give, so that
the line names the mistake and not only the difference.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import mistakes
import numpy as np
from keras import ops

import keras_tinygpt as tg
from keras_tinygpt.inspection.heads import MapSums
from keras_tinygpt.layers.attention import attend
from keras_tinygpt.layers.attention import causal_mask as mask_of_positions

TOLERANCE = 2e-3  # some GPUs round the factors of a product to 10 bits


# What the package has in place of the answers


def ready_attention(query, key, value, mask=None):
    """The package's `attend`, for any number of leading dimensions."""
    query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
    lead, length = query.shape[:-1], key.shape[-2]
    folded = [ops.reshape(x, (1, -1, *x.shape[-2:])) for x in (query, key, value)]
    outputs, weights = attend(*folded, mask)
    return ops.reshape(outputs, query.shape), ops.reshape(weights, (*lead, length))


def ready_causal_mask(length: int) -> np.ndarray:
    """The package's mask as a bool array (T, T)."""
    places = ops.arange(length)
    return ops.convert_to_numpy(mask_of_positions(places, places))


def ready_largest_leak(function: Callable, inputs: np.ndarray, changed: int) -> float:
    """How far outputs before position `changed` move when that row is replaced."""
    other = inputs.copy()
    other[changed] += 1.0
    moved = np.abs(_array(function(other)) - _array(function(inputs)))
    return float(moved[:changed].max(initial=0.0))


def ready_embed(ids, token_table, position_table):
    """Token vectors and position vectors added, (B, T, D)."""
    tokens = ops.take(ops.convert_to_tensor(token_table), ids, axis=0)
    positions = tg.layers.LearnedPositions(len(position_table))
    positions.build(tokens.shape)
    positions.set_weights([position_table])
    return positions(tokens)


def ready_score(logits, targets) -> tuple[float, float]:
    """Mean loss in nats and perplexity, by Keras."""
    losses = ops.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    scores = tg.Scores.from_losses(float(ops.sum(losses)), np.size(targets))
    return scores.nats, scores.perplexity


def ready_count_parameters(
    vocab_size, max_sequence_length, hidden_dim, num_layers, intermediate_dim
) -> int:
    """The number of weights of the GPT that the package builds."""
    config = tg.GPTConfig(
        vocab_size,
        max_sequence_length,
        num_layers,
        num_heads=1,
        hidden_dim=hidden_dim,
        intermediate_dim=intermediate_dim,
    )
    return tg.build_gpt(config).count_params()


def ready_mean_distance(weights) -> np.ndarray:
    """The mean distances that `tg.inspection.head_metrics` gives, of one text."""
    weights = _array(weights)
    length = weights.shape[-1]
    sums = MapSums([ready_causal_mask(length)])
    sums.add([weights.reshape(1, -1, length, length)])
    return sums.metrics().distance.reshape(weights.shape[:-2])


# How a checkpoint speaks


def _check(title: str, answer: Any, ready: Any, find_fault: Callable) -> Any:
    """Prints the line of a checkpoint; returns `answer` if it passed, else `ready`."""
    try:
        fault = find_fault()
    except NotImplementedError:
        print(f"{title}: not done yet. Later parts use the package's own.")
        return ready
    except Exception as error:  # whatever an answer may do, the notebook goes on
        reason = str(error).split("\n\nArguments received")[0]  # Keras adds many lines
        reason = " ".join(re.sub(r"\x1b\[\d*m", "", reason).split())
        fault = f"It raises {type(error).__name__}: {reason[:200]}"
    if fault is None:
        print(f"{title}: passed.")
        return answer
    print(f"{title}: not yet. {fault}")
    return ready


def _array(values) -> np.ndarray:
    """Values of any backend as float64."""
    return np.asarray(ops.convert_to_numpy(values)).astype("float64")


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def _diagnose(
    name: str, got: Any, right: Any, wrong: mistakes.Mistakes = ()
) -> str | None:
    """None if `got` is right, else the mistake that gives just that, or how far off.

    Args:
        name: of the value in the message.
        got: the answer's value.
        right: what it must be.
        wrong: pairs of a wrong value and what to say of it.
    """
    if got is None:
        return f"{name} is None: return it."
    got, right = _array(got), np.asarray(right)
    if got.shape != right.shape:
        return f"{name} must have shape {right.shape}, got {got.shape}."
    if np.allclose(got, right, atol=TOLERANCE):
        return None
    for value, fault in wrong:
        if np.shape(value) == got.shape and np.allclose(got, value, atol=TOLERANCE):
            return fault
    if not np.isfinite(got).all():
        return f"{name} holds NaN or infinity."
    return f"{name}: off by up to {np.abs(got - right).max():.3g}."


# Exercise 0


def count_parameters(answer: Callable) -> Callable:
    """(V, T, D, L, F) -> the number of weights of the GPT."""

    def find_fault():
        for shape in ((65, 128, 128, 4, 512), (11, 7, 6, 3, 10)):
            off = answer(*shape) - ready_count_parameters(*shape)
            if off:
                return _explain_count(off, *shape)
        return None

    return _check(
        "Exercise 0, the parameters", answer, ready_count_parameters, find_fault
    )


def _explain_count(off, vocab, window, width, layers, wide) -> str:
    """Names the part of the model that accounts for a wrong count."""
    forward = 2 * width * wide + wide + width
    block = 4 * width**2 + width + forward + 4 * width
    parts = {
        "the token table, or the matrix of the output layer": vocab * width,
        "the position table": window * width,
        "the output layer": width * vocab + vocab,
        "the bias of the output layer": vocab,
        "the final norm": 2 * width,
        "the norms of the blocks": 4 * layers * width,
        "one norm in every block": 2 * layers * width,
        "the projection after attention": layers * (width**2 + width),
        "the biases of the projections after attention": layers * width,
        "the feed-forward layers": layers * forward,
        "the biases of the feed-forward layers": layers * (wide + width),
        "all blocks but one": (layers - 1) * block,
        "biases of queries, keys and values (there are none)": 3 * layers * width,
    }
    words = "too few" if off < 0 else "too many"
    for name, size in parts.items():
        if size == abs(off):
            return f"{size:,} {words}: exactly {name}."
    return f"{abs(off):,} {words} at V={vocab}, T={window}, D={width}, L={layers}."


# Exercise 1


def attention(answer: Callable) -> Callable:
    """(query, key, value, mask) -> outputs (..., T, H) and weights (..., T, T)."""

    def find_fault():
        query, key, value = (_normal(2, 3, 5, 4, seed=seed) for seed in range(3))
        mask = np.tril(np.ones((5, 5), "bool"))
        mask[4, 1] = False
        for allowed in (None, mask):
            results = answer(query, key, value, allowed)
            if not isinstance(results, (tuple, list)) or len(results) != 2:
                return "It must return two values, the outputs and the weights."
            outputs, weights = results
            fault = _weights_fault(query, key, allowed, weights)
            right = mistakes.attention_weights(query, key, allowed)
            wrong = mistakes.of_outputs(right, key, value)
            fault = fault or _diagnose("The output", outputs, right @ value, wrong)
            if fault:
                return fault
        query, key, value = (_normal(7, 9, seed=seed) for seed in range(3))
        right = mistakes.attention_weights(query, key) @ value
        outputs, _ = answer(query, key, value)
        return _diagnose("The output of one head, H = 9", outputs, right)

    return _check("Exercise 1, attention", answer, ready_attention, find_fault)


def _weights_fault(query, key, mask, weights) -> str | None:
    """What is wrong with attention weights."""
    right = mistakes.attention_weights(query, key, mask)
    wrong = mistakes.of_scores(query, key, mask)
    if mask is not None:
        wrong += mistakes.of_masking(query, key, mask)
        nearly = np.allclose(_array(weights), right, atol=1e-2)
        if nearly and np.any(_array(weights)[..., ~mask]):
            return "Forbidden weights must be exactly 0: use minus infinity."
    return _diagnose("The weights", weights, right, wrong)


# Exercise 2


def causal_mask(answer: Callable) -> Callable:
    """T -> bool (T, T), True where row t may read column i."""

    def find_fault():
        for length in (5, 1):
            mask, right = answer(length), ready_causal_mask(length)
            if keras.backend.standardize_dtype(mask.dtype) != "bool":
                return f"The mask must hold True and False, got {mask.dtype}."
            fault = _diagnose("The mask", mask, right, mistakes.of_mask(length))
            if fault:
                return fault
        return None

    return _check("Exercise 2a, the mask", answer, ready_causal_mask, find_fault)


def largest_leak(answer: Callable) -> Callable:
    """(function, inputs (T, D), changed) -> how far earlier outputs move."""

    def find_fault():
        def ahead(x):  # position t reads t + 1
            return np.concatenate([x[:-1] + x[1:], x[-1:]])

        def far(x):  # position 0 reads the last one
            return np.concatenate([x[:1] + x[-1:], x[1:]])

        inputs = _normal(5, 3)
        kept = inputs.copy()
        found = {
            "alone": answer(lambda x: x.copy(), inputs, 2),
            "later": answer(lambda x: np.roll(x, 1, axis=0), inputs, 2),
            "ahead": answer(ahead, inputs, 2),
            "negative": answer(lambda x: -ahead(x), inputs, 2),
            "far": answer(far, inputs, 4),
        }
        if not np.array_equal(inputs, kept):
            return "It changes the array it was given: change a copy."
        return _leak_fault({name: float(value) for name, value in found.items()})

    return _check("Exercise 2b, the leak test", answer, ready_largest_leak, find_fault)


def _leak_fault(found: Mapping[str, float]) -> str | None:
    """What is wrong with a leak test that finds these changes."""
    if found["alone"] != 0 and found["later"] != 0:
        return "It counts all rows: the changed one and later ones may move."
    if found["alone"] != 0:
        return "It counts the changed row itself, which must move: compare [:changed]."
    if found["later"] != 0:
        return "It counts later rows, which may move: compare [:changed]."
    if (found["ahead"] > 0) != (found["negative"] > 0):
        return "A change downwards is lost: take absolute values."
    if not found["ahead"] > 0:
        return "It finds nothing where each row reads the next: compare [:changed]."
    if not found["far"] > 0:
        return "It misses a leak from far ahead: compare all rows before the change."
    return None


# Exercise 3


def embed(answer: Callable) -> Callable:
    """(ids (B, T), tables (V, D) and (T_max, D)) -> token plus position, (B, T, D)."""

    def find_fault():
        ids = np.array([[3, 1, 4, 1, 5], [2, 7, 1, 0, 2]], "int32")
        table, places = _normal(11, 6), _normal(13, 6, seed=1)
        right = table[ids] + places[:5]
        wrong = mistakes.of_embedding(ids, table, places)
        return _diagnose("The result", answer(ids, table, places), right, wrong)

    return _check("Exercise 3, positions", answer, ready_embed, find_fault)


# Exercise 4


def score(answer: Callable) -> Callable:
    """(logits (B, T, V), targets (B, T)) -> mean nats and perplexity."""

    def find_fault():
        logits = 3 * _normal(2, 5, 7)
        targets = np.random.default_rng(1).integers(0, 7, (2, 5)).astype("int32")
        results = answer(logits, targets)
        if not isinstance(results, (tuple, list)) or len(results) != 2:
            return "It must return two numbers, the nats and the perplexity."
        nats, perplexity = results
        losses = mistakes.losses_of(logits, targets)
        mean, wrong = losses.mean(), mistakes.of_loss(logits, targets)
        fault = _diagnose("The loss", nats, mean, wrong)
        wrong = mistakes.of_perplexity(losses)
        fault = fault or _diagnose("The perplexity", perplexity, np.exp(mean), wrong)
        large = 30 * logits
        right = mistakes.losses_of(large, targets).mean()
        if fault is None and not np.isclose(float(answer(large, targets)[0]), right):
            return "Large logits overflow: subtract the largest before exp."
        return fault

    return _check("Exercise 4a, the loss", answer, ready_score, find_fault)


def untrained(nats: float, vocab_size: int, leak: tg.inspection.Leak | None) -> None:
    """The loss and the leak test of a model before its first step."""

    def find_fault():
        if not abs(nats - math.log(vocab_size)) <= 0.05:
            return (
                f"A loss of {nats:.4f} is not near ln V = {math.log(vocab_size):.4f}."
            )
        return _describe(leak)

    _check("Exercise 4b, before training", None, None, find_fault)


def trained(
    nats: Mapping[str, float], baseline: float, leak: tg.inspection.Leak | None
) -> None:
    """The test losses and the leak test after training; says nothing of the order.

    Args:
        nats: test loss of each trained model, by name.
        baseline: loss that each of them must be below.
        leak: what the leak test of the GPT gave.
    """

    def find_fault():
        for name, loss in nats.items():
            if not loss < baseline:
                return f"{name}: {loss:.4f} nats, not below {baseline:.4f}."
        return _describe(leak)

    _check("Exercise 4c, after training", None, None, find_fault)


def _describe(leak: tg.inspection.Leak | None) -> str | None:
    if leak is None:
        return None
    return f"Position {leak.earlier} reads the later position {leak.changed}."


# Exercise 5


def mean_distance(answer: Callable) -> Callable:
    """Weights (..., T, T) -> mean distance of what is read, (...)."""

    def find_fault():
        query, key = _normal(2, 3, 5, 4), _normal(2, 3, 5, 4, seed=1)
        weights = mistakes.attention_weights(query, key, np.tri(5, dtype="bool"))
        right, wrong = mistakes.mean_distance(weights), mistakes.of_distance(weights)
        return _diagnose("The distance", answer(weights), right, wrong)

    return _check("Exercise 5, the heads", answer, ready_mean_distance, find_fault)


# Stretch


def multi_head(answer: type) -> type:
    """A layer `(num_heads, hidden_dim)` against the package's, on copied weights."""
    package = tg.layers.CausalMultiHeadAttention

    def find_fault():
        inputs, bias = _normal(2, 5, 12), _normal(12, seed=9)
        kernels = [_normal(12, 12, seed=seed) / 4 for seed in range(1, 5)]
        theirs, mine = package(3, fused_projections=False), answer(3, 12)
        theirs.build(inputs.shape)
        theirs.set_weights([*kernels, bias])
        parts = [mine.query, mine.key, mine.value, mine.projection]
        for part, kernel in zip(parts, kernels, strict=True):
            part.build(inputs.shape)
            part.set_weights([kernel, bias] if part is mine.projection else [kernel])
        wrong = mistakes.of_heads(inputs, 3, kernels, bias)
        return _diagnose("The output", mine(inputs), _array(theirs(inputs)), wrong)

    return _check("Stretch 1, the heads", answer, package, find_fault)


# Sublayers of the answer, and where the package's block keeps their weights.
BLOCK_PARTS = {
    "attention_norm": "attention_norm",
    "attention": "attention",
    "feed_forward_norm": "feed_forward_norm",
    "widen": "feed_forward/intermediate",
    "narrow": "feed_forward/output",
}


def block(answer: type) -> type:
    """A layer `(num_heads, hidden_dim)` against the package's, on copied weights."""
    package = tg.layers.TransformerBlock

    def find_fault():
        inputs, theirs, mine = _normal(2, 5, 12), package(3), answer(3, 12)
        theirs.build(inputs.shape)
        for seed, weight in enumerate(theirs.weights):
            weight.assign(0.4 * _normal(*weight.shape, seed=seed))
        for name, path in BLOCK_PARTS.items():
            part = getattr(mine, name)
            part.build((None, None, 48) if name == "narrow" else inputs.shape)
            weights = [w for w in theirs.weights if f"/{path}/" in f"/{w.path}"]
            part.set_weights([_array(weight) for weight in weights])
        wrong = [
            (_array(value), fault)
            for value, fault in mistakes.of_block(mine, ops.convert_to_tensor(inputs))
        ]
        return _diagnose("The output", mine(inputs), _array(theirs(inputs)), wrong)

    return _check("Stretch 2, the block", answer, package, find_fault)
