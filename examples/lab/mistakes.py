"""What typical mistakes give, for the checkpoints to compare with.

Each function returns pairs of a wrong value and the sentence that explains it. NumPy
throughout, but for the block, whose mistakes are made of the answer's own sublayers.
"""

import math
from typing import Any

import numpy as np
from keras import ops

Mistakes = list[tuple[Any, str]]


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def attention_weights(query, key, mask=None, divisor=None, axis=-1) -> np.ndarray:
    """The right weights; or wrong ones, by another divisor or axis."""
    scores = query @ np.swapaxes(key, -1, -2)
    scores = scores / (math.sqrt(query.shape[-1]) if divisor is None else divisor)
    if mask is not None:
        scores = np.where(mask, scores, -1e30)
    return softmax(scores, axis)


def of_scores(query, key, mask) -> Mistakes:
    """Wrong weights (..., T, T), with a mask or without."""
    width = query.shape[-1]
    return [
        (
            attention_weights(query, key, mask, 1.0),
            "The scores are not divided: divide them by the square root of H.",
        ),
        (
            attention_weights(query, key, mask, width),
            "The scores are divided by H: its square root keeps their spread at 1.",
        ),
        (
            attention_weights(query, key, mask, width**-0.5),
            "The scores are multiplied by the square root of H: divide by it.",
        ),
        (
            attention_weights(query, key, mask, axis=-2),
            "The softmax runs over the queries: it must run over the keys, axis=-1.",
        ),
        (
            attention_weights(key, query, mask),
            "The scores are transposed: query t must give row t.",
        ),
    ]


def of_masking(query, key, mask) -> Mistakes:
    """Wrong weights (..., T, T) that only a mask shows."""
    scores = query @ np.swapaxes(key, -1, -2) / math.sqrt(query.shape[-1])
    return [
        (softmax(scores), "The mask is not used."),
        (
            softmax(scores) * mask,
            "The softmax comes before the mask, so rows no longer sum to 1 and depend "
            "on what they may not read: mask the scores.",
        ),
        (
            attention_weights(query, key, ~mask),
            "The mask is used the wrong way round: True may be read.",
        ),
        (
            softmax(scores * mask),
            "Forbidden scores become 0, and exp(0) is 1: they must be minus infinity.",
        ),
        (
            softmax(scores + mask),
            "The mask is added to the scores as 0 and 1: forbidden scores must be "
            "minus infinity.",
        ),
        (
            attention_weights(query, key, mask.T),
            "The mask is transposed: row t is what query t may read.",
        ),
    ]


def of_outputs(weights, key, value) -> Mistakes:
    """Wrong outputs (..., T, H) of right weights."""
    return [
        (weights @ key, "The weights average the keys: they must average the values."),
        (
            np.swapaxes(weights, -1, -2) @ value,
            "The weights are transposed before they average the values.",
        ),
        (value, "The outputs are the values as they are: average them."),
    ]


def of_mask(length: int) -> Mistakes:
    """Wrong masks (T, T)."""
    ones = np.ones((length, length), "bool")
    return [
        (
            np.triu(ones),
            "The mask is transposed: positions read themselves and later ones; row t "
            "must be True for i <= t.",
        ),
        (
            np.triu(ones, 1),
            "The mask is the wrong way round: True must mean that position t may read, "
            "i <= t.",
        ),
        (
            np.tril(ones, -1),
            "No position may read itself, and the first one nothing: the diagonal must "
            "be True.",
        ),
        (
            np.tril(ones, 1),
            "The mask is one column too wide: each position reads the next.",
        ),
        (ones, "Everything may be read."),
        (np.eye(length), "Each position may read itself alone."),
    ]


def of_embedding(ids, token_table, position_table) -> Mistakes:
    """Wrong vectors (B, T, D) of ids (B, T)."""
    length = ids.shape[1]
    tokens, positions = token_table[ids], position_table[:length]
    return [
        (
            tokens,
            "The positions are left out: a token has the same vector everywhere.",
        ),
        (
            tokens + position_table[ids],
            "The position table is read by token: its row t is for position t.",
        ),
        (0 * tokens + positions, "The tokens are left out."),
        (
            tokens + position_table[1 : length + 1],
            "Positions start at 1: the first one is row 0.",
        ),
        (tokens + positions[0], "Every position gets the vector of the first."),
        (tokens + positions[::-1], "The positions run backwards."),
        (tokens * positions, "The vectors are multiplied: add them."),
    ]


def chosen(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The value (B, T) of each target in (B, T, V)."""
    return np.take_along_axis(values, targets[..., None], axis=-1)[..., 0]


def losses_of(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The right nats of every target, (B, T)."""
    shifted = (logits - logits.max(axis=-1, keepdims=True)).astype("float64")
    return np.log(np.exp(shifted).sum(axis=-1)) - chosen(shifted, targets)


def of_loss(logits: np.ndarray, targets: np.ndarray) -> Mistakes:
    """Wrong mean losses."""
    losses = losses_of(logits, targets)
    return [
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
            -chosen(logits, targets).mean(),
            "The logits are taken for log-probabilities: a log-softmax is missing.",
        ),
        (
            -math.log(chosen(softmax(logits), targets).mean()),
            "Probabilities are averaged before the logarithm: average the logarithms.",
        ),
        (
            losses_of(logits[:, :-1], targets[:, 1:]).mean(),
            "The targets are moved once more: target t already follows position t.",
        ),
    ]


def of_perplexity(losses: np.ndarray) -> Mistakes:
    """Wrong perplexities of right losses (B, T)."""
    return [
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


def mean_distance(weights: np.ndarray) -> np.ndarray:
    """The right distances (...) of weights (..., T, T)."""
    places = np.arange(weights.shape[-1])
    rows = np.sum(weights * (places[:, None] - places), axis=-1)  # (..., T)
    return rows[..., 1:].mean(axis=-1)


def of_distance(weights: np.ndarray) -> Mistakes:
    """Wrong distances (...) of weights (..., T, T)."""
    places = np.arange(weights.shape[-1])
    products = weights * (places[:, None] - places)  # (..., T, T)
    rows = products.sum(axis=-1)  # (..., T)
    return [
        (
            rows.mean(axis=-1),
            "The first query is counted: it can read itself alone, leave it out.",
        ),
        (
            -mean_distance(weights),
            "The distance is negative: it is query minus key, t - i.",
        ),
        (rows.sum(axis=-1), "The rows are summed: take their mean."),
        (
            products.mean(axis=(-1, -2)),
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


HEADS = [
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
        {"divisor": "width"},
        "The scores are divided by the square root of D: a head is H wide.",
    ),
    ({"mask": "none"}, "The causal mask is missing."),
    ({"mask": "transposed"}, "The causal mask is transposed."),
    ({"projected": False}, "The projection after the heads is missing."),
]


def of_heads(inputs, num_heads: int, kernels, bias) -> Mistakes:
    """Wrong outputs (B, T, D) of multi-head attention."""
    return [
        (_multi_head(inputs, num_heads, kernels, bias, **change), fault)
        for change, fault in HEADS
    ]


def _multi_head(
    inputs,
    num_heads,
    kernels,
    bias,
    split="right",
    merge="right",
    divisor="head",
    mask="right",
    projected=True,
) -> np.ndarray:
    batch, length, width = inputs.shape
    size = width // num_heads
    heads = []
    for kernel in kernels[:3]:
        x = inputs @ kernel
        if split == "raw":
            heads.append(x.reshape(batch, num_heads, length, size))
        elif split == "interleaved":
            x = x.reshape(batch, length, size, num_heads)
            heads.append(x.transpose(0, 3, 1, 2))
        else:
            x = x.reshape(batch, length, num_heads, size)
            heads.append(x.transpose(0, 2, 1, 3))
    query, key, value = heads
    lower = np.tri(length, dtype="bool")
    allowed = {"right": lower, "transposed": lower.T, "none": None}[mask]
    divisor = math.sqrt(width if divisor == "width" else size)
    outputs = attention_weights(query, key, allowed, divisor) @ value  # (B, N, T, H)
    if merge == "reversed":
        outputs = outputs[:, ::-1]
    if merge == "interleaved":
        outputs = outputs.transpose(0, 2, 3, 1)
    elif merge != "raw":
        outputs = outputs.transpose(0, 2, 1, 3)
    outputs = outputs.reshape(batch, length, width)
    return outputs @ kernels[3] + bias if projected else outputs


def of_block(block, x) -> Mistakes:
    """Wrong outputs (B, T, D) of a block, from its sublayers; x is a tensor."""
    norm, second = block.attention_norm, block.feed_forward_norm
    attend = block.attention

    def forward(hidden, activation=ops.gelu):
        return block.narrow(activation(block.widen(hidden)))

    update = attend(norm(x))
    middle = x + update  # what the second half starts from
    unnormed = x + attend(x)
    return [
        (
            second(norm(unnormed) + forward(norm(unnormed))),
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
        (unnormed + forward(second(unnormed)), "The first norm is missing."),
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
