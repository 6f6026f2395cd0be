"""Tests of keras_tinygpt.layers.blocks."""

import functools
import math
import re

import keras
import numpy as np
import pytest
from helpers import check_layer, normal, randomize, reference_attention, to_numpy

from keras_tinygpt.layers import FeedForward, TransformerBlock, normalization
from keras_tinygpt.layers.blocks import ACTIVATIONS
from keras_tinygpt.layers.normalization import make_norm

pytestmark = pytest.mark.backend

B, T, N, D = 2, 5, 3, 12
BLOCKS = {
    "default": {},
    "post": {"norm_position": "post", "normalization": "rms", "activation": "relu"},
    "modern": {
        "num_kv_heads": 1,
        "positions": "rotary",
        "normalization": "rms",
        "activation": "swiglu",
        "use_bias": False,
        "qk_norm": True,
        "attention_window": 3,
        "intermediate_dim": 17,
    },
    "classic": {
        "positions": "alibi",
        "norm_position": "post",
        "activation": "relu2",
        "qkv_bias": True,
        "fused_projections": False,
    },
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def make_block(name="default", **options) -> TransformerBlock:
    block = TransformerBlock(N, **{**BLOCKS[name], **options})
    block.build((None, None, D))
    return randomize(block)


def reference_feed_forward(layer, x) -> np.ndarray:
    def dense(x, name):
        weights = [to_numpy(weight) for weight in getattr(layer, name).weights]
        return x @ weights[0] + (weights[1] if layer.use_bias else 0.0)

    hidden = dense(x, "_intermediate")
    if layer.activation == "swiglu":
        gate = dense(x, "_gate")
        hidden = hidden * gate / (1 + np.exp(-gate))
    elif layer.activation == "gelu":
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        hidden = 0.5 * hidden * (1 + np.tanh(inner))
    else:
        hidden = np.maximum(hidden, 0) ** (2 if layer.activation == "relu2" else 1)
    return dense(hidden, "_output")


def reference_block(block, x, padding=None) -> np.ndarray:
    def norm(x, layer):
        scale, *shift = [to_numpy(weight) for weight in layer.weights]
        if block.normalization == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)
        return x * scale + (shift[0] if shift else 0.0)

    sublayers = (
        (block._attention_norm, lambda x: attention(x)),
        (block._feed_forward_norm, lambda x: reference_feed_forward(feed_forward, x)),
    )
    feed_forward = block._feed_forward

    def attention(x):
        return reference_attention(block._attention, x, padding)[0]

    for layer, sublayer in sublayers:
        if block.norm_position == "pre":
            x = x + sublayer(norm(x, layer))
        else:
            x = norm(x + sublayer(x), layer)
    return x


# Norms.


@pytest.mark.parametrize(
    ("normalization", "inputs", "expected"),
    [
        ("layer", [1, 3, 5, 7], [-1.342, -0.447, 0.447, 1.342]),
        ("layer", [1, 2, 3, 6], [-1.07, -0.53, 0, 1.60]),
        ("layer", [15, 25, 35, 65], [-1.07, -0.53, 0, 1.60]),
        ("rms", [1, 2, 3, 6], [0.283, 0.566, 0.849, 1.697]),
        ("rms", [10, 20, 30, 60], [0.283, 0.566, 0.849, 1.697]),
    ],
)
def test_norms_by_hand(normalization, inputs, expected):
    """Design, section 6: LN(1, 2, 3, 6) = LN(10 h + 5); the RMS forgets scale alone."""
    outputs = to_numpy(make_norm(normalization)(np.array([inputs], "float32")))[0]
    rounding = 5e-4 if expected[0] in (-1.342, 0.283) else 5e-3
    np.testing.assert_allclose(outputs, expected, atol=rounding)


def test_layer_norm_forgets_scale_and_shift():
    hidden = normal(B, D)
    first, second = (to_numpy(make_norm("layer")(x)) for x in (hidden, 10 * hidden + 5))
    np.testing.assert_allclose(first, second, atol=1e-4)
    np.testing.assert_allclose(first.mean(-1), 0.0, atol=1e-6)
    np.testing.assert_allclose(first.std(-1), 1.0, atol=1e-4)


@pytest.mark.parametrize("normalization", ["layer", "rms"])
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_norms_run_in_float32(normalization, dtype):
    """The squares of these inputs overflow in float16."""
    x = np.array([[1000, 3000, 5000, 7000]], "float32")
    outputs = to_numpy(make_norm(normalization, dtype)(x))
    expected = to_numpy(make_norm(normalization)(x))
    np.testing.assert_allclose(outputs, expected, atol=0.01)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's CPU path")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-5), ("float32", 1e-5), ("float16", 0.005), ("bfloat16", 0.02)],
)
@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization"])
def test_the_norms_of_pytorch_have_the_gradients_of_keras(name, dtype, tolerance):
    import torch

    results = []
    for package, kind in ((normalization, dtype), (keras.layers, None)):
        norm = getattr(package, name)(epsilon=0.1, dtype=kind)
        norm.build((None, None, D))
        for weight in norm.trainable_variables:
            weight.assign(np.linspace(0.5, 2.0, D))
        x = torch.tensor(normal(B, T, D), requires_grad=True)
        outputs = norm(x.to(getattr(torch, kind)) if kind else x)
        (outputs.float() ** 3).sum().backward()
        gradients = [weight.value.grad for weight in norm.trainable_variables]
        results.append([outputs, x.grad, *gradients])
    for own, expected in zip(*results, strict=True):
        scale = np.abs(to_numpy(expected)).max()
        difference = np.abs(to_numpy(own) - to_numpy(expected)) / scale
        assert difference.max() < tolerance


# The feed-forward layer.


def test_gelu_in_bfloat16_is_within_its_rounding():
    """Whichever of the two forms of gelu a backend computes fast."""
    layer = FeedForward(4 * D, dtype="mixed_bfloat16")
    layer.build((None, D))
    exact = FeedForward(4 * D)
    exact.build((None, D))
    randomize(exact)
    layer.set_weights(exact.get_weights())
    x = normal(40, D)
    outputs, expected = to_numpy(layer(x)), to_numpy(exact(x))
    assert np.abs(outputs - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("activation", "options", "num_parameters"),
    [
        ("gelu", {}, 12 * 48 + 48 + 48 * 12 + 12),
        ("relu", {"use_bias": False}, 2 * 12 * 48),
        ("relu2", {"intermediate_dim": 7}, 2 * 12 * 7 + 7 + 12),
        ("swiglu", {"intermediate_dim": 7}, 3 * 12 * 7 + 2 * 7 + 12),
    ],
)
def test_feed_forward(activation, options, num_parameters, tmp_path):
    check_layer(
        functools.partial(FeedForward, activation=activation, **options),
        (B, T, D),
        num_parameters=num_parameters,
        path=tmp_path,
    )


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("relu", [2.1, 4.2]),
        ("relu2", [4.1, 8.2]),
        ("gelu", [1.9546 - 3 * 0.0454 + 0.1, 2 * 1.9546 - 4 * 0.0454 + 0.2]),
    ],
)
def test_feed_forward_by_hand(activation, expected):
    """The middle is g(2), g(-2), g(0); gelu(2) = 1.9546 and gelu(-2) = -0.0454."""
    layer = FeedForward(3, activation)
    layer.build((None, 2))
    layer.set_weights(
        [
            np.array([[1, 0, 1], [0, 1, 1]]),
            np.array([0, 0, 0]),
            np.array([[1, 2], [3, 4], [5, 6]]),
            np.array([0.1, 0.2]),
        ]
    )
    outputs = to_numpy(layer(np.array([[2, -2]], "float32")))
    np.testing.assert_allclose(outputs, [expected], atol=3e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("use_bias", [True, False])
def test_feed_forward_equals_the_numpy_reference(activation, use_bias):
    layer = FeedForward(17, activation, use_bias)
    layer.build((None, None, D))
    randomize(layer)
    x = normal(B, T, D)
    expected = reference_feed_forward(layer, x)
    np.testing.assert_allclose(to_numpy(layer(x)), expected, atol=1e-4)
    alone = to_numpy(layer(x[:, 3:4]))
    np.testing.assert_allclose(alone, expected[:, 3:4], atol=1e-4)


# The block.


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("default", 4 * 144 + 12 + 8 * 144 + 48 + 12 + 4 * 12),
        ("post", 4 * 144 + 12 + 8 * 144 + 48 + 12 + 2 * 12),
        ("modern", 2 * 144 + 2 * 12 * 4 + 2 * 4 + 3 * 12 * 17 + 2 * 12),
        ("classic", 4 * 144 + 4 * 12 + 8 * 144 + 48 + 12 + 4 * 12),
    ],
)
def test_block(name, num_parameters, tmp_path):
    options = {"num_heads": N, **BLOCKS[name], "attention_dropout": 0.1, "seed": 5}
    check_layer(
        functools.partial(TransformerBlock, **options),
        (B, T, D),
        num_parameters=num_parameters,
        path=tmp_path,
    )


@every_block
def test_block_equals_the_numpy_reference(name):
    block, x = make_block(name), normal(B, T, D)
    outputs = to_numpy(block(x))
    np.testing.assert_allclose(outputs, reference_block(block, x), atol=1e-3)
    for changed in range(T):  # earlier rows move by exactly 0.0
        other = x.copy()
        other[:, changed] += 1
        moved = np.abs(to_numpy(block(other)) - outputs).max((0, 2))
        assert np.all(moved[:changed] == 0.0) and moved[changed] > 0


def test_a_pre_norm_block_starts_from_its_input():
    """With zero output projections nothing is added to the residual stream."""
    block, x = make_block(), normal(B, T, D)
    for layer in (block._attention._output, block._feed_forward._output):
        layer.set_weights([np.zeros(weight.shape) for weight in layer.weights])
    np.testing.assert_array_equal(to_numpy(block(x)), x)


def test_a_post_norm_block_ends_in_its_norm():
    block = TransformerBlock(N, norm_position="post")
    outputs = to_numpy(block(normal(B, T, D)))
    np.testing.assert_allclose(outputs.mean(-1), 0.0, atol=1e-6)
    np.testing.assert_allclose(outputs.std(-1), 1.0, atol=1e-4)


@every_block
def test_a_keras_mask_passes_through_a_stack(name):
    tokens = np.array([[3, 1, 4, 0, 0], [0, 0, 2, 7, 1]])
    padding = tokens != 0
    embedding = keras.layers.Embedding(11, D, mask_zero=True)
    blocks = [make_block(name), make_block(name)]
    x = embedding(tokens)
    expected = to_numpy(x)
    for block in blocks:
        x = block(x)
        expected = reference_block(block, expected, padding)
    np.testing.assert_array_equal(to_numpy(x._keras_mask), padding)
    np.testing.assert_allclose(to_numpy(x), expected, atol=2e-3)


@every_block
def test_cached_rows_of_a_block(name):
    block, x, slots = make_block(name), normal(B, T, D), 7
    inputs = keras.Input((None, D))
    cache = tuple(keras.Input((slots, 4)) for _ in range(2))
    index = keras.Input(batch_shape=(), dtype="int32")
    scored = block(inputs, cache=cache, cache_index=index, return_attention_scores=True)
    assert scored[1].shape == (None, N, None, slots)
    model = keras.Model((inputs, cache, index), scored)
    cache = (np.zeros((B * (block.num_kv_heads or N), slots, 4), "float32"),) * 2
    expected, weights = block(x, return_attention_scores=True)
    start = 0
    for stop in (2, 3, T):
        args = (x[:, start:stop], cache, np.int32(start))
        args = keras.tree.map_structure(keras.ops.convert_to_tensor, args)
        outputs, scores, cache = model(args)
        for ours, theirs in (
            (outputs, to_numpy(expected)[:, start:stop]),
            (scores[..., :T], to_numpy(weights)[:, :, start:stop]),
        ):
            np.testing.assert_allclose(to_numpy(ours), theirs, atol=1e-3)
        start = stop


@pytest.mark.parametrize("by_position", [True, False])
def test_a_block_takes_an_attention_mask(by_position):
    block, x = make_block(causal=False), normal(B, T, D)
    inputs, mask = keras.Input((T, D)), keras.Input((T, T), dtype="bool")
    outputs = block(inputs, mask) if by_position else block(inputs, attention_mask=mask)
    lower = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    ours = keras.Model([inputs, mask], outputs)([x, lower])
    causal = make_block()
    causal.set_weights(block.get_weights())
    np.testing.assert_allclose(to_numpy(ours), to_numpy(causal(x)), atol=1e-5)


CROSS = {"cross_attention": True, "num_kv_heads": 1, "norm_position": "post"}


def test_a_block_with_cross_attention(tmp_path):
    """Its size, and that it reloads, with a context of another width."""
    block = TransformerBlock(N, **CROSS)
    block.build((None, None, D), (None, None, 7))
    cross = 2 * D * D + D + 2 * 7 * 4 + 2 * D
    plain = 2 * D * D + 2 * D * 4 + D + 8 * D * D + 48 + D + 4 * D
    assert block.count_params() == plain + cross
    inputs, context = keras.Input((None, D)), keras.Input((None, 7))
    model = keras.Model([inputs, context], block(inputs, context=context))
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    arguments = [normal(B, T, D), normal(B, 3, 7)]
    ours, theirs = to_numpy(model(arguments)), to_numpy(copy(arguments))
    np.testing.assert_array_equal(ours, theirs)
    assert copy.layers[-1].get_config() == block.get_config()


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_what_a_decoder_block_reads(norm_position):
    """Its weights on padding are exactly 0, and what is padded does not matter."""
    block = make_block(**{**CROSS, "norm_position": norm_position})
    block = randomize(block)
    x, context = normal(B, T, D), normal(B, 7, D, seed=1)
    mask = np.arange(7) < np.array([[4], [6]])
    outputs, own, cross = block(
        x, context=context, context_mask=mask, return_attention_scores=True
    )
    assert tuple(own.shape) == (B, N, T, T) and tuple(cross.shape) == (B, N, T, 7)
    cross, mask_of_rows = to_numpy(cross), mask[:, None, None]
    assert np.all(cross[np.broadcast_to(~mask_of_rows, cross.shape)] == 0.0)
    assert np.all(cross[np.broadcast_to(mask_of_rows, cross.shape)] > 0.0)
    np.testing.assert_allclose(cross.sum(-1), 1.0, atol=1e-6)
    other = np.where(mask[..., None], context, 99.0).astype("float32")
    again = to_numpy(block(x, context=other, context_mask=mask))
    np.testing.assert_allclose(again, to_numpy(outputs), atol=1e-5)
    moved = to_numpy(block(x, context=context + 1, context_mask=mask))
    assert np.abs(moved - to_numpy(outputs)).max((0, 2)).min() > 1e-3
    cache = block.project_context(context)
    cached = to_numpy(block(x, context_cache=cache, context_mask=mask))
    np.testing.assert_allclose(cached, to_numpy(outputs), atol=1e-5)


def test_each_dropout_of_a_block_draws_its_own_numbers():
    block = make_block(dropout=0.5, attention_dropout=0.5, seed=2**31 - 1)
    x = normal(B, T, D)
    dropouts = (
        block._attention_dropout,
        block._feed_forward_dropout,
        block._attention._dropout,
    )
    masks = [
        to_numpy(dropout(np.ones((1, 101), "float32"), training=True)) > 0
        for dropout in dropouts
    ]
    # Two independent masks of 101 fair draws are equal once in 2 ** 101 runs.
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert np.any(masks[first] != masks[second])
    still = make_block()
    still.set_weights(block.get_weights())
    np.testing.assert_array_equal(to_numpy(block(x)), to_numpy(still(x)))
    assert np.abs(to_numpy(block(x, training=True)) - to_numpy(still(x))).max() > 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeedForward(0), "intermediate_dim must be at least 1, got 0"),
        (lambda: FeedForward(7.0), "intermediate_dim must be an integer, got 7.0"),
        (
            lambda: FeedForward(7, "tanh"),
            "activation must be one of 'gelu', 'relu', 'relu2', 'swiglu', got 'tanh'",
        ),
        (lambda: FeedForward(7, use_bias=1), "use_bias must be True or False, got 1"),
        (
            lambda: make_norm("batch"),
            "normalization must be one of 'layer', 'rms', got 'batch'",
        ),
        (lambda: make_block(normalization=None), "normalization must be one of"),
        (
            lambda: make_block(norm_position="mid"),
            "norm_position must be one of 'pre', 'post', got 'mid'",
        ),
        (lambda: make_block(activation="silu"), "activation must be one of"),
        (
            lambda: make_block(dropout=1.0),
            "dropout must be a finite number in [0, 1), got 1.0",
        ),
        (lambda: make_block(positions="sinusoidal"), "positions must be one of"),
        (lambda: TransformerBlock(0), "num_heads must be at least 1, got 0"),
        (
            lambda: make_block(cross_attention=1),
            "cross_attention must be True or False, got 1",
        ),
        (
            lambda: make_block(**CROSS)(np.zeros((B, T, D))),
            "context must be given to a block with cross_attention=True, got none",
        ),
        (
            lambda: make_block()(np.zeros((B, T, D)), context=np.zeros((B, T, D))),
            "context must not be given to a block with cross_attention=False, got one",
        ),
        (
            lambda: TransformerBlock(5)(np.zeros((B, T, D))),
            "hidden_dim must be divisible by num_heads=5, got 12",
        ),
        (
            lambda: TransformerBlock(N, positions="rotary")(np.zeros((B, T, 15))),
            "rotary positions need an even head_dim, got 5",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
