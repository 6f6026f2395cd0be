"""Fixtures of all tests."""

import keras
import pytest

pytest.register_assert_rewrite("helpers")


@pytest.fixture(autouse=True)
def fresh_keras_state():
    """Seeds every generator and undoes a change of the global dtype policy."""
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_dtype_policy("float32")
