"""Tests of keras_tinygpt.models.gpt."""

import importlib.util
import math
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import (
    check_saved_model,
    fit_some_steps,
    largest_leak,
    mean_loss,
    randomize,
    to_numpy,
    token_ids,
)

import keras_tinygpt as tg
from keras_tinygpt.models.gpt import remat_scope

pytestmark = pytest.mark.backend

V, T, D = 11, 7, 12
SMALL = {
    "vocab_size": V,
    "max_sequence_length": T,
    "num_layers": 2,
    "num_heads": 3,
    "hidden_dim": D,
}
POSITIONS = tg.GPTConfig.POSITIONS
CHANGES = {positions: {"positions": positions} for positions in POSITIONS} | {
    "modern": {
        "positions": "rotary",
        "normalization": "rms",
        "activation": "swiglu",
        "num_kv_heads": 1,
        "intermediate_dim": 17,
        "attention_window": 3,
        "qk_norm": True,
        "use_bias": False,
        "tie_embeddings": True,
        "norm_epsilon": 1e-3,
        "max_wavelength": 501.0,
    },
    "classic": {
        "positions": "sinusoidal",
        "norm_position": "post",
        "activation": "relu",
        "scale_embeddings": True,
        "qkv_bias": True,
    },
}
every_change = pytest.mark.parametrize("change", CHANGES)


def small(change="learned", seed=0, dtype=None, **more):
    config = tg.GPTConfig(**{**SMALL, **CHANGES[change], **more})
    return tg.build_gpt(config, seed=seed, dtype=dtype)


def ids(*shape, seed=0):
    return token_ids(*shape, vocab_size=V, seed=seed)


# Sizes.


@pytest.mark.parametrize(
    ("preset", "vocab_size", "length", "num_parameters"),
    [("book", 104, 100, 132_488), ("mini", 65, 128, 824_897)],
)
def test_presets_have_their_exact_sizes(preset, vocab_size, length, num_parameters):
    config = tg.GPTConfig.preset(preset, vocab_size=vocab_size)
    assert tg.build_gpt(config).count_params() == num_parameters
    assert config.max_sequence_length == length


def test_the_tiny_preset_is_no_larger_than_mini():
    config = tg.GPTConfig.preset("tiny", vocab_size=65)
    assert tg.build_gpt(config).count_params() <= 824_897
    assert config.max_sequence_length == 128


def test_a_preset_takes_changes():
    config = tg.GPTConfig.preset("book", vocab_size=13, positions="none")
    assert (config.positions, config.hidden_dim, config.vocab_size) == ("none", 84, 13)
    assert tg.GPTConfig(vocab_size=65) == tg.GPTConfig.preset(
        "mini", vocab_size=65, dropout=0.0
    )


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"max_sequence_length": 256}, 16_384),
        ({"positions": "none"}, -16_384),
        ({"tie_embeddings": True}, -65 * 128 - 65),
        ({"qkv_bias": True}, 2 * 3 * 128),
        ({"num_kv_heads": 1}, -2 * 2 * 128 * 96),
        ({"qk_norm": True}, 2 * 2 * 32),
        ({"normalization": "rms"}, -5 * 128),
        ({"norm_position": "post"}, -2 * 128),
        ({"activation": "swiglu"}, 2 * (128 * 512 + 512)),
        ({"use_bias": False}, -2 * (128 + 512 + 128) - 65),
        ({"scale_embeddings": True}, 0),
        ({"attention_window": 5, "dropout": 0.1, "attention_dropout": 0.1}, 0),
    ],
)
def test_what_each_option_costs(options, difference):
    sizes = [
        tg.build_gpt(tg.GPTConfig(vocab_size=65, num_layers=2, **more)).count_params()
        for more in (options, {})
    ]
    assert sizes[0] - sizes[1] == difference


# The function computed.


@every_change
def test_logits_are_causal_before_and_after_training(change):
    """Design, section 6: earlier logits move by exactly 0.0."""
    model = small(change)
    assert model.input_shape == (None, None) and model.output_shape == (None, None, V)
    for length in (T, 1, 5):
        logits = model(ids(2, length))
        assert tuple(logits.shape) == (2, length, V)
        assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    tokens = ids(2, T)
    assert largest_leak(model, tokens, V) == 0.0
    losses = fit_some_steps(model, ids(5, T + 1, seed=1))
    assert losses[-1] < losses[0]
    assert largest_leak(model, tokens, V) == 0.0


UNTRAINED = {
    "book": tg.GPTConfig.preset("book", vocab_size=104),
    "mini": tg.GPTConfig.preset("mini", vocab_size=65),
    "tiny": tg.GPTConfig.preset("tiny", vocab_size=65),
    "small": tg.GPTConfig(**SMALL),
    "tied": tg.GPTConfig(vocab_size=65, num_layers=2, tie_embeddings=True),
    "post": tg.GPTConfig(
        vocab_size=65,
        num_layers=1,
        norm_position="post",
        positions="none",
        tie_embeddings=True,
        scale_embeddings=True,
    ),
    "wide": tg.GPTConfig(
        vocab_size=65,
        num_layers=1,
        hidden_dim=512,
        positions="alibi",
        tie_embeddings=True,
        scale_embeddings=True,
    ),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_an_untrained_model_is_near_uniform(name):
    """Design, section 6: within 0.05 of ln V, for uneven token frequencies too."""
    config = UNTRAINED[name]
    length = min(32, config.max_sequence_length)
    tokens = token_ids(16, length + 1, vocab_size=config.vocab_size)
    for seed in (0, 1):
        loss = mean_loss(tg.build_gpt(config, seed=seed), tokens)
        assert loss == pytest.approx(math.log(config.vocab_size), abs=0.05)


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_bounds_what_one_block_reads(window):
    model = small("alibi", num_layers=1, attention_window=window)
    logits = to_numpy(model(ids(1, T)))
    other = ids(1, T)
    other[0, 0] = (other[0, 0] + 1) % V
    moved = np.abs(to_numpy(model(other)) - logits).max((0, 2)) > 0
    assert moved.tolist() == [t < window for t in range(T)]


def test_a_tied_head_is_the_transposed_embedding():
    model = small("modern")
    hidden = keras.Model(model.input, model.get_layer("final_norm").output)(ids(2, T))
    table = to_numpy(model.get_layer("token_embedding").embeddings)
    expected = to_numpy(hidden) @ table.T
    np.testing.assert_allclose(to_numpy(model(ids(2, T))), expected, atol=1e-5)


def test_scaled_embeddings_are_larger_by_the_root_of_the_width():
    model = small("classic")
    scaled = keras.Model(model.input, model.get_layer("embedding_scale").output)
    table = to_numpy(model.get_layer("token_embedding").embeddings)
    expected = math.sqrt(D) * table[ids(2, T)]
    np.testing.assert_allclose(to_numpy(scaled(ids(2, T))), expected, rtol=1e-6)


@pytest.mark.parametrize("positions", POSITIONS)
def test_only_learned_positions_end(positions):
    model = small(positions)
    calls = (model, lambda tokens: model.predict(tokens, verbose=0))
    for call in calls:
        if positions == "learned":
            with pytest.raises(ValueError, match="max_sequence_length=7, got 8"):
                call(ids(2, T + 1))
        else:
            assert call(ids(2, T + 1)).shape == (2, T + 1, V)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("change", ["learned", "modern", "classic"])
def test_logits_are_float32_under_mixed_policies(change, dtype):
    model, full = small(change, dtype=dtype), small(change)
    logits = model(ids(2, T))
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    assert model.output.dtype == "float32"
    block = keras.Model(model.input, model.get_layer("block_1").output)
    inner = block(ids(2, T)).dtype
    assert keras.backend.standardize_dtype(inner) == dtype.removeprefix("mixed_")
    np.testing.assert_allclose(to_numpy(logits), to_numpy(full(ids(2, T))), atol=0.03)
    assert tg.fingerprint(model) == tg.fingerprint(full)


def test_the_global_policy_is_the_default():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert small().get_layer("block_0").compute_dtype == "bfloat16"
    assert small(dtype="float32").get_layer("block_0").compute_dtype == "float32"


# Dropout.


@pytest.mark.parametrize("seed", [0, 2**31 - 2, 2**32 - 1])
def test_each_dropout_draws_its_own_numbers(seed):
    model = small(dropout=0.5, attention_dropout=0.5, seed=seed)
    dropouts = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Dropout)
    ]
    assert len(dropouts) == 1 + 3 * SMALL["num_layers"]
    masks = {
        to_numpy(layer(np.ones((1, 101), "float32"), training=True)).tobytes()
        for layer in dropouts
    }
    # Two independent masks of 101 fair draws are equal once in 2 ** 101 runs.
    assert len(masks) == len(dropouts)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
def test_dropout_is_for_training(rate):
    model, still, tokens = small(**{rate: 0.5}), small(), ids(2, T)
    expected = to_numpy(still(tokens))
    np.testing.assert_array_equal(to_numpy(model(tokens)), expected)
    assert np.abs(to_numpy(model(tokens, training=True)) - expected).max() > 1e-4
    again = small(**{rate: 0.5})
    np.testing.assert_array_equal(
        to_numpy(again(tokens, training=True)),
        to_numpy(small(**{rate: 0.5})(tokens, training=True)),
    )


# Saving.


@every_change
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_keras_file_gives_the_model_back(change, dtype, tmp_path):
    model = small(change, dtype=dtype, dropout=0.1, seed=3)
    copy = check_saved_model(model, ids(2, T), tmp_path)
    assert copy.config == model.config
    assert tg.fingerprint(copy) == tg.fingerprint(model)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="one way alone")
@pytest.mark.parametrize("change", ["modern", "classic"])
def test_compiled_steps_equal_plain_ones(change):
    """Between them, every option and its gradient under XLA."""
    losses = [
        fit_some_steps(small(change, num_layers=1), ids(5, T + 1), jit_compile=jit)
        for jit in (True, False)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_trained_model_goes_on_after_reload(tmp_path):
    model, tokens = small("none", num_layers=1), ids(5, T + 1)
    fit_some_steps(model, tokens)
    copy = check_saved_model(model, tokens, tmp_path)
    losses = [
        float(m.train_on_batch(tokens[:, :-1], tokens[:, 1:])) for m in (model, copy)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert tg.fingerprint(copy) == tg.fingerprint(model)


@pytest.mark.parametrize("change", ["learned", "modern", "classic"])
def test_clone_model(change):
    model = small(change)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(
        to_numpy(clone(ids(2, T))), to_numpy(model(ids(2, T)))
    )


LOAD_ELSEWHERE = """
import pathlib, sys
import keras
import numpy as np
import keras_tinygpt as tg

folder = pathlib.Path(sys.argv[1])
for file in sorted(folder.glob("*.keras")):
    model = keras.models.load_model(file)
    logits = model.predict(np.load(folder / "ids.npy"), verbose=0)
    np.save(folder / f"{file.stem}.npy", logits)
    build = tg.build_gpt if isinstance(model, tg.models.GPT) else tg.build_lstm
    print(file.stem, tg.fingerprint(build(model.config, seed=5)))
"""


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow's run compares all"
)
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_another_backend_gives_the_same_logits(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    models = {change: small(change, seed=5) for change in ("learned", "modern")}
    lstm = tg.LSTMConfig(vocab_size=V, hidden_dim=13, embedding_dim=5)
    models["lstm"] = tg.build_lstm(lstm, seed=5)
    fresh = [f"{name} {tg.fingerprint(model)}" for name, model in models.items()]
    np.save(tmp_path / "ids.npy", ids(5, T))
    for name, model in models.items():
        randomize(model).save(tmp_path / f"{name}.keras")
    run = subprocess.run(
        [sys.executable, "-c", LOAD_ELSEWHERE, str(tmp_path)],
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == sorted(fresh)
    for name, model in models.items():
        theirs = np.load(tmp_path / f"{name}.npy")
        np.testing.assert_allclose(to_numpy(model(ids(5, T))), theirs, atol=1e-4)


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"vocab_size": 65.0}, "vocab_size must be an integer, got 65.0"),
        ({"max_sequence_length": 0}, "max_sequence_length must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": 5}, "hidden_dim must be divisible by num_heads=5, got 12"),
        ({"hidden_dim": -1}, "hidden_dim must be at least 1, got -1"),
        ({"num_kv_heads": 2}, "num_kv_heads must divide num_heads=3, got 2"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"intermediate_dim": 0}, "intermediate_dim must be at least 1, got 0"),
        ({"positions": "rope"}, "positions must be one of 'learned', 'sinusoidal',"),
        ({"positions": None}, "'rotary', 'alibi', 'none', got None"),
        ({"normalization": "batch"}, "normalization must be one of 'layer', 'rms'"),
        ({"norm_position": "both"}, "norm_position must be one of 'pre', 'post'"),
        ({"activation": "silu"}, "activation must be one of 'gelu', 'relu', 'relu2'"),
        ({"dropout": 1.0}, "dropout must be a finite number in [0, 1), got 1.0"),
        ({"dropout": math.nan}, "dropout must be a finite number in [0, 1), got nan"),
        ({"attention_dropout": -0.1}, "attention_dropout must be a finite number in"),
        ({"qkv_bias": 1}, "qkv_bias must be True or False, got 1"),
        ({"use_bias": "yes"}, "use_bias must be True or False, got 'yes'"),
        ({"qk_norm": None}, "qk_norm must be True or False, got None"),
        ({"tie_embeddings": 0}, "tie_embeddings must be True or False, got 0"),
        ({"scale_embeddings": 2}, "scale_embeddings must be True or False, got 2"),
        ({"attention_window": 0}, "attention_window must be at least 1, got 0"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be a finite number in (0, inf)"),
        (
            {"max_wavelength": -1.0},
            "max_wavelength must be a finite number in (0, inf)",
        ),
        (
            {"positions": "rotary", "hidden_dim": 15},
            "rotary positions need an even hidden_dim / num_heads, got 5",
        ),
        (
            {"positions": "sinusoidal", "hidden_dim": 15},
            "sinusoidal positions need an even hidden_dim, got 15",
        ),
    ],
)
def test_bad_fields(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tg.GPTConfig(**{**SMALL, **options})


def test_bad_preset_and_seed():
    with pytest.raises(
        ValueError, match="preset must be one of 'book', 'mini', 'tiny'"
    ):
        tg.GPTConfig.preset("large", vocab_size=V)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed must be between 0 and .*{seed}"):
            small(seed=seed)
    with pytest.raises(ValueError, match="seed must be an integer, got 0.5"):
        small(seed=0.5)


def test_rematerialized_blocks_train_alike(monkeypatch):
    """The same losses and weights; each block is called once more for its gradient."""
    config = tg.GPTConfig(**SMALL)
    ids = token_ids(5, T + 1, vocab_size=V)
    plain = tg.build_gpt(config, seed=1)
    with remat_scope(config):
        model = tg.build_gpt(config, seed=1)
    assert fit_some_steps(model, ids) == pytest.approx(fit_some_steps(plain, ids))
    for one, other in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(to_numpy(one), to_numpy(other), atol=1e-5)
    calls = []
    call = tg.layers.TransformerBlock.call
    monkeypatch.setattr(
        tg.layers.TransformerBlock,
        "call",
        lambda self, *args, **kwargs: calls.append(1) or call(self, *args, **kwargs),
    )
    for trained, times in ((plain, 1), (model, 2)):
        if keras.backend.backend() == "jax":  # which traces a block once
            continue
        trained.compile(
            "sgd", keras.losses.SparseCategoricalCrossentropy(True), run_eagerly=True
        )
        trained.train_on_batch(ids[:, :-1], ids[:, 1:])
        calls.clear()
        trained.train_on_batch(ids[:, :-1], ids[:, 1:])
        assert len(calls) == times * config.num_layers


def test_what_cannot_be_rematerialized():
    with pytest.raises(ValueError, match="must be a GPTConfig to be .* got LSTM"):
        remat_scope(tg.LSTMConfig(V))
    with pytest.raises(ValueError, match="attention_dropout must be 0 to .* got 0.1"):
        remat_scope(tg.GPTConfig(V, attention_dropout=0.1))
