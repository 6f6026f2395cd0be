"""Tests of keras_tinygpt.models.initialization."""

import itertools
import re

import keras
import numpy as np
import pytest
from helpers import to_numpy

import keras_tinygpt as tg
from keras_tinygpt.models.initialization import fan_in_stddev, initialize

pytestmark = pytest.mark.backend

V = 11
SMALL = {"vocab_size": V, "num_layers": 2, "num_heads": 3, "hidden_dim": 12}
# The same on every backend; a change breaks every published run that names a seed.
FINGERPRINTS = {"gpt": "a0fac0f23d70015d", "lstm": "d418f8252d74d762"}


def weights_of(model) -> dict[str, np.ndarray]:
    return {weight.path: to_numpy(weight) for weight in model.weights}


def dense_model(*names, units=101) -> keras.Model:
    x = inputs = keras.Input((units,))
    for name in names:
        x = keras.layers.Dense(units, name=name)(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ("kind", "config_class", "build"),
    [
        ("gpt", tg.GPTConfig, tg.build_gpt),
        ("lstm", tg.LSTMConfig, tg.build_lstm),
    ],
)
def test_the_seed_alone_decides_the_weights(kind, config_class, build):
    config = config_class.preset("book", vocab_size=104)
    model = build(config, seed=0)
    assert tg.fingerprint(model).startswith(FINGERPRINTS[kind])
    keras.utils.set_random_seed(1)
    assert tg.fingerprint(build(config, seed=0)) == tg.fingerprint(model)
    assert tg.fingerprint(build(config, seed=1)) != tg.fingerprint(model)
    low = build(config, seed=0, dtype="mixed_bfloat16")
    assert tg.fingerprint(low) == tg.fingerprint(model)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"positions": "sinusoidal"}, {"positions": "none"}),
        ({"positions": "learned"}, {"positions": "rotary", "qk_norm": True}),
        ({"dropout": 0.1, "attention_dropout": 0.1}, {"dropout": 0.0}),
        ({"normalization": "rms"}, {"norm_position": "post"}),
        ({"qkv_bias": True, "use_bias": False}, {"attention_window": 3}),
        ({"activation": "swiglu"}, {"activation": "relu", "vocab_size": 13}),
        ({"max_sequence_length": 31}, {"max_sequence_length": 17}),
    ],
)
def test_variants_share_the_tensors_of_equal_paths_and_shapes(first, second):
    models = [tg.build_gpt(tg.GPTConfig(**{**SMALL, **x}), 5) for x in (first, second)]
    ours, theirs = map(weights_of, models)
    shared = [path for path in ours.keys() & theirs.keys()]
    shared = [path for path in shared if ours[path].shape == theirs[path].shape]
    assert "block_1/feed_forward/output/kernel" in shared
    for path in shared:
        np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)


def test_no_two_kernels_are_alike():
    """Across layers and across seeds, not even up to scale."""
    tensors = []
    for seed in (0, 1):
        model = tg.build_gpt(tg.GPTConfig(**SMALL, intermediate_dim=12), seed=seed)
        kernels = [x for x in weights_of(model).values() if x.ndim == 2]
        tensors += [(x / x.std()).ravel()[:121] for x in kernels]
    assert len(tensors) == 2 * (3 + 2 * 4)
    for first, second in itertools.combinations(tensors, 2):
        # Independent: a correlation of 0.5 over 121 values is more than five sigma,
        # so one of the 231 pairs would pass it in less than 0.01% of runs.
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.5


def test_a_stream_depends_on_the_path_and_not_on_the_rest_of_the_model():
    first, second = dense_model("a", "b", units=7), dense_model("b", "c", units=7)
    for model in (first, second):
        initialize(model, 3, lambda path, shape: fan_in_stddev(shape))
    shared = to_numpy(first.get_layer("b").kernel)
    np.testing.assert_array_equal(shared, to_numpy(second.get_layer("b").kernel))
    assert np.any(shared != to_numpy(first.get_layer("a").kernel))


def test_standard_deviations_are_those_asked_for():
    model = dense_model("a", "b")
    asked = []

    def stddev(path, shape):
        asked.append((path, shape))
        return {"a/kernel": 0.5, "b/kernel": fan_in_stddev(shape)}[path]

    model.get_layer("a").bias.assign(np.full(101, 3.0))
    initialize(model, 0, stddev)
    assert asked == [("a/kernel", (101, 101)), ("b/kernel", (101, 101))]
    for name, expected in (("a", 0.5), ("b", 1 / np.sqrt(101))):
        kernel = to_numpy(model.get_layer(name).kernel)
        # 10,201 draws: a relative error of 0.7% (one sigma), so 4% is over five.
        assert kernel.std() == pytest.approx(expected, rel=0.04)
        assert abs(kernel.mean()) < 0.05 * expected
    np.testing.assert_array_equal(to_numpy(model.get_layer("a").bias), 3.0)


def test_recurrent_kernels_are_orthogonal_and_forget_gates_open():
    config = tg.LSTMConfig(vocab_size=V, hidden_dim=13, num_layers=2, embedding_dim=5)
    weights = weights_of(tg.build_lstm(config))
    for index in range(2):
        kernel = weights[f"lstm_{index}/lstm_cell/recurrent_kernel"]
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(13), atol=1e-6)
        bias = weights[f"lstm_{index}/lstm_cell/bias"].reshape(4, 13)
        np.testing.assert_array_equal(bias.T, [[0, 1, 0, 0]] * 13)


def test_residual_projections_shrink_with_depth():
    stddevs = {}
    for num_layers in (1, 4):
        config = tg.GPTConfig(vocab_size=V, num_layers=num_layers, hidden_dim=128)
        weights = weights_of(tg.build_gpt(config))
        stddevs[num_layers] = {
            name: weights[f"block_0/{name}/kernel"].std()
            for name in (
                "attention/output",
                "feed_forward/output",
                "attention/query_key_value",
                "feed_forward/intermediate",
            )
        }
    for name, shallow in stddevs[1].items():
        ratio = 0.5 if name.endswith("output") else 1.0
        assert stddevs[4][name] / shallow == pytest.approx(ratio, rel=1e-6)


def test_a_fingerprint_covers_names_shapes_and_values():
    def model_of(*names, change=0.0):
        model = dense_model(*names, units=7)
        initialize(model, 0, lambda path, shape: 0.0)
        model.get_layer(names[0]).bias.assign(np.full(7, change))
        return model

    prints = [
        tg.fingerprint(model)
        for model in (
            model_of("a"),
            model_of("b"),
            model_of("a", "b"),
            model_of("a", change=1e-6),
        )
    ]
    assert len(set(prints)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in prints)
    assert tg.fingerprint(model_of("a")) == prints[0]


def test_a_fingerprint_leaves_out_random_states():
    model = tg.build_gpt(tg.GPTConfig(**SMALL, dropout=0.5))
    before = tg.fingerprint(model)
    model(np.zeros((2, 5), "int32"), training=True)
    assert tg.fingerprint(model) == before


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (-1, "seed must be between 0 and 4294967295, got -1"),
        (2**32, "seed must be between 0 and 4294967295, got 4294967296"),
        (None, "seed must be an integer, got None"),
    ],
)
def test_bad_seeds(seed, message):
    with pytest.raises(ValueError, match=message):
        initialize(dense_model("a", units=3), seed, lambda path, shape: 1.0)
