"""Tests of keras_tinygpt.models.lstm."""

import math
import re
import zipfile

import h5py
import keras
import numpy as np
import pytest
from helpers import (
    check_saved_model,
    fit_some_steps,
    largest_leak,
    mean_loss,
    normal,
    randomize,
    to_numpy,
    token_ids,
)
from keras import ops

import keras_tinygpt as tg
from keras_tinygpt.layers.recurrent import LSTM

pytestmark = pytest.mark.backend

B, T, V, H = 2, 7, 11, 13
CHANGES = {
    "embedding": {"embedding_dim": 5},
    "one-hot": {"embedding_dim": None},
    "two-layers": {"embedding_dim": 5, "num_layers": 2, "dropout": 0.5},
}
every_change = pytest.mark.parametrize("change", CHANGES)


def small(change="embedding", seed=0, dtype=None, **more):
    config = tg.LSTMConfig(vocab_size=V, hidden_dim=H, **{**CHANGES[change], **more})
    return tg.build_lstm(config, seed=seed, dtype=dtype)


def ids(*shape, seed=0):
    return token_ids(*shape, vocab_size=V, seed=seed)


def reference_lstm(model, tokens) -> np.ndarray:
    """Logits in float64, a step at a time."""

    def weights(name):
        return [to_numpy(weight) for weight in model.get_layer(name).weights]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    config = model.config
    one_hot = config.embedding_dim is None
    table = np.eye(V) if one_hot else weights("token_embedding")[0]
    x = table[tokens]
    for index in range(config.num_layers):
        kernel, recurrent_kernel, bias = weights(f"lstm_{index}")
        hidden = cell = np.zeros((len(tokens), H))
        rows = []
        for step in range(tokens.shape[1]):
            gates = x[:, step] @ kernel + hidden @ recurrent_kernel + bias
            write, forget, candidate, read = np.split(gates, 4, axis=-1)
            cell = sigmoid(forget) * cell + sigmoid(write) * np.tanh(candidate)
            hidden = sigmoid(read) * np.tanh(cell)
            rows.append(hidden)
        x = np.stack(rows, axis=1)
    kernel, bias = weights("head")
    return x @ kernel + bias


@pytest.mark.parametrize(
    ("preset", "vocab_size", "length", "num_parameters"),
    [("book", 104, 100, 132_712), ("mini", 65, 128, 349_569)],
)
def test_presets_have_their_exact_sizes(preset, vocab_size, length, num_parameters):
    config = tg.LSTMConfig.preset(preset, vocab_size=vocab_size)
    assert tg.build_lstm(config).count_params() == num_parameters
    assert config.max_sequence_length == length
    changed = tg.LSTMConfig.preset(preset, vocab_size=vocab_size, dropout=0.5)
    assert (changed.dropout, changed.hidden_dim) == (0.5, config.hidden_dim)


@every_change
def test_logits_equal_the_numpy_reference(change):
    model = randomize(small(change))
    assert model.input_shape == (None, None) and model.output_shape == (None, None, V)
    tokens = ids(B, T)
    expected = reference_lstm(model, tokens)
    np.testing.assert_allclose(to_numpy(model(tokens)), expected, atol=1e-4)
    shorter = to_numpy(model(tokens[:, :3]))
    np.testing.assert_allclose(shorter, expected[:, :3], atol=1e-4)


@every_change
def test_logits_are_causal_before_and_after_training(change):
    """Design, section 6: earlier logits move by exactly 0.0."""
    model, tokens = small(change), ids(B, T)
    assert largest_leak(model, tokens, V) == 0.0
    fit_some_steps(model, ids(5, T + 1, seed=1))
    assert largest_leak(model, tokens, V) == 0.0


@pytest.mark.parametrize("preset", ["book", "mini"])
def test_an_untrained_model_is_near_uniform(preset):
    """Design, section 6: within 0.05 of ln V, for uneven token frequencies too."""
    tokens = token_ids(16, 33, vocab_size=65)
    for seed in (0, 1):
        config = tg.LSTMConfig.preset(preset, vocab_size=65)
        loss = mean_loss(tg.build_lstm(config, seed=seed), tokens)
        assert loss == pytest.approx(math.log(65), abs=0.05)


# The model with explicit state.


def run_chunks(model, tokens, live, lengths):
    step, states, rows = model.with_state(), model.zero_states(len(tokens)), []
    start = 0
    for length in lengths:
        chunk = slice(start, start + length)
        inputs = (tokens[:, chunk], live[:, chunk])
        logits, states = step([*map(ops.convert_to_tensor, inputs), states])
        rows.append(to_numpy(logits))
        start += length
    return np.concatenate(rows, axis=1), states


@every_change
@pytest.mark.parametrize("lengths", [[1] * T, [3, 4]])
def test_a_text_cut_in_chunks_gives_the_same_logits(change, lengths):
    model, tokens = randomize(small(change)), ids(B, T)
    rows, states = run_chunks(model, tokens, np.ones((B, T), bool), lengths)
    np.testing.assert_allclose(rows, to_numpy(model(tokens)), atol=1e-5)
    assert len(states) == model.config.num_layers
    assert {tuple(x.shape) for pair in states for x in pair} == {(B, H)}


@every_change
def test_padding_leaves_the_state_as_it_is(change):
    """Row 1 is padded to the left: it equals that row alone."""
    model, tokens = randomize(small(change)), ids(B, T)
    live = np.arange(T) >= np.array([[0], [3]])
    rows, states = run_chunks(model, tokens, live, [4, 3])
    alone, alone_states = run_chunks(
        model, tokens[1:, 3:], np.ones((1, T - 3), bool), [T - 3]
    )
    np.testing.assert_allclose(rows[1:, 3:], alone, atol=1e-5)
    for padded, bare in zip(states, alone_states, strict=True):
        for ours, theirs in zip(padded, bare, strict=True):
            np.testing.assert_allclose(to_numpy(ours)[1:], to_numpy(theirs), atol=1e-5)


@pytest.mark.parametrize("change", ["embedding", "one-hot"])
def test_logits_are_float32_under_a_mixed_policy(change):
    model, full = small(change, dtype="mixed_bfloat16"), small(change)
    tokens = ids(B, T)
    logits = model(tokens)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    np.testing.assert_allclose(to_numpy(logits), to_numpy(full(tokens)), atol=0.02)
    states = model.zero_states(3)
    dtypes = {keras.backend.standardize_dtype(x.dtype) for pair in states for x in pair}
    assert dtypes == {"bfloat16"}
    rows, _ = run_chunks(model, tokens, np.ones((B, T), bool), [3, 4])
    np.testing.assert_allclose(rows, to_numpy(logits), atol=0.02)


@every_change
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_keras_file_gives_the_model_back(change, dtype, tmp_path):
    model, tokens = small(change, dtype=dtype, seed=3), ids(B, T)
    copy = check_saved_model(model, tokens, tmp_path)
    assert copy.config == model.config
    assert tg.fingerprint(copy) == tg.fingerprint(model)
    live = np.ones((B, T), bool)
    ours, theirs = (run_chunks(m, tokens, live, [T])[0] for m in (model, copy))
    np.testing.assert_array_equal(ours, theirs)


def test_clone_model():
    model = small("two-layers")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    tokens = ids(B, T)
    np.testing.assert_array_equal(to_numpy(clone(tokens)), to_numpy(model(tokens)))


@pytest.mark.parametrize("seed", [0, 2**31 - 2, 2**32 - 1])
def test_each_dropout_draws_its_own_numbers(seed):
    model, tokens = small("two-layers", seed=seed), ids(B, T)
    masks = [
        to_numpy(model.get_layer(name)(np.ones((1, 101), "float32"), training=True))
        for name in ("dropout_0", "dropout_1")
    ]
    # Two independent masks of 101 fair draws are equal once in 2 ** 101 runs.
    assert np.any(masks[0] != masks[1])
    trained = to_numpy(model(tokens, training=True))
    assert np.any(trained != to_numpy(model(tokens)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"hidden_dim": 2.5}, "hidden_dim must be an integer, got 2.5"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"embedding_dim": 0}, "embedding_dim must be at least 1, got 0"),
        ({"max_sequence_length": 0}, "max_sequence_length must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must be a finite number in [0, 1), got 1.0"),
    ],
)
def test_bad_fields(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tg.LSTMConfig(**{"vocab_size": V, **options})


def test_bad_preset_and_seed():
    with pytest.raises(ValueError, match="preset must be one of 'book', 'mini', got 1"):
        tg.LSTMConfig.preset(1, vocab_size=V)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed must be between 0 and .*{seed}"):
            small(seed=seed)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_fused_recurrence_equals_the_layer_of_keras(policy):
    """On PyTorch the two are different code; elsewhere they are one."""
    options = {"return_sequences": True, "return_state": True, "dtype": policy}
    fused, plain = LSTM(7, **options), keras.layers.LSTM(7, **options)
    x = np.random.default_rng(0).standard_normal((3, 11, 5)).astype("float32")
    for layer in (fused, plain):
        layer.build(x.shape)
    plain.set_weights([0.5 * normal(*w.shape, seed=3) for w in fused.get_weights()])
    fused.set_weights(plain.get_weights())
    states = [normal(3, 7, seed=1), normal(3, 7, seed=2)]
    tolerance = 1e-6 if policy == "float32" else 3e-2
    for initial in (None, states):
        results = [
            [to_numpy(y) for y in layer(x, initial_state=initial)]
            for layer in (fused, plain)
        ]
        for mine, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=tolerance)


def test_layout_of_saved_weights(tmp_path):
    """Keras names the weights in a file after classes; earlier files must load."""
    tg.build_lstm(tg.LSTMConfig(V, H, dropout=0.1)).save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        archive.extract("model.weights.h5", tmp_path)
    names = set()
    with h5py.File(tmp_path / "model.weights.h5") as file:
        file.visititems(
            lambda name, entry: names.add(name) if hasattr(entry, "shape") else None
        )
    layers = {name for name in names if not name.startswith("layers/dropout")}
    assert layers == {
        "layers/embedding/vars/0",
        *(f"layers/lstm/cell/vars/{index}" for index in range(3)),
        "layers/dense/vars/0",
        "layers/dense/vars/1",
    }
