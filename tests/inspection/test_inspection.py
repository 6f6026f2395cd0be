"""Inspection: exact values on made patterns, slow references, every kind of leak."""

import dataclasses
import io
import json

import keras
import numpy as np
import pytest
from helpers import (
    fit_some_steps,
    mean_loss,
    normal,
    randomize,
    reference_attention,
    to_numpy,
    token_ids,
)
from keras import ops
from rich.console import Console

import keras_tinygpt as tg
from keras_tinygpt import cli, inspection
from keras_tinygpt.generation import SamplingConfig
from keras_tinygpt.inspection import figures
from keras_tinygpt.inspection.heads import MapSums
from keras_tinygpt.inspection.maps import audit, inspection_model
from keras_tinygpt.inspection.parts import readable_keys, run_block
from keras_tinygpt.layers import attention as attention_module

V, T = 11, 7
CAUSAL = np.tril(np.ones((T, T), "bool"))


def small_gpt(**changes):
    fields = {"num_layers": 2, "num_heads": 3, "hidden_dim": 12, **changes}
    config = tg.GPTConfig(V, max_sequence_length=T, **fields)
    return randomize(tg.build_gpt(config))


def measure(weights, readable=CAUSAL):
    """Metrics of one map of one head."""
    sums = MapSums([readable])
    sums.add([np.asarray(weights, "float32")[None, None]])
    return sums.metrics()


def test_previous_token_pattern():
    metrics = measure(np.eye(T, k=-1) + np.eye(T) * (np.arange(T) == 0))
    assert metrics.distance == 1.0 and metrics.previous == 1.0
    assert metrics.entropy == metrics.entropy_share == metrics.own == 0.0
    assert metrics.first == pytest.approx(1 / (T - 1))
    np.testing.assert_allclose(metrics.profile[0, 0], np.arange(T) == 1)


def test_uniform_pattern():
    metrics = measure(CAUSAL / np.arange(1, T + 1)[:, None])
    counts = np.arange(2, T + 1)
    assert metrics.entropy == pytest.approx(np.log(counts).mean())
    assert metrics.entropy_share == pytest.approx(1.0)
    assert metrics.distance == pytest.approx(((counts - 1) / 2).mean())
    for share in (metrics.own, metrics.previous, metrics.first):
        assert share == pytest.approx((1 / counts).mean())
    expected = [np.mean(1 / np.arange(max(k, 1) + 1, T + 1)) for k in range(T)]
    np.testing.assert_allclose(metrics.profile[0, 0], expected, rtol=1e-6)


def test_first_token_pattern():
    metrics = measure(np.arange(T) * np.ones((T, 1)) == 0)
    assert metrics.first == 1.0 and metrics.own == metrics.entropy == 0.0
    assert metrics.distance == np.arange(1, T).mean()
    np.testing.assert_allclose(metrics.profile[0, 0, 1:], 1 / np.arange(T - 1, 0, -1))


def test_self_pattern():
    metrics = measure(np.eye(T))
    assert metrics.own == 1.0
    assert metrics.distance == metrics.previous == metrics.first == 0.0
    assert "    0     0      0.00    0.000   0.000  1.000" in metrics.table()


def test_a_window_of_one_key_is_left_out():
    readable = CAUSAL & ~np.tril(CAUSAL, -3)  # three keys a row
    metrics = measure(readable / readable.sum(-1, keepdims=True), readable)
    assert metrics.entropy_share == pytest.approx(1.0)
    assert metrics.profile[0, 0, 2] == pytest.approx(1 / 3)
    np.testing.assert_array_equal(metrics.profile[0, 0, 3:], 0.0)


def slow_metrics(weights, readable):
    """The definitions, a row at a time, over maps (W, T, T) of one head."""
    values = {name: [] for name in ("distance", "entropy", "entropy_share")}
    profile = [[] for _ in range(T)]
    first = []
    for window, query in np.ndindex(*weights.shape[:2]):
        keys = np.flatnonzero(readable[query])
        if len(keys) < 2:
            continue
        row = weights[window, query].astype("float64")
        entropy = -sum(row[j] * np.log(row[j]) for j in keys if row[j] > 0)
        values["distance"].append(sum(row[j] * (query - j) for j in keys))
        values["entropy"].append(entropy)
        values["entropy_share"].append(entropy / np.log(len(keys)))
        for key in keys:
            profile[query - key].append(row[key])
        if 0 in keys:
            first.append(row[0])
    means = {name: np.mean(rows) for name, rows in values.items()}
    profile = [np.mean(rows) if rows else 0.0 for rows in profile]
    return {
        **means, "first": np.mean(first), "profile": np.array(profile),
        "own": profile[0], "previous": profile[1],
    }  # fmt: skip


@pytest.mark.backend
@pytest.mark.parametrize("window", [None, 3])
def test_metrics_of_a_corpus_equal_a_slow_reference(window):
    model = small_gpt(positions="rotary", attention_window=window)
    ids = token_ids(5 * T + 2, vocab_size=V)
    metrics = inspection.head_metrics(model, ids, batch_size=2)
    assert metrics.windows == 5
    windows = ids[: 5 * T].reshape(5, T)
    weights = inspection_model(model).predict_on_batch(windows)["weights"]
    maps = np.stack([to_numpy(block) for block in weights], 1)  # (W, L, N, T, T)
    np.testing.assert_allclose(metrics.mean_map, maps.mean(0), atol=1e-6)
    for block, head in np.ndindex(2, 3):
        readable = readable_keys(model.get_layer(f"block_{block}"), T)
        assert readable.sum(-1).max() == (window or T)
        for name, value in slow_metrics(maps[:, block, head], readable).items():
            measured = getattr(metrics, name)[block, head]
            np.testing.assert_allclose(measured, value, atol=1e-5, err_msg=name)
    assert json.dumps(metrics.numbers())
    part = inspection.head_metrics(model, ids, max_windows=2)
    np.testing.assert_allclose(part.mean_map, maps[:2].mean(0), atol=1e-6)


@pytest.mark.backend
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "rotary", "num_heads": 2, "num_kv_heads": 1, "qk_norm": True},
        {"positions": "alibi", "norm_position": "post", "tie_embeddings": True},
        {"positions": "sinusoidal", "attention_window": 3, "dropout": 0.5},
    ],
)
def test_weights_do_not_change_logits(changes):
    model = small_gpt(**changes)
    ids = token_ids(T, vocab_size=V)
    maps = inspection.attention_maps(model, ids)
    np.testing.assert_allclose(maps.logits, to_numpy(model(ids[None]))[0], atol=1e-5)
    assert maps.weights.shape == (2, model.config.num_heads, T, T)
    assert maps.forbidden_weight == 0.0 and maps.row_sum_error < 1e-6
    assert "largest forbidden weight 0, " in str(maps)
    block = model.get_layer("block_0")
    below = keras.Model(model.inputs[0], block.input)
    hidden = to_numpy(below(ids[None]))
    if block.norm_position == "pre":
        hidden = to_numpy(block._attention_norm(hidden.astype("float32")))
    _, expected = reference_attention(block._attention, hidden)
    np.testing.assert_allclose(maps.weights[0], expected[0], atol=1e-5)


def test_the_audit_sees_what_is_wrong():
    weights = np.tile(np.eye(T), (1, 2, 1, 1))
    weights[0, 1, 2, 4] = 0.25
    assert audit(weights, CAUSAL[None]) == (0.25, 0.25)


def test_a_model_of_ones_own():
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(V, 12, mask_zero=True)(tokens)
    x = tg.layers.CausalMultiHeadAttention(num_heads=3)(x)
    x = tg.layers.TransformerBlock(num_heads=3)(x)
    model = keras.Model(tokens, keras.layers.Dense(V)(x))
    maps = inspection.attention_maps(model, [3, 0, 1, 4, 1])  # 0 is padding
    assert maps.weights.shape == (2, 3, 5, 5)
    assert maps.forbidden_weight == 0.0 and maps.row_sum_error < 1e-6
    np.testing.assert_array_equal(maps.weights[..., 1], 0.0)
    assert inspection.causes(model, [3, 1, 4]).effects.shape == (2, 3, 3, 3)


def test_models_that_cannot_be_read():
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(V, 12)(tokens)
    plain = keras.Model(tokens, keras.layers.Dense(V)(x))
    with pytest.raises(ValueError, match="that holds TransformerBlock .* got Func"):
        inspection.attention_maps(plain, [1, 2])
    block = tg.layers.TransformerBlock(num_heads=3)
    with pytest.raises(ValueError, match="used once, got transformer_block.* twice"):
        inspection.attention_maps(keras.Model(tokens, block(block(x))), [1, 2])
    uneven = keras.Model(tokens, tg.layers.TransformerBlock(num_heads=2)(block(x)))
    with pytest.raises(ValueError, match=r"equally many heads, got \[3, 2\]"):
        inspection.attention_maps(uneven, [1, 2])
    with pytest.raises(ValueError, match="at most max_sequence_length=7"):
        inspection.attention_maps(small_gpt(), np.arange(T + 1))
    with pytest.raises(ValueError, match="between 0 and 10"):
        inspection.attention_maps(small_gpt(), [V])


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_a_block_run_in_parts_is_the_block(norm_position):
    block = tg.layers.TransformerBlock(
        3, norm_position=norm_position, dropout=0.5, activation="swiglu"
    )
    x = ops.convert_to_tensor(normal(2, 5, 12))
    block(x)
    randomize(block)
    np.testing.assert_array_equal(to_numpy(run_block(block, x)), to_numpy(block(x)))
    if norm_position == "pre":  # without either part only attention is left
        alone = run_block(block, x, residuals=False, feed_forward=False)
        expected = block._attention(block._attention_norm(x))
        np.testing.assert_array_equal(to_numpy(alone), to_numpy(expected))


@pytest.mark.backend
@pytest.mark.parametrize("replacement", ["zero", "mean"])
def test_effects_equal_an_edited_model(replacement, monkeypatch):
    """The same edit made inside the one attention function of the package."""
    model = small_gpt(num_heads=2, num_kv_heads=1, positions="rotary")
    ids = token_ids(5, vocab_size=V)
    measured = inspection.causes(model, ids, replacement=replacement, batch_size=2)
    plain, original = to_numpy(model(ids[None]))[0], attention_module.attend
    for block, head, key in np.ndindex(2, 2, 5):
        calls = []

        def edited(q, k, v, *rest, at=(block, head, key), calls=calls):
            outputs, weights = original(q, k, v, *rest)
            calls.append(1)
            if len(calls) == at[0] + 1:
                v = to_numpy(v)[0, 0]  # (T, H), read by both heads
                kept = v.copy()
                kept[at[2]] = v.mean(0) if replacement == "mean" else 0.0
                w, out = to_numpy(weights)[0, at[1]], to_numpy(outputs)
                out[0, at[1]] = w @ kept
                outputs = ops.convert_to_tensor(out.astype("float32"))
            return outputs, weights

        monkeypatch.setattr(attention_module, "attend", edited)
        monkeypatch.setattr(attention_module, "has_fused_attention", lambda q: False)
        change = to_numpy(model(ids[None]))[0] - plain
        monkeypatch.undo()
        change -= change.mean(-1, keepdims=True)
        np.testing.assert_allclose(
            measured.effects[block, head, :, key],
            np.linalg.norm(change, axis=-1),
            atol=2e-5,
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_position": "post", "tie_embeddings": True},
        {"positions": "rotary", "normalization": "rms", "num_kv_heads": 1},
    ],
)
def test_a_traced_text_is_what_the_model_computes(changes):
    model = small_gpt(**changes)
    ids = token_ids(5, vocab_size=V)
    tracer = inspection.Tracer(model)
    trace = tracer.trace(ids)
    plain = inspection_model(model).predict_on_batch(ids[None])
    np.testing.assert_allclose(trace.logits, plain["logits"][0], atol=1e-5)
    for block in range(2):
        np.testing.assert_allclose(
            trace.weights[block], plain["weights"][block][0], atol=1e-6
        )
    for depth in range(3):
        np.testing.assert_allclose(
            trace.hidden[2 * depth], plain["hidden"][depth][0], atol=1e-5
        )
    middle = run_block(
        model.get_layer("block_0"), plain["hidden"][0], feed_forward=False
    )
    np.testing.assert_allclose(trace.hidden[1], to_numpy(middle)[0], atol=1e-5)
    guesses = tracer.guesses(ids, trace, 3)
    assert guesses.shape == (5, V)
    np.testing.assert_allclose(guesses[-1], trace.logits[3], atol=1e-5)


@pytest.mark.backend
def test_heads_switched_off_are_as_if_their_rows_of_the_kernel_were_zero():
    model = small_gpt(num_heads=2, num_kv_heads=1)
    ids = token_ids(6, vocab_size=V)
    off = [(0, 1), (1, 0)]
    tracer = inspection.Tracer(model)
    trace, whole = tracer.trace(ids, without=off), tracer.trace(ids)
    np.testing.assert_array_equal(trace.weights[0], whole.weights[0])
    assert np.abs(trace.logits - whole.logits).max() > 0.1
    for block, head in off:
        kernel = model.get_layer(f"block_{block}")._attention._output.kernel
        rows = to_numpy(kernel)
        rows[6 * head : 6 * head + 6] = 0.0
        kernel.assign(rows)
    np.testing.assert_allclose(trace.logits, to_numpy(model(ids[None]))[0], atol=1e-5)


def test_traces_of_other_models():
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(V, 12, mask_zero=True)(tokens)
    x = tg.layers.CausalMultiHeadAttention(num_heads=3)(x)
    x = tg.layers.TransformerBlock(num_heads=3)(x)
    model = keras.Model(tokens, keras.layers.Dense(V)(x))
    ids = np.array([3, 0, 1, 4])  # 0 is padding
    trace = inspection.Tracer(model).trace(ids)
    assert trace.hidden.shape == (4, 4, 12)
    np.testing.assert_allclose(trace.logits, to_numpy(model(ids[None]))[0], atol=1e-5)
    np.testing.assert_array_equal(trace.weights[..., 1], 0.0)
    with pytest.raises(ValueError, match="TransformerBlock"):
        inspection.Tracer(tg.build_lstm(tg.LSTMConfig(V, 5)))
    tracer = inspection.Tracer(small_gpt())
    for pair, rule in (((2, 0), "block must be between 0 and 1"),
                       ((0, 3), "head must be between 0 and 2")):  # fmt: skip
        with pytest.raises(ValueError, match=rule):
            tracer.trace([1, 2], without=[pair])
    with pytest.raises(ValueError, match="position must be between 0 and 1"):
        tracer.guesses([1, 2], tracer.trace([1, 2]), 2)


def test_switching_off_in_an_int8_model_is_near_that_of_the_float_model():
    model, ids = small_gpt(), token_ids(6, vocab_size=V)
    exact = inspection.Tracer(model).trace(ids, without=[(0, 1)])
    whole = inspection.Tracer(model).trace(ids)
    model.quantize("int8")
    rounded = inspection.Tracer(model).trace(ids, without=[(0, 1)])
    effect = np.abs(exact.logits - whole.logits).max()
    assert np.abs(rounded.logits - exact.logits).max() < 0.5 * effect


def test_causes():
    model = small_gpt()
    ids = token_ids(6, vocab_size=V)
    found = inspection.causes(model, ids, measure="kl")
    future = np.triu(np.ones((6, 6), "bool"), 1)
    assert found.effects[..., future].max() < 1e-12 < found.effects.max()
    assert (found.effects >= 0).all()
    assert found.correlation.shape == found.last_correlation.shape == (2, 3)
    last = [
        inspection.rank_correlation(w[-1], e[-1])
        for w, e in zip(found.weights[1], found.effects[1], strict=True)
    ]
    np.testing.assert_allclose(found.last_correlation[1], last)
    with pytest.raises(ValueError, match="measure must be one of"):
        inspection.causes(model, ids, measure="cosine")
    with pytest.raises(ValueError, match="replacement must be one of"):
        inspection.causes(model, ids, replacement="noise")
    with pytest.raises(ValueError, match="at least 3 tokens, got 2"):
        inspection.causes(model, ids[:2])


def test_low_precision():
    config = tg.GPTConfig(V, T, 1, 3, hidden_dim=12, positions="sinusoidal")
    model = randomize(tg.build_gpt(config, dtype="mixed_bfloat16"))
    ids = token_ids(2 * T + 1, vocab_size=V)
    maps = inspection.attention_maps(model, ids[:T])
    assert maps.weights.dtype == "float32"
    assert maps.forbidden_weight == 0.0 and maps.row_sum_error < 1e-6
    assert inspection.causes(model, ids[:T]).effects.max() > 0
    tracer = inspection.Tracer(model)
    trace = tracer.trace(ids[:T], without=[(0, 1)])
    guesses = tracer.guesses(ids[:T], trace, T - 1)[-1]
    np.testing.assert_allclose(guesses, trace.logits[-1], rtol=0.05, atol=0.05)
    assert inspection.position_probe(model, ids).r_squared.shape == (2,)
    assert np.isfinite(inspection.token_similarity(model, ids)["as trained"]).all()
    assert inspection.leak_test(model, length=T) is None


def test_rank_correlation():
    # Ranks 0 1.5 1.5 3 against 0 1 2 3: covariance 4.5, variances 4.5 and 5.
    value = inspection.rank_correlation([1, 2, 2, 9], [0.1, 0.2, 0.3, 0.4])
    assert value == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert inspection.rank_correlation([1, 2, 3], [3, 2, 1]) == -1.0
    assert np.isnan(inspection.rank_correlation([1, 1, 1], [3, 2, 1]))


class Sabotaged(keras.layers.Layer):
    """Attention of one head with a chosen mistake."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.dense = keras.layers.Dense(36)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        query, key, value = ops.split(self.dense(x), 3, axis=-1)
        scores = ops.matmul(query, ops.transpose(key, (0, 2, 1)))
        mask = ops.tril(ops.ones_like(scores[0])) > 0
        if self.mistake == "off by one":
            mask = ops.tril(ops.ones_like(scores[0]), k=1) > 0
        if self.mistake == "transposed mask":
            mask = ops.transpose(mask)
        if self.mistake == "mask after softmax":
            weights = ops.where(mask, ops.softmax(scores), 0.0)
        else:
            weights = ops.softmax(ops.where(mask, scores, -1e30))
        return ops.matmul(weights, value)

    def compute_output_shape(self, shape):
        return shape


def around(layer):
    """A model int (B, T) -> (B, T, V) around a layer (B, T, 12) -> (B, T, ...)."""
    tokens = keras.Input((None,), dtype="int32")
    x = layer(keras.layers.Embedding(V, 12)(tokens))
    return keras.Model(tokens, keras.layers.Dense(V)(x))


@pytest.mark.backend
@pytest.mark.parametrize(
    ("mistake", "earlier"),
    [
        ("transposed mask", 0),
        ("mask after softmax", 0),
        ("off by one", 0),
        (None, None),
    ],
)
def test_leaks_of_attention(mistake, earlier):
    leak = inspection.leak_test(randomize(around(Sabotaged(mistake))), V, T)
    if mistake is None:
        assert leak is None
    else:
        assert leak[:2] == (1, earlier) and leak.difference > 1e-4


def test_a_late_leak_is_found_at_its_place():
    """Only position 2 reads position 5."""

    def model(tokens, training=False):
        x = ops.cast(ops.one_hot(tokens, V), "float32")
        pick = np.zeros((T, T), "float32")
        pick[2, 5] = 0.5
        return x + ops.matmul(ops.convert_to_tensor(pick), x)

    assert inspection.leak_test(model, V, T) == (5, 2, 0.5)
    assert inspection.leak_test(model, V, T, tolerance=0.6) is None


def test_a_bidirectional_lstm_leaks():
    layer = keras.layers.Bidirectional(keras.layers.LSTM(5, return_sequences=True))
    assert inspection.leak_test(around(layer), V, T)[:2] == (1, 0)


def test_batch_normalization_leaks_in_training():
    model = around(keras.layers.BatchNormalization())
    before = [to_numpy(x) for x in model.non_trainable_variables]
    assert inspection.leak_test(model, V, T) is None
    assert inspection.leak_test(model, V, T, training=True)[:2] == (1, 0)
    for variable, value in zip(model.non_trainable_variables, before, strict=True):
        np.testing.assert_array_equal(to_numpy(variable), value)


@pytest.mark.backend
@pytest.mark.parametrize("kind", ["learned", "rotary", "alibi", "lstm"])
def test_honest_models_pass(kind):
    if kind == "lstm":
        model = tg.build_lstm(tg.LSTMConfig(V, 12, embedding_dim=None))
    else:
        model = small_gpt(positions=kind, dropout=0.2, num_layers=1)
    assert inspection.leak_test(model, vocab_size=V, length=T) is None
    fit_some_steps(model, token_ids(8, T + 1, vocab_size=V))
    assert inspection.leak_test(model, vocab_size=V, length=T) is None
    assert inspection.leak_test(model, length=T, training=True) is None


def test_bad_arguments_of_the_leak_test():
    model = around(keras.layers.Dense(3))
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        inspection.leak_test(model, V, 1)
    with pytest.raises(ValueError, match="vocab_size must be at least 2"):
        inspection.leak_test(model, 1, T)
    model.layers[-1].kernel.assign(np.full((3, V), np.nan))
    with pytest.raises(ValueError, match="finite logits"):
        inspection.leak_test(model, V, T)


@pytest.mark.backend
def test_position_probe():
    model = small_gpt(positions="learned", num_layers=1)
    ids = token_ids(40 * T, vocab_size=V)
    positions = np.zeros((T, 12))
    positions[:, 0] = 4.0 * np.arange(T)
    model.get_layer("position_embedding").set_weights([positions])
    probe = inspection.position_probe(model, ids)
    assert probe.r_squared.shape == probe.mean_error.shape == (2,)
    assert probe.r_squared[0] > 0.95 and probe.mean_error[0] < 0.5
    bare = inspection.without_positions(model)
    blind = inspection.position_probe(bare, ids)
    assert blind.r_squared[0] < 0.3 and blind.mean_error[0] > 1.2
    with pytest.raises(ValueError, match="at least 15 are needed for 2 windows of 7"):
        inspection.position_probe(model, ids[: T + 1])


def test_without_positions():
    model = small_gpt(positions="learned", num_layers=1)
    bare = inspection.without_positions(model)
    assert bare.config == dataclasses.replace(model.config, positions="none")
    ids = token_ids(2, T, vocab_size=V)
    before = to_numpy(model(ids))
    embedding = model.get_layer("position_embedding")
    embedding.set_weights([np.zeros((T, 12))])
    np.testing.assert_allclose(to_numpy(bare(ids)), to_numpy(model(ids)), atol=1e-6)
    assert np.abs(before - to_numpy(bare(ids))).max() > 0.1
    with pytest.raises(ValueError, match="build_gpt, got Functional"):
        inspection.without_positions(around(keras.layers.Dense(3)))


def test_token_similarity():
    model = small_gpt(positions="none")
    ids = token_ids(3 * T + 1, vocab_size=V)
    similarities = inspection.token_similarity(model, ids)
    assert list(similarities) == [
        "as trained", "no feed-forward", "no residuals", "attention alone"
    ]  # fmt: skip
    windows = ids[: 3 * T].reshape(3, T)
    for depth, place in ((0, "input"), (2, "output")):
        block = model.get_layer(f"block_{max(depth - 1, 0)}")
        inside = keras.Model(model.inputs[0], getattr(block, place))
        unit = to_numpy(inside(windows))
        unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
        cosines = unit @ unit.transpose(0, 2, 1)
        expected = cosines[:, ~np.eye(T, dtype="bool")].mean()
        assert similarities["as trained"][depth] == pytest.approx(expected, abs=1e-5)
    # Equal tokens without positions are equal vectors at every depth.
    for values in inspection.token_similarity(model, np.full(T + 1, 3)).values():
        np.testing.assert_allclose(values, 1.0, atol=1e-5)


@pytest.mark.backend
def test_next_tokens():
    model = small_gpt()
    ids = token_ids(2 * T, vocab_size=V)
    logits = to_numpy(model(ids[None, -T:]))[0, -1]
    masses = np.exp(logits - logits.max())
    found = inspection.next_tokens(
        model, ids, SamplingConfig(temperature=0.5, top_k=3), count=5
    )
    order = np.argsort(-masses)[:5]
    assert [candidate.token for candidate in found] == order.tolist()
    probabilities = [candidate.probability for candidate in found]
    np.testing.assert_allclose(probabilities, (masses / masses.sum())[order], atol=1e-6)
    chances = np.array([candidate.chance for candidate in found])
    expected = masses[order[:3]] ** 2 / np.sum(masses[order[:3]] ** 2)
    np.testing.assert_allclose(chances, [*expected, 0.0, 0.0], atol=1e-6)
    greedy = inspection.next_tokens(model, ids, SamplingConfig(temperature=0.0))
    assert [c.chance for c in greedy] == [1.0] + [0.0] * 9


@pytest.mark.backend
def test_surprise():
    model = small_gpt(positions="rotary")
    ids = token_ids(3 * T, vocab_size=V)
    nats = inspection.surprise(model, ids[: T + 1])
    assert nats.shape == (T,)
    assert nats.mean() == pytest.approx(mean_loss(model, ids[None, : T + 1]), abs=1e-5)
    longer = inspection.surprise(model, ids)
    assert longer.mean() == pytest.approx(tg.evaluate(model, ids).nats, abs=1e-5)
    np.testing.assert_allclose(longer[:T], nats, atol=1e-5)


def test_surprise_of_characters():
    tokenizer = tg.ByteTokenizer()
    ids = tokenizer.encode("aé\n")
    pieces = inspection.character_surprise(tokenizer, ids, np.array([0.5, 1.0, 5.0]))
    assert pieces == [("a", 0.0), ("é", 1.5), ("\n", 5.0)]
    for colored in (True, False):
        console = Console(
            file=io.StringIO(),
            force_terminal=colored,
            color_system="truecolor" if colored else None,
        )
        inspection.print_surprise(pieces, console)
        out = console.file.getvalue()
        assert ("\x1b[" in out) == colored
        assert "a" in out and "é" in out and "from 0.5" in out


def test_labels(tmp_path):
    assert figures.visible(" \n\ta\u0007") == "\u2423\u21b5\u21e5a\u25a1"
    labels = ["$", "$x$", "\u4e16", "\U0001f600", "\\", " ", "\n"]
    path = tmp_path / "map.png"
    figures.plot_attention(np.full((1, 2, T, T), 0.1), labels, path, title="$a$")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Folders of a GPT and of an LSTM, and a text they know."""
    folder = tmp_path_factory.mktemp("bundles")
    text = "Now is the winter of our discontent\nMade glorious summer $ é\n" * 9
    tokenizer = tg.CharTokenizer.from_text(text)
    config = tg.GPTConfig(tokenizer.vocab_size, 16, 2, 2, hidden_dim=12)
    tg.save(folder / "gpt", tg.build_gpt(config), tokenizer)
    lstm = tg.LSTMConfig(tokenizer.vocab_size, 8, max_sequence_length=16)
    tg.save(folder / "lstm", tg.build_lstm(lstm), tokenizer)
    (folder / "text.txt").write_text(text, "utf-8")
    return folder


def run(*argv):
    cli.main([str(argument) for argument in argv])


ALWAYS = {"inspection.json", "next_tokens.png", "surprise.png"}
WITH_ATTENTION = {
    "attention.png", "causes.png", "heads.png", "maps.npz", "positions.png",
    "profiles.png", "similarity.png",
}  # fmt: skip


def test_the_command(bundles, capsys):
    run("inspect", bundles / "gpt", "--corpus", bundles / "text.txt", "--top-k", 3)
    out = capsys.readouterr().out
    folder = bundles / "gpt" / "inspection"
    assert {path.name for path in folder.iterdir()} == ALWAYS | WITH_ATTENTION
    assert "largest forbidden weight 0, largest |row sum - 1|" in out
    assert "block  head  distance  entropy" in out and "Now is the winte" in out
    assert "leak test, inference mode: none" in out
    report = json.loads((folder / "inspection.json").read_text("utf-8"))
    assert report["attention"]["largest_forbidden_weight"] == 0.0
    assert np.shape(report["heads"]["profile"]) == (2, 2, 16)
    assert np.shape(report["causes"]["rank_correlation"]) == (2, 2)
    assert set(report["position_probe"]) == {"as trained", "positional signal removed"}
    assert sum(c["chance"] > 0 for c in report["next_tokens"]) == 3
    assert len(report["surprise"]["characters"]) == 16
    with np.load(folder / "maps.npz") as maps:
        assert maps["weights"].shape == maps["effects"].shape == (2, 2, 16, 16)


def test_the_command_on_an_lstm(bundles, tmp_path, capsys):
    """A text of one's own; the held-out text is the embedded one."""
    run("inspect", bundles / "lstm", "--text", "Made $ é", "--out", tmp_path / "a/b")
    out = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "a/b").iterdir()} == ALWAYS
    assert "not for this model: attention maps, head metrics" in out
    report = json.loads((tmp_path / "a/b/inspection.json").read_text("utf-8"))
    assert report["skipped"]["what"].startswith("attention maps")
    assert report["leak"] == {"inference": None, "training": None}
    assert [c for c, _ in report["surprise"]["characters"]] == list("Made $ é")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["GPT", "--text", "Now @"], "U+0040"),
        (["GPT", "--text", "No"], "text must hold at least 3 tokens, got 2"),
        (["GPT", "--corpus", "nowhere.txt"], "nowhere.txt"),
        (["GPT", "--corpus", "SHORT"], "more than two windows of 16 tokens, got 20"),
        (["GPT", "--out", "SHORT"], "is not a folder"),
        (["GPT", "--out", "SHORT/sub"], "out: "),
        (["GPT", "--top-k", "0"], "top_k must be at least 1"),
    ],
)
def test_bad_flags(bundles, tmp_path, capsys, arguments, message):
    short = tmp_path / "short.txt"
    short.write_text("Now is the winter of", "utf-8")
    named = {"GPT": bundles / "gpt", "SHORT": short, "SHORT/sub": short / "sub"}
    with pytest.raises(SystemExit) as stopped:
        run("inspect", *[named.get(a, a) for a in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert len(error.splitlines()) == 1 and message in error
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
