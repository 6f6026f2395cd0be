"""Dropout: rate, scale, seeds; the hash against one in NumPy."""

import itertools

import keras
import numpy as np
import pytest
from helpers import to_numpy

from keras_tinygpt.layers.dropout import Dropout

pytestmark = pytest.mark.backend


def test_rate_and_scale():
    """Of 60,000 elements; six standard deviations, two failures in a billion."""
    layer = Dropout(0.3, seed=5)
    outputs = to_numpy(layer(np.ones((300, 200), "float32"), training=True))
    np.testing.assert_allclose(outputs[outputs != 0], 1 / 0.7, rtol=1e-6)
    assert abs(np.mean(outputs == 0) - 0.3) < 6 * np.sqrt(0.3 * 0.7 / outputs.size)
    kept = outputs != 0  # neighbours are independent
    both = np.mean(kept[:, 1:] & kept[:, :-1])
    assert abs(both - 0.49) < 6 * np.sqrt(0.49 * 0.51 / outputs.size) * 2


def test_draws_follow_the_seed_and_differ_from_call_to_call():
    x = np.ones((7, 31), "float32")
    first, second = Dropout(0.5, seed=5), Dropout(0.5, seed=5)
    draws = [to_numpy(first(x, training=True)) for _ in range(2)]
    assert not np.array_equal(*draws)
    for draw in draws:
        assert np.array_equal(draw, to_numpy(second(x, training=True)))
    assert not np.array_equal(
        draws[0], to_numpy(Dropout(0.5, seed=6)(x, training=True))
    )


def test_calls_and_layers_are_independent():
    """Consecutive calls, and layers whose seeds are neighbours: six deviations."""
    x = np.ones((300, 200), "float32")
    layer, other = Dropout(0.5, seed=7), Dropout(0.5, seed=8)
    draws = [to_numpy(layer(x, training=True)) > 0 for _ in range(3)]
    draws.append(to_numpy(other(x, training=True)) > 0)
    for one, two in itertools.combinations(draws, 2):
        assert abs(np.mean(one & two) - 0.25) < 6 * np.sqrt(0.25 * 0.75 / x.size)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="PyTorch draws by NumPy")
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4)])
def test_the_hash_is_that_of_the_reference(shape):
    layer = Dropout(0.3, seed=5)
    layer(np.ones(shape, "float32"), training=True)  # the second call is compared
    seed = to_numpy(layer.seed_generator.state).astype("uint32")
    outputs = to_numpy(layer(np.ones(shape, "float32"), training=True))

    def mix(number, key=0):
        number = ((number ^ number >> 16) * 0x7FEB352D + key) % 2**32
        number = (number ^ number >> 15) * 0x846CA68B % 2**32
        return number ^ number >> 16

    first = mix((mix(int(seed[1])) + int(seed[0])) % 2**32)
    second = mix((first + 0x9E3779B1) % 2**32)
    for place, value in enumerate(outputs.reshape(-1)):
        hashed = mix((place * 0x9E3779B1 + first) % 2**32, second)
        assert (value > 0) == (hashed >= 0.3 * 2**32)


@pytest.mark.parametrize("jit_compile", [True, False])
def test_compiled_steps_draw_as_plain_ones_do(jit_compile):
    """The layer alone in a model: what is dropped has no gradient."""
    if jit_compile and keras.backend.backend() == "torch":
        pytest.skip("not compiled on PyTorch")
    x = np.ones((4, 6), "float32")
    inputs = keras.Input((6,))
    scaled = keras.layers.Rescaling(1.0)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(Dropout(0.5, seed=3)(scaled)))
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=jit_compile)
    kernel, _ = model.trainable_variables
    kernel.assign(np.ones((6, 1), "float32"))
    model.fit(x, np.zeros((4, 1), "float32"), batch_size=4, verbose=0)
    kept = to_numpy(Dropout(0.5, seed=3)(x, training=True))
    gradient = 2 * kept.T @ kept.sum(1, keepdims=True) / 4
    np.testing.assert_allclose(to_numpy(kernel), 1 - gradient, rtol=1e-5)


def test_off_outside_training_and_at_rate_zero():
    x = np.ones((3, 5), "float32")
    assert np.array_equal(to_numpy(Dropout(0.5, seed=1)(x)), x)
    assert np.array_equal(to_numpy(Dropout(0.0)(x, training=True)), x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keeps_the_type(dtype):
    outputs = Dropout(0.5, seed=1, dtype=dtype)(np.ones((3, 5)), training=True)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    assert set(np.unique(to_numpy(outputs))) <= {0.0, 2.0}


def test_reloads():
    layer = Dropout(0.25, seed=4, name="kept")
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, Dropout) and again.get_config() == layer.get_config()
