"""Tests of keras_tinygpt.layers.attention."""

import functools
import re

import keras
import numpy as np
import pytest
from helpers import (
    JIT,
    check_layer,
    normal,
    randomize,
    reference_attention,
    to_numpy,
)
from keras import ops

from keras_tinygpt.layers import (
    CausalMultiHeadAttention,
    CrossAttention,
    SinusoidalPositions,
    attend,
    attention,
    causal_mask,
)

pytestmark = pytest.mark.backend

B, T, N, H, D = 2, 7, 6, 4, 24
VARIANTS = {
    "plain": {},
    "separate": {"fused_projections": False},
    "biases": {"qkv_bias": True},
    "no-bias": {"use_bias": False},
    "wide-heads": {"head_dim": 10},
    "grouped": {"num_kv_heads": 3},
    "one-key-head": {"num_kv_heads": 1, "fused_projections": False, "qkv_bias": True},
    "window": {"attention_window": 3},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "qk-norm": {"qk_norm": True},
    "all": {
        "positions": "rotary",
        "num_kv_heads": 2,
        "attention_window": 4,
        "qk_norm": True,
        "qkv_bias": True,
    },
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
some_variants = pytest.mark.parametrize(
    "variant", ["plain", "grouped", "window", "alibi", "rotary", "all"]
)


def make_layer(variant="plain", **options) -> CausalMultiHeadAttention:
    layer = CausalMultiHeadAttention(N, **{**VARIANTS[variant], **options})
    layer.build((None, None, D))
    return randomize(layer)


def heads(rows) -> np.ndarray:
    """(T, H) -> (B, N, T, H) with one sequence and one head."""
    return np.array(rows, "float32")[None, None]


def copy_weights(peer, layer) -> None:
    """Keras keeps (D, N, H); we keep (D, N * H) and may join query, key and value."""
    values = {}
    for weight in peer.weights:
        name = "/".join(weight.path.split("/")[-2:])
        values[name.replace("attention_output", "output")] = to_numpy(weight)
    for weight in layer.weights:
        name, kind = weight.path.split("/")[-2:]
        parts = [values[f"{part}/{kind}"] for part in name.split("_")]
        parts = [part.reshape(*weight.shape[:-1], -1) for part in parts]
        weight.assign(np.concatenate(parts, axis=-1))


# The masked softmax, by hand.


def test_three_tokens_by_hand():
    """Design, section 6 (a)."""
    query, key = heads([[1, 0], [0, 1], [1, 1]]), heads([[1, 0], [0, 1], [0.5, 0.5]])
    outputs, weights = (to_numpy(x)[0, 0] for x in attend(query, key, key))
    scores = np.log(weights)
    expected = np.array([[0.71, 0, 0.35], [0, 0.71, 0.35], [0.71, 0.71, 0.71]])
    for values in (scores, expected):  # a softmax forgets the mean of a row
        values -= values.mean(-1, keepdims=True)
    np.testing.assert_allclose(scores, expected, atol=0.005)
    np.testing.assert_allclose(weights[0], [0.46, 0.22, 0.32], atol=0.005)
    np.testing.assert_allclose(outputs[0], [0.62, 0.38], atol=0.005)


@pytest.mark.parametrize(
    ("scale", "weights", "slope"),
    [(2, (0.982, 0.018), 0.018), (1, (0.881, 0.119), 0.105)],
)
def test_scaling_keeps_the_softmax_out_of_saturation(scale, weights, slope):
    """Design, section 6 (b); a query times sqrt(H) = 2 undoes the scaling."""
    query, key = heads([[scale] * 4]), heads([[1, 1, 1, 1], [1, -1, 1, -1]])

    def first_weight(change):
        bias = np.array([[change, 0]], "float32")
        return to_numpy(attend(query, key, key, bias=bias)[1])[0, 0, 0]

    np.testing.assert_allclose(first_weight(0), weights, atol=5e-4)
    derivative = (first_weight(0.01) - first_weight(-0.01))[0] / 0.02
    assert derivative == pytest.approx(slope, abs=5e-4)


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_scaled_scores_have_unit_deviation(head_dim):
    """Design, section 6 (c).

    The deviation of 40,000 scores has a relative error of at most 0.4% (one sigma), so
    2% is off by five: with a new seed it would fail about once in a million runs.
    """
    query, key = normal(2, 40_000, 1, 1, head_dim)
    pair = np.concatenate([key, np.zeros_like(key)], axis=2)  # a zero key scores 0
    weights = to_numpy(attend(query, pair, pair)[1])[:, 0, 0]
    scaled = np.log(weights[:, 0]) - np.log(weights[:, 1])
    unscaled = np.sum(query * key, axis=-1).ravel()
    np.testing.assert_allclose(scaled * np.sqrt(head_dim), unscaled, atol=1e-3)
    assert scaled.std() == pytest.approx(1.0, rel=0.02)
    assert unscaled.std() == pytest.approx(np.sqrt(head_dim), rel=0.02)


def test_masked_scores_by_hand():
    """Design, section 6 (d): scaled scores (1, 1, 5, 3) in the second row."""
    query = heads([[2, 0, 0, 0]] * 4)
    key = heads([[score, 0, 0, 0] for score in (1, 1, 5, 3)])
    mask = causal_mask(np.arange(4), np.arange(4))
    weights = to_numpy(attend(query, key, key, mask)[1])[0, 0]
    np.testing.assert_array_equal(weights[1], [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(weights[0], [1, 0, 0, 0])


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, ["1000", "1100", "1110"]),
        (1, ["1000", "0100", "0010"]),
        (2, ["1000", "1100", "0110"]),
    ],
)
def test_causal_mask_by_hand(window, expected):
    mask = causal_mask(np.arange(3), np.arange(4), window)
    rows = ["".join(str(int(x)) for x in row) for row in to_numpy(mask)]
    assert rows == expected
    later = to_numpy(causal_mask(np.arange(2) + 1, np.arange(4), window))
    np.testing.assert_array_equal(later, to_numpy(mask)[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@some_variants
def test_forbidden_weights_are_zero_and_rows_sum_to_one(variant, dtype):
    """Design, section 6 (e)."""
    layer = make_layer(variant, dtype=dtype)
    padding = np.arange(T) < np.array([[T], [T - 2]])
    x = ops.cast(normal(B, T, D), dtype)
    _, weights = layer(x, mask=padding, return_attention_scores=True)
    assert keras.backend.standardize_dtype(weights.dtype) == "float32"
    allowed = to_numpy(causal_mask(np.arange(T), np.arange(T), layer.attention_window))
    allowed = np.broadcast_to(
        allowed.astype(bool) & padding[:, None, None], weights.shape
    )
    weights = to_numpy(weights)
    assert np.all(weights[~allowed] == 0.0) and np.all(weights[allowed] > 0)
    np.testing.assert_allclose(weights[allowed.any(-1)].sum(-1), 1.0, atol=1e-6)


# The layer against independent implementations and by its properties.


@pytest.mark.parametrize(
    ("variant", "options", "num_parameters"),
    [
        ("plain", {}, 4 * 24 * 24 + 24),
        ("one-key-head", {}, 2 * 24 * 24 + 2 * 24 * 4 + 24 + 2 * 4 + 24),
        ("all", {"attention_dropout": 0.2, "seed": 3}, 4 * 24 * 16 + 40 + 24 + 8),
        ("alibi", {"use_bias": False, "causal": True}, 4 * 24 * 24),
        ("plain", {"causal": False, "head_dim": 5}, 4 * 24 * 30 + 24),
    ],
)
def test_layer(variant, options, num_parameters, tmp_path):
    options = {"num_heads": N, **VARIANTS[variant], **options}

    def make(**more):
        return CausalMultiHeadAttention(**{**options, **more})

    check_layer(make, (B, T, D), num_parameters=num_parameters, path=tmp_path)


@every_variant
def test_equals_the_numpy_reference(variant):
    """Design, section 6 (h)."""
    layer, x = make_layer(variant), normal(B, T, D)
    outputs, weights = layer(x, return_attention_scores=True)
    expected, expected_weights = reference_attention(layer, x)
    np.testing.assert_allclose(to_numpy(outputs), expected, atol=1e-4)
    np.testing.assert_allclose(to_numpy(weights), expected_weights, atol=1e-5)
    np.testing.assert_allclose(to_numpy(layer(x)), to_numpy(outputs), atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_keras_layer(fused, bias, causal):
    """Design, section 6 (h)."""
    peer = keras.layers.MultiHeadAttention(N, H, use_bias=bias)
    x = normal(B, T, D)
    peer.build(x.shape, x.shape)
    randomize(peer)
    layer = make_layer(
        fused_projections=fused, qkv_bias=bias, use_bias=bias, causal=causal
    )
    copy_weights(peer, layer)
    expected = peer(x, x, use_causal_mask=causal, return_attention_scores=True)
    for ours, theirs in zip(
        layer(x, return_attention_scores=True), expected, strict=True
    ):
        np.testing.assert_allclose(to_numpy(ours), to_numpy(theirs), atol=1e-5)


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="XLA fuses by itself there"
)
@every_variant
def test_the_fused_kernel_gives_the_same(variant, monkeypatch):
    """As on a GPU; where more than the causal rule holds it is not asked."""
    layer, x = make_layer(variant), normal(B, T, D)
    expected = to_numpy(layer(x))
    used = []

    def fused(*arguments):
        used.append(variant)
        return plain_fused(*arguments)

    plain_fused = attention._attend_fused
    monkeypatch.setattr(attention, "_attend_fused", fused)
    monkeypatch.setattr(attention, "has_fused_attention", lambda query: True)
    np.testing.assert_allclose(to_numpy(layer(x)), expected, atol=1e-5)
    assert bool(used) == (variant not in ("window", "alibi", "all"))
    del used[:]
    layer(x, return_attention_scores=True)
    layer(x, attention_mask=np.ones((B, T, T), bool))
    layer(x, mask=np.ones((B, T), bool))
    make_layer(attention_dropout=0.5)(x, training=True)
    make_layer(causal=False)(x)
    assert not used


def test_which_cpu_paths_are_fused():
    """PyTorch's, for types in which scores fit; the others gain nothing by it."""
    for dtype in ("float32", "bfloat16", "float16"):
        used = attention.has_fused_attention(ops.zeros((1, 1, 1, 1), dtype))
        on_torch = keras.backend.backend() == "torch"
        assert used == (on_torch and dtype != "float16")


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's CPU path")
@pytest.mark.parametrize("variant", ["plain", "grouped", "rotary"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flash_length", [1, 10**6])
def test_the_fused_paths_of_pytorch_have_the_same_gradients(
    variant, dtype, flash_length, monkeypatch
):
    import torch

    monkeypatch.setitem(attention.FLASH_LENGTHS, dtype, flash_length)
    tolerance = 1e-5 if dtype == "float32" else 0.06
    layer, x = make_layer(variant, dtype=dtype), normal(B, T, D)
    results = []
    for fused in (lambda query: True, lambda query: False):
        monkeypatch.setattr(attention, "has_fused_attention", fused)
        inputs = torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=True)
        outputs = layer(inputs)
        layer.zero_grad()
        (outputs * outputs).sum().backward()
        gradients = [v.value.grad for v in layer.trainable_variables]
        results.append([outputs, inputs.grad, *gradients])
    for one, other in zip(*results, strict=True):
        scale = np.abs(to_numpy(other)).max()
        np.testing.assert_allclose(
            to_numpy(one) / scale, to_numpy(other) / scale, atol=tolerance
        )


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
def test_grouped_heads_equal_repeated_key_heads(num_kv_heads):
    grouped = make_layer(
        num_kv_heads=num_kv_heads, fused_projections=False, qkv_bias=True
    )
    full = make_layer(fused_projections=False, qkv_bias=True)
    for ours, theirs in zip(grouped.weights, full.weights, strict=True):
        values = to_numpy(ours)
        if ours.shape != theirs.shape:
            values = values.reshape(*ours.shape[:-1], num_kv_heads, H)
            values = np.repeat(values, N // num_kv_heads, axis=-2)
        theirs.assign(values.reshape(theirs.shape))
    x = normal(B, T, D)
    np.testing.assert_allclose(to_numpy(grouped(x)), to_numpy(full(x)), atol=1e-5)


def test_without_mask_and_positions_order_does_not_matter():
    """Design, section 6 (f)."""
    layer = CausalMultiHeadAttention(N, causal=False, seed=1)
    x, order = normal(B, T, D), np.array([3, 0, 6, 1, 5, 2, 4])

    def error(encode):
        outputs = to_numpy(layer(encode(x)))[:, order]
        return np.abs(to_numpy(layer(encode(x[:, order]))) - outputs).max()

    assert error(lambda x: x) < 1e-6
    assert error(SinusoidalPositions()) > 0.1


@pytest.mark.parametrize(("num_layers", "changes"), [(1, False), (2, True)])
def test_a_second_causal_layer_sees_the_order(num_layers, changes):
    """Design, section 6 (g)."""
    layers = [make_layer() for _ in range(num_layers)]
    x, order = normal(B, T, D), np.array([3, 0, 5, 1, 4, 2, 6])

    def last_row(x):
        for layer in layers:
            x = layer(x)
        return to_numpy(x)[:, -1]

    moved = np.abs(last_row(x[:, order]) - last_row(x)).max()
    assert moved > 1e-2 if changes else moved < 1e-5


@every_variant
def test_later_and_distant_tokens_are_not_read(variant):
    """Outputs move by exactly 0.0, not by a rounding error."""
    layer, x = make_layer(variant), normal(B, T, D)
    outputs = to_numpy(layer(x))
    for changed in range(T):
        other = x.copy()
        other[:, changed] += 5
        moved = np.abs(to_numpy(layer(other)) - outputs).max((0, 2)) > 0
        reach = range(changed, min(T, changed + (layer.attention_window or T)))
        assert set(np.flatnonzero(moved)) == set(reach)


def test_qk_norm_ignores_the_scale_of_queries_and_keys():
    layer, x = make_layer("qk-norm", fused_projections=False), normal(B, T, D)
    outputs = to_numpy(layer(x))
    for weight in layer.weights[:2]:  # the query and the key kernel
        weight.assign(7 * weight)
    np.testing.assert_allclose(to_numpy(layer(x)), outputs, atol=1e-3)


# Padding and other masks.


PADDED = np.array([[3, 1, 4, 1, 5, 0, 0], [0, 0, 9, 2, 6, 5, 3], [0] * 7], "int32")


@some_variants
def test_the_three_ways_to_pass_a_padding_mask(variant):
    embedding = keras.layers.Embedding(11, D, mask_zero=True)
    layer, padding = make_layer(variant), PADDED != 0
    x = embedding(PADDED)
    bare = to_numpy(x).astype("float32")
    expected, _ = reference_attention(layer, bare, padding)
    tokens = keras.Input((None,), dtype="int32")
    everything = np.ones((T, T), bool)
    for outputs in (
        layer(x),
        layer(x, attention_mask=everything),
        layer(bare, mask=padding),
        layer(bare, attention_mask=padding[:, None]),
        layer(bare, attention_mask=padding.astype("int32")[:, None]),
        layer(bare, padding[:, None]),
        keras.Model(tokens, layer(embedding(tokens)))(PADDED),
        keras.Model(tokens, layer(embedding(tokens))).predict(PADDED, verbose=0),
    ):
        np.testing.assert_allclose(to_numpy(outputs), expected, atol=1e-4)
    np.testing.assert_array_equal(to_numpy(layer(x)._keras_mask), padding)


@pytest.mark.parametrize("batched", [False, True])
def test_attention_mask_is_joined_to_the_causal_rule(batched):
    layer, x = make_layer(), normal(B, T, D)
    mask = np.random.default_rng(0).random((B, T, T)) < 0.5
    mask = mask if batched else mask[0]
    _, weights = layer(x, attention_mask=mask, return_attention_scores=True)
    allowed = mask & np.tri(T, dtype=bool)
    allowed = np.broadcast_to(allowed if batched else [allowed] * B, (B, T, T))
    np.testing.assert_array_equal(to_numpy(weights).all(1), allowed)
    np.testing.assert_array_equal(to_numpy(weights).any(1), allowed)


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_rows_without_a_key_are_zero_and_train(variant):
    layer = make_layer(variant)
    _, weights = layer(normal(3, T, D), mask=PADDED != 0, return_attention_scores=True)
    assert np.all(to_numpy(weights)[2] == 0.0)
    x, mask = keras.Input((T, D)), keras.Input((T,), dtype="bool")
    model = keras.Model([x, mask], layer(x, mask=mask))
    outputs = to_numpy(model([normal(3, T, D), PADDED != 0]))
    bias = to_numpy(layer.weights[-1])
    np.testing.assert_allclose(outputs[2], np.tile(bias, (T, 1)), atol=1e-6)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=JIT)
    before = model.get_weights()
    model.train_on_batch([normal(3, T, D), PADDED != 0], np.ones((3, T, D)))
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.isfinite(new).all() and np.any(old != new)


def test_scores_beyond_half_precision_are_finite():
    """Scores of 4 x 300^2 / 2 overflow float16, whose largest number is 65,504."""
    query = ops.cast(300.0 * np.ones((1, 1, 3, 4), "float32"), "float16")
    outputs, weights = attend(query, query, query, mask=np.tri(3, dtype=bool))
    np.testing.assert_allclose(to_numpy(weights)[0, 0, 2], 1 / 3, atol=1e-6)
    np.testing.assert_allclose(to_numpy(outputs), 300.0, rtol=1e-3)


# Dropout.


def test_dropout_scales_the_weights_it_keeps():
    """With the identity as values, the outputs are the weights after dropout."""
    dropout = keras.layers.Dropout(0.75, seed=3, dtype="float32")
    query, key = normal(2, 1, N, 31, 31)
    value = np.broadcast_to(np.eye(31, dtype="float32"), (1, N, 31, 31))
    outputs, weights = map(
        to_numpy, attend(query, key, value, dropout=dropout, training=True)
    )
    kept = outputs > 0
    np.testing.assert_allclose(outputs[kept], 4 * weights[kept], rtol=1e-5)
    # 5,766 draws: 0.25 +- 0.0057, so 0.03 is more than five sigma.
    assert kept.mean() == pytest.approx(0.25, abs=0.03)
    outputs, weights = map(to_numpy, attend(query, key, value, dropout=dropout))
    np.testing.assert_allclose(outputs, weights, atol=1e-6)


@pytest.mark.parametrize("cross", [False, True])
def test_dropout_is_for_training_and_follows_its_seed(cross):
    layer_class = CrossAttention if cross else CausalMultiHeadAttention
    x = [normal(B, T, D)] * (1 + cross)

    def outputs(seed, training, rate=0.5):
        layer = layer_class(N, attention_dropout=rate, seed=seed)
        layer.build(*[(None, None, D)] * len(x))
        return to_numpy(randomize(layer)(*x, training=training))

    np.testing.assert_array_equal(outputs(1, False), outputs(1, False, rate=0.0))
    np.testing.assert_array_equal(outputs(1, True), outputs(1, True))
    assert np.abs(outputs(1, True) - outputs(1, False)).max() > 0.1
    assert np.abs(outputs(1, True) - outputs(2, True)).max() > 0.1


# Cached calls.


SLOTS = 11


def step_function(layer, style):
    """The cached call, eager or as a functional model over keras.Input caches."""
    if style == "eager":
        return lambda x, cache, index: layer(x, cache=cache, cache_index=index)
    x = keras.Input((None, D))
    cache = tuple(keras.Input((SLOTS, layer._head_dim)) for _ in range(2))
    index = keras.Input(batch_shape=(), dtype="int32")
    outputs = layer(x, cache=cache, cache_index=index)
    assert outputs[0].shape == (None, None, D)
    assert [part.shape for part in outputs[1]] == [part.shape for part in cache]
    model = keras.Model((x, cache, index), outputs)
    return lambda *args: model(keras.tree.map_structure(ops.convert_to_tensor, args))


@every_variant
def test_cached_rows_equal_uncached_ones(variant):
    """Step by step and in chunks; what the cache held before is not read."""
    layer, x = make_layer(variant), normal(B, T, D)
    expected = to_numpy(layer(x))
    shape = (B * layer._kv_heads, SLOTS, layer._head_dim)
    for style, lengths in (("eager", [3, 1, 3]), ("functional", [1] * T)):
        step = step_function(layer, style)
        cache, start = (np.full(shape, 1e3, "float32"),) * 2, 0
        for length in lengths:
            stop = start + length
            outputs, cache = step(x[:, start:stop], cache, np.int32(start))
            np.testing.assert_allclose(
                to_numpy(outputs), expected[:, start:stop], atol=1e-4
            )
            start = stop
        for part in cache:
            assert np.all(to_numpy(part)[:, T:] == 1e3)


@some_variants
def test_cached_rows_after_left_padding_equal_the_row_alone(variant):
    layer, x, padding = make_layer(variant), normal(B, T, D), np.array([0, 3])
    shape = (B * layer._kv_heads, SLOTS, layer._head_dim)
    cache = (np.zeros(shape, "float32"),) * 2
    mask = np.arange(SLOTS) >= padding[:, None]
    rows = []
    for start, stop in ((0, 4), (4, 5), (5, T)):
        outputs, cache = layer(
            x[:, start:stop],
            attention_mask=mask[:, None],
            cache=cache,
            cache_index=start,
        )
        rows.append(to_numpy(outputs))
    rows = np.concatenate(rows, axis=1)
    for row, first in enumerate(padding):
        alone = to_numpy(layer(x[row : row + 1, first:]))
        np.testing.assert_allclose(rows[row : row + 1, first:], alone, atol=1e-4)


def test_cached_scores_cover_the_slots():
    layer, x = make_layer("grouped"), normal(B, T, D)
    _, expected = layer(x, return_attention_scores=True)
    cache = (np.zeros((B * 3, SLOTS, H), "float32"),) * 2
    for call in (layer, layer.compute_output_spec):
        results = call(x, cache=cache, cache_index=0, return_attention_scores=True)
        outputs, weights, (key, value) = results
        assert tuple(outputs.shape) == (B, T, D)
        assert tuple(weights.shape) == (B, N, T, SLOTS)
        assert tuple(key.shape) == tuple(value.shape) == cache[0].shape
    _, weights, _ = layer(x, cache=cache, cache_index=0, return_attention_scores=True)
    np.testing.assert_allclose(
        to_numpy(weights)[..., :T], to_numpy(expected), atol=1e-6
    )
    assert np.all(to_numpy(weights)[..., T:] == 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_is_kept_in_the_compute_type(dtype):
    layer = make_layer(dtype="mixed_bfloat16")
    cache = tuple(ops.zeros((B * N, SLOTS, H), dtype) for _ in range(2))
    for call in (layer, layer.compute_output_spec)[: 2 if dtype == "bfloat16" else 1]:
        results = call(normal(B, T, D), cache=cache, cache_index=0)
        dtypes = [
            keras.backend.standardize_dtype(x.dtype) for x in (*results[1], results[0])
        ]
        assert dtypes == ["bfloat16"] * 3


# Cross-attention.


S, E = 5, 15


def make_cross(**options) -> CrossAttention:
    layer = CrossAttention(N, **options)
    layer.build((None, None, D), (None, None, E))
    return randomize(layer)


@pytest.mark.parametrize(
    ("options", "num_parameters"),
    [
        ({}, 24 * 24 + 2 * 15 * 24 + 24 * 24 + 24),
        (
            {"num_kv_heads": 2, "head_dim": 5, "qkv_bias": True, "use_bias": False},
            24 * 30 + 2 * 15 * 10 + 30 * 24 + 30 + 2 * 10,
        ),
    ],
)
def test_cross_attention_layer(options, num_parameters, tmp_path):
    check_layer(
        functools.partial(CrossAttention, N, **options),
        (B, T, D),
        (B, S, E),
        num_parameters=num_parameters,
        path=tmp_path,
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_cross_attention_equals_the_keras_layer(bias, masked):
    peer = keras.layers.MultiHeadAttention(N, H, use_bias=bias)
    x, context = normal(B, T, D), normal(B, S, E)
    peer.build(x.shape, context.shape)
    randomize(peer)
    layer = make_cross(qkv_bias=bias, use_bias=bias)
    copy_weights(peer, layer)
    mask = np.array([[1, 1, 0, 1, 0], [1, 0, 0, 1, 1]], bool) if masked else None
    theirs = peer(
        x,
        context,
        attention_mask=None if mask is None else np.repeat(mask[:, None], T, 1),
        return_attention_scores=True,
    )
    ours = layer(x, context, context_mask=mask, return_attention_scores=True)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(to_numpy(our), to_numpy(their), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_masked_context_has_weight_zero(dtype):
    layer = make_cross(dtype=dtype)
    tokens = np.array([[3, 1, 4, 1, 0], [5, 0, 0, 0, 0], [0] * 5])
    embedding = keras.layers.Embedding(11, E, mask_zero=True, dtype=dtype)
    x, context = normal(3, T, D), embedding(tokens)
    implicit = layer(x, context, return_attention_scores=True)
    explicit = layer(
        x, to_numpy(context), context_mask=tokens != 0, return_attention_scores=True
    )
    for results in (implicit, explicit):
        outputs, weights = map(to_numpy, results)
        assert keras.backend.standardize_dtype(results[1].dtype) == "float32"
        masked = np.broadcast_to((tokens == 0)[:, None, None], weights.shape)
        assert np.all(weights[masked] == 0.0) and np.all(weights[~masked] > 0)
        np.testing.assert_allclose(weights[:2].sum(-1), 1.0, atol=1e-6)
        assert np.isfinite(outputs).all()


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_projected_context_serves_as_cache(num_kv_heads):
    layer = make_cross(num_kv_heads=num_kv_heads)
    x, context = normal(B, T, D), normal(B, S, E)
    expected = to_numpy(layer(x, context))
    cache = layer.project_context(context)
    assert {tuple(part.shape) for part in cache} == {(B, num_kv_heads or N, S, H)}
    for t in range(T):
        row = layer(x[:, t : t + 1], None, cache=cache)
        np.testing.assert_allclose(to_numpy(row), expected[:, t : t + 1], atol=1e-5)
    inputs = keras.Input((None, D))
    parts = tuple(keras.Input(part.shape[1:]) for part in cache)
    results = layer(inputs, None, cache=parts, return_attention_scores=True)
    assert results[1].shape == (None, N, None, S)
    outputs, _ = keras.Model([inputs, parts], results)(
        [ops.convert_to_tensor(x), cache]
    )
    np.testing.assert_allclose(to_numpy(outputs), expected, atol=1e-5)


# Errors.


@pytest.mark.parametrize("layer_class", [CausalMultiHeadAttention, CrossAttention])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": 2.0}, "num_heads must be an integer, got 2.0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_kv_heads": 4}, "num_kv_heads must divide num_heads=6, got 4"),
        ({"num_kv_heads": 12}, "num_kv_heads must divide num_heads=6, got 12"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"attention_dropout": 1.0}, "attention_dropout must be a finite number in "),
        ({"attention_dropout": -0.1}, "[0, 1), got -0.1"),
        ({"attention_dropout": None}, "attention_dropout must be a number, got None"),
        ({"qkv_bias": 1}, "qkv_bias must be True or False, got 1"),
        ({"use_bias": None}, "use_bias must be True or False, got None"),
        ({"hidden_dim": 23}, "hidden_dim must be divisible by num_heads=6, got 23"),
    ],
)
def test_bad_arguments(layer_class, options, message):
    options = {"num_heads": N, **options}
    x = np.zeros((B, T, options.pop("hidden_dim", D)))
    with pytest.raises(ValueError, match=re.escape(message)):
        layer = layer_class(**options)
        layer(x) if layer_class is CausalMultiHeadAttention else layer(x, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"positions": "learned"},
            "positions must be one of 'none', 'rotary', 'alibi'",
        ),
        ({"qk_norm": "yes"}, "qk_norm must be True or False, got 'yes'"),
        ({"fused_projections": 0}, "fused_projections must be True or False, got 0"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"attention_window": 0}, "attention_window must be at least 1, got 0"),
        (
            {"attention_window": 3, "causal": False},
            "attention_window needs causal=True, got causal=False",
        ),
        (
            {"positions": "rotary", "head_dim": 3},
            "rotary positions need an even head_dim, got 3",
        ),
    ],
)
def test_bad_arguments_of_causal_attention(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CausalMultiHeadAttention(N, **options)(np.zeros((B, T, D)))


def test_a_padding_mask_with_a_cache_is_refused():
    layer = CausalMultiHeadAttention(num_heads=2)
    cache = tuple(ops.zeros((4, 7, 3)) for _ in range(2))
    mask = np.ones((2, 3), "bool")
    with pytest.raises(ValueError, match="with a cache pass attention_mask"):
        layer(ops.ones((2, 3, 6)), cache=cache, cache_index=0, mask=mask)
