"""Dropout: rate, scale, seeds; on PyTorch the numbers come from NumPy."""

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
