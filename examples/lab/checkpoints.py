"""The checkpoints of the lab: one function an exercise.

Each takes an answer, prints one line (passed, not done yet, or what is wrong) and
returns what the later parts go on with: the answer if it passed, the package's own way
otherwise. Typical mistakes are computed and compared with the answer, so that the line
names the mistake and not only the difference.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

import keras_tinygpt as tg
from keras_tinygpt.inspection.heads import MapSums
from keras_tinygpt.layers.attention import attend
from keras_tinygpt.layers.attention import causal_mask as mask_of_positions

TOLERANCE = 1e-4
Mistakes = Sequence[tuple[Any, str]]


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
    other[changed] = -other[changed] - 1.0
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
        fault = find_fault(answer)
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


def _diagnose(name: str, got: Any, right: Any, mistakes: Mistakes = ()) -> str | None:
    """None if `got` is right, else the mistake that gives just that, or how far off.

    Args:
        name: of the value in the message.
        got: the answer's value.
        right: what it must be.
        mistakes: pairs of a wrong value and what to say of it.
    """
    got, right = _array(got), np.asarray(right)
    if got.shape != right.shape:
        return f"{name} must have shape {right.shape}, got {got.shape}."
    if np.allclose(got, right, atol=TOLERANCE):
        return None
    for wrong, fault in mistakes:
        if np.shape(wrong) == got.shape and np.allclose(got, wrong, atol=TOLERANCE):
            return fault
    if not np.isfinite(got).all():
        return f"{name} holds NaN or infinity."
    return f"{name}: off by up to {np.abs(got - right).max():.3g}."


# Exercise 0


def count_parameters(answer: Callable) -> Callable:
    """(V, T, D, L, F) -> the number of weights of the GPT."""

    def find_fault(answer):
        for shape in ((65, 128, 128, 4, 512), (11, 7, 6, 3, 10)):
            off = answer(*shape) - ready_count_parameters(*shape)
            if off:
                return _explain_count(off, *shape)
        return None

    return _check(
        "Exercise 0, the parameters", answer, ready_count_parameters, find_fault
    )


def _explain_count(off: int, vocab: int, window: int, width: int, layers: int, wide):
    """Names the part of the model that accounts for a wrong count."""
    forward = 2 * width * wide + wide + width
    block = 4 * width**2 + width + forward + 4 * width
    parts = {
        "the token table": vocab * width,
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
        "biases of queries, keys and values, which this model lacks": (
            3 * layers * width
        ),
    }
    words = "too few" if off < 0 else "too many"
    for name, size in parts.items():
        if size == abs(off):
            return f"{size:,} {words}: exactly {name}."
    return f"{abs(off):,} {words} at V={vocab}, T={window}, D={width}, L={layers}."


# Exercise 1


def attention(answer: Callable) -> Callable:
    """(query, key, value, mask) -> outputs (..., T, H) and weights (..., T, T)."""

    def find_fault(answer):
        query, key, value = (_normal(2, 3, 5, 4, seed=seed) for seed in range(3))
        mask = np.tril(np.ones((5, 5), "bool"))
        mask[4, 1] = False
        for allowed in (None, mask):
            results = answer(query, key, value, allowed)
            if not isinstance(results, (tuple, list)) or len(results) != 2:
                return "It must return two values, the outputs and the weights."
            outputs, weights = results
            fault = _weights_fault(query, key, allowed, weights)
            fault = fault or _outputs_fault(query, key, value, allowed, outputs)
            if fault:
                return fault
        one = [x[0, 0] for x in (query, key, value)]
        right = _weights(*one[:2]) @ one[2]
        return _diagnose(
            "The output of one head alone, (T, H),", answer(*one)[0], right
        )

    return _check("Exercise 1, attention", answer, ready_attention, find_fault)


def _softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def _weights(query, key, mask=None, divisor=None, axis=-1) -> np.ndarray:
    """Softmax of the divided scores, forbidden ones left out."""
    scores = query @ np.swapaxes(key, -1, -2)
    scores = scores / (math.sqrt(query.shape[-1]) if divisor is None else divisor)
    if mask is not None:
        scores = np.where(mask, scores, -1e30)
    return _softmax(scores, axis)


def _weights_fault(query, key, mask, weights) -> str | None:
    """What is wrong with attention weights."""
    width, plain = query.shape[-1], _weights(query, key)
    mistakes = [
        (
            _weights(query, key, mask, 1.0),
            "The scores are not divided: divide them by the square root of H.",
        ),
        (
            _weights(query, key, mask, width),
            "The scores are divided by H: its square root keeps their spread at 1.",
        ),
        (
            _weights(query, key, mask, width**-0.5),
            "The scores are multiplied by the square root of H: divide by it.",
        ),
        (
            _weights(query, key, mask, axis=-2),
            "The softmax runs over the queries: it must run over the keys, axis=-1.",
        ),
        (
            _weights(key, query, mask),
            "The scores are transposed: query t must give row t.",
        ),
    ]
    if mask is not None:
        scores = query @ np.swapaxes(key, -1, -2) / math.sqrt(width)
        mistakes += [
            (plain, "The mask is not used."),
            (
                plain * mask,
                "The softmax comes before the mask, so rows no longer sum to 1 and "
                "depend on what they may not read: mask the scores.",
            ),
            (
                _weights(query, key, ~mask),
                "The mask is used the wrong way round: True may be read.",
            ),
            (
                _softmax(scores * mask),
                "Forbidden scores become 0, and exp(0) is 1: they must be minus "
                "infinity.",
            ),
            (
                _softmax(scores + mask),
                "The mask is added to the scores as 0 and 1: forbidden scores must be "
                "minus infinity.",
            ),
            (
                _weights(query, key, mask.T),
                "The mask is transposed: row t is what query t may read.",
            ),
        ]
    fault = _diagnose("The weights", weights, _weights(query, key, mask), mistakes)
    if fault is None and mask is not None and np.any(_array(weights)[..., ~mask]):
        return "Forbidden weights must be exactly 0: use minus infinity."
    return fault


def _outputs_fault(query, key, value, mask, outputs) -> str | None:
    """What is wrong with the outputs, where the weights are right."""
    right = _weights(query, key, mask)
    mistakes = [
        (right @ key, "The weights average the keys: they must average the values."),
        (
            np.swapaxes(right, -1, -2) @ value,
            "The weights are transposed before they average the values.",
        ),
        (value, "The outputs are the values as they are: average them."),
    ]
    return _diagnose("The output", outputs, right @ value, mistakes)


# Exercise 2


def causal_mask(answer: Callable) -> Callable:
    """T -> bool (T, T), True where row t may read column i."""

    def find_fault(answer):
        for length in (5, 1):
            mask, ones = answer(length), np.ones((length, length), "bool")
            if keras.backend.standardize_dtype(mask.dtype) != "bool":
                return f"The mask must hold True and False, got {mask.dtype}."
            mistakes = [
                (
                    np.triu(ones),
                    "The mask is transposed: positions read themselves and later ones; "
                    "row t must be True for i <= t.",
                ),
                (
                    np.triu(ones, 1),
                    "The mask is the wrong way round: True must mean that position t "
                    "may read, i <= t.",
                ),
                (
                    np.tril(ones, -1),
                    "No position may read itself, and the first one nothing: the "
                    "diagonal must be True.",
                ),
                (
                    np.tril(ones, 1),
                    "The mask is one column too wide: each position reads the next.",
                ),
                (ones, "Everything may be read."),
                (np.eye(length), "Each position may read itself alone."),
            ]
            fault = _diagnose("The mask", mask, np.tril(ones), mistakes)
            if fault:
                return fault
        return None

    return _check("Exercise 2a, the mask", answer, ready_causal_mask, find_fault)


def largest_leak(answer: Callable) -> Callable:
    """(function, inputs (T, D), changed) -> how far earlier outputs move."""

    def find_fault(answer):
        def ahead(x):  # position t reads t + 1
            return np.concatenate([x[:-1] + x[1:], x[-1:]])

        def far(x):  # position 0 reads the last one
            return np.concatenate([x[:1] + x[-1:], x[1:]])

        inputs = _normal(5, 3)
        kept = inputs.copy()
        found = {
            "alone": answer(lambda x: x.copy(), inputs, 2),
            "honest": answer(lambda x: np.cumsum(x, axis=0), inputs, 2),
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
    if found["alone"] != 0:
        return "It counts the changed row itself, which must move: compare [:changed]."
    if found["honest"] != 0:
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

    def find_fault(answer):
        ids = np.array([[3, 1, 4, 1, 5], [2, 7, 1, 0, 2]], "int32")
        table, places = _normal(11, 6), _normal(13, 6, seed=1)
        tokens, positions = table[ids], places[:5]
        mistakes = [
            (
                tokens,
                "The positions are left out: a token has the same vector everywhere.",
            ),
            (
                tokens + places[ids],
                "The position table is read by token: its row t is for position t.",
            ),
            (tokens * 0 + positions, "The tokens are left out."),
            (tokens + places[1:6], "Positions start at 1: the first one is row 0."),
            (tokens + places[0], "Every position gets the vector of the first."),
            (tokens + positions[::-1], "The positions run backwards."),
            (tokens * positions, "The vectors are multiplied: add them."),
        ]
        return _diagnose(
            "The result", answer(ids, table, places), tokens + positions, mistakes
        )

    return _check("Exercise 3, positions", answer, ready_embed, find_fault)


# Exercise 4


def score(answer: Callable) -> Callable:
    """(logits (B, T, V), targets (B, T)) -> mean nats and perplexity."""

    def find_fault(answer):
        logits = 3 * _normal(2, 5, 7)
        targets = np.random.default_rng(1).integers(0, 7, (2, 5)).astype("int32")
        results = answer(logits, targets)
        if not isinstance(results, (tuple, list)) or len(results) != 2:
            return "It must return two numbers, the nats and the perplexity."
        nats, perplexity = results
        fault = _nats_fault(nats, logits, targets)
        if fault:
            return fault
        losses = _losses(logits, targets)
        mistakes = [
            (
                2 ** losses.mean(),
                "The perplexity of a loss in nats is exp(nats), not 2 ** nats.",
            ),
            (
                np.exp(losses).mean(),
                "The perplexity is exp of the mean loss, not the mean of exp.",
            ),
            (np.exp(-losses.mean()), "The perplexity is exp(nats), not exp(-nats)."),
        ]
        right = np.exp(losses.mean())
        fault = _diagnose("The perplexity", perplexity, right, mistakes)
        large = float(answer(30 * logits, targets)[0])
        if not np.isclose(large, _losses(30 * logits, targets).mean(), rtol=1e-3):
            fault = fault or "Large logits overflow: subtract the largest before exp."
        return fault

    return _check("Exercise 4a, the loss", answer, ready_score, find_fault)


def _chosen(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, targets[..., None], axis=-1)[..., 0]


def _losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Nats of every target, (B, T)."""
    shifted = (logits - logits.max(axis=-1, keepdims=True)).astype("float64")
    return np.log(np.exp(shifted).sum(axis=-1)) - _chosen(shifted, targets)


def _nats_fault(nats: Any, logits: np.ndarray, targets: np.ndarray) -> str | None:
    losses = _losses(logits, targets)
    mistakes = [
        (losses.sum(), "The loss is summed: take the mean over all targets."),
        (
            losses.sum(axis=-1).mean(),
            "The loss is summed over positions: take the mean over all targets.",
        ),
        (
            losses.mean() / math.log(2),
            "The loss is in bits: nats need the natural logarithm.",
        ),
        (-losses.mean(), "The sign is wrong: a loss is minus the log-probability."),
        (
            -_chosen(logits, targets).mean(),
            "The logits are taken for log-probabilities: a log-softmax is missing.",
        ),
        (
            -math.log(_chosen(_softmax(logits), targets).mean()),
            "Probabilities are averaged before the logarithm: average the logarithms.",
        ),
        (
            _losses(logits[:, :-1], targets[:, 1:]).mean(),
            "The targets are moved once more: target t already follows position t.",
        ),
    ]
    return _diagnose("The loss", nats, losses.mean(), mistakes)


def untrained(nats: float, vocab_size: int, leak: tg.inspection.Leak | None) -> None:
    """The loss and the leak test of a model before its first step."""

    def find_fault(_):
        if abs(nats - math.log(vocab_size)) > 0.05:
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

    def find_fault(_):
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

    def find_fault(answer):
        query, key = _normal(2, 3, 5, 4), _normal(2, 3, 5, 4, seed=1)
        weights = _weights(query, key, np.tri(5, dtype="bool"))
        places = np.arange(5)
        back = places[:, None] - places  # (T, T)
        rows = np.sum(weights * back, axis=-1)  # (..., T)
        right = rows[..., 1:].mean(axis=-1)
        mistakes = [
            (
                rows.mean(axis=-1),
                "The first query is counted: it can read itself alone, leave it out.",
            ),
            (-right, "The distance is negative: it is query minus key, t - i."),
            (rows.sum(axis=-1), "The rows are summed: take their mean."),
            (
                np.mean(weights * back, axis=(-1, -2)),
                "The mean runs over all cells: sum within a row, then average rows.",
            ),
            (
                (places - weights.argmax(axis=-1))[..., 1:].mean(axis=-1),
                "Only the strongest key counts: weight every distance.",
            ),
            (
                np.sum(weights * places, axis=-1)[..., 1:].mean(axis=-1),
                "That is the mean place of the keys, not how far back they are.",
            ),
        ]
        return _diagnose("The distance", answer(weights), right, mistakes)

    return _check("Exercise 5, the heads", answer, ready_mean_distance, find_fault)


# Stretch


MULTI_HEAD_MISTAKES = [
    (
        {"merge": "reversed"},
        "The heads are concatenated in the wrong order: the last one comes first.",
    ),
    (
        {"merge": "interleaved"},
        "The heads are concatenated in the wrong order, coordinate by coordinate: head "
        "0 must come whole, then head 1.",
    ),
    (
        {"merge": "raw"},
        "(B, N, T, H) is reshaped to (B, T, D) at once, which mixes positions: "
        "transpose to (B, T, N, H) first.",
    ),
    (
        {"split": "raw"},
        "(B, T, D) is reshaped to (B, N, T, H) at once, which mixes positions: reshape "
        "to (B, T, N, H), then transpose.",
    ),
    (
        {"split": "interleaved"},
        "The heads are cut as (H, N): head n is the n-th stretch of H columns.",
    ),
    (
        {"split": "raw", "merge": "raw"},
        "Both reshapes lack their transpose, which mixes positions.",
    ),
    (
        {"divisor": math.sqrt(12)},
        "The scores are divided by the square root of D: a head is H wide.",
    ),
    ({"causal": False}, "The causal mask is missing."),
    ({"projected": False}, "The projection after the heads is missing."),
]


def multi_head(answer: type) -> type:
    """A layer `(num_heads, hidden_dim)` against the package's, on copied weights."""
    package = tg.layers.CausalMultiHeadAttention

    def find_fault(answer):
        inputs, bias = _normal(2, 5, 12), _normal(12, seed=9)
        kernels = [_normal(12, 12, seed=seed) / 4 for seed in range(1, 5)]
        theirs, mine = package(3, fused_projections=False), answer(3, 12)
        theirs.build(inputs.shape)
        theirs.set_weights([*kernels, bias])
        parts = [mine.query, mine.key, mine.value, mine.projection]
        for part, kernel in zip(parts, kernels, strict=True):
            part.build(inputs.shape)
            part.set_weights([kernel, bias] if part is mine.projection else [kernel])
        mistakes = [
            (_multi_head(inputs, kernels, bias, **change), fault)
            for change, fault in MULTI_HEAD_MISTAKES
        ]
        return _diagnose("The output", mine(inputs), _array(theirs(inputs)), mistakes)

    return _check("Stretch 1, the heads", answer, package, find_fault)


def _multi_head(
    inputs,
    kernels,
    bias,
    split="right",
    merge="right",
    divisor=None,
    causal=True,
    projected=True,
) -> np.ndarray:
    """Multi-head attention of 3 heads, (B, T, D), with one of the mistakes above."""
    batch, length, width = inputs.shape
    size = width // 3
    heads = []
    for kernel in kernels[:3]:
        x = inputs @ kernel
        if split == "raw":
            heads.append(x.reshape(batch, 3, length, size))
        elif split == "interleaved":
            heads.append(x.reshape(batch, length, size, 3).transpose(0, 3, 1, 2))
        else:
            heads.append(x.reshape(batch, length, 3, size).transpose(0, 2, 1, 3))
    query, key, value = heads
    mask = np.tri(length, dtype="bool") if causal else None
    outputs = _weights(query, key, mask, divisor) @ value  # (B, N, T, H)
    if merge == "reversed":
        outputs = outputs[:, ::-1]
    if merge == "interleaved":
        outputs = outputs.transpose(0, 2, 3, 1)
    elif merge != "raw":
        outputs = outputs.transpose(0, 2, 1, 3)
    outputs = outputs.reshape(batch, length, width)
    return outputs @ kernels[3] + bias if projected else outputs


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

    def find_fault(answer):
        inputs, theirs, mine = _normal(2, 5, 12), package(3), answer(3, 12)
        theirs.build(inputs.shape)
        for seed, weight in enumerate(theirs.weights):
            weight.assign(0.4 * _normal(*weight.shape, seed=seed))
        for name, path in BLOCK_PARTS.items():
            part = getattr(mine, name)
            part.build((None, None, 48) if name == "narrow" else inputs.shape)
            weights = [w for w in theirs.weights if f"/{path}/" in f"/{w.path}"]
            part.set_weights([_array(weight) for weight in weights])
        mistakes = _block_mistakes(mine, ops.convert_to_tensor(inputs))
        return _diagnose("The output", mine(inputs), _array(theirs(inputs)), mistakes)

    return _check("Stretch 2, the block", answer, package, find_fault)


def _block_mistakes(mine, x) -> list[tuple[np.ndarray, str]]:
    """What typical mistakes give, from the sublayers of the answer."""
    norm, attend, second = mine.attention_norm, mine.attention, mine.feed_forward_norm

    def forward(hidden, activation=ops.gelu):
        return mine.narrow(activation(mine.widen(hidden)))

    update = attend(norm(x))
    middle = x + update  # what the second half starts from
    after = norm(x + attend(x))  # the same in post-norm
    mistakes = [
        (
            second(after + forward(after)),
            "The norms come after the additions (post-norm): normalise what each "
            "sublayer reads.",
        ),
        (
            update + forward(second(update)),
            "The first residual is missing: add the input to what attention gives.",
        ),
        (
            forward(second(middle)),
            "The second residual is missing: add the sum after attention to what the "
            "feed-forward layer gives.",
        ),
        (forward(second(update)), "Both residuals are missing."),
        (
            norm(x) + update + forward(second(norm(x) + update)),
            "The normalised input is added: add the input as it is.",
        ),
        (
            middle + forward(second(x)),
            "The feed-forward layer reads the block's input: it must read the sum "
            "after attention.",
        ),
        (
            x + forward(second(middle)),
            "The second sum starts from the block's input, so attention is lost.",
        ),
        (middle + forward(middle), "The second norm is missing."),
        (
            x + attend(x) + forward(second(x + attend(x))),
            "The first norm is missing.",
        ),
        (middle + forward(norm(middle)), "The first norm is used twice."),
        (
            middle + forward(second(middle), lambda hidden: hidden),
            "The nonlinearity between the two projections is missing.",
        ),
        (
            middle + forward(second(middle), ops.relu),
            "The nonlinearity is ReLU: this block uses GELU.",
        ),
        (middle, "The feed-forward layer is missing."),
    ]
    return [(_array(wrong), fault) for wrong, fault in mistakes]
