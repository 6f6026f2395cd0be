"""Fixtures of all tests."""

import gc
import os

# XLA compiles much and runs little here: plain machine code saves minutes.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis  # noqa: E402
import keras  # noqa: E402
import pytest  # noqa: E402

# The first example of a backend compiles, and machines are shared.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
pytest.register_assert_rewrite("helpers")


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Garbage is collected between tests, and without what lives on.

    Keras and TensorFlow leave millions of objects alive: going through them at any time
    is a third of a test that trains.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def fresh_keras_state():
    """Seeds every generator and undoes a change of the global dtype policy."""
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_dtype_policy("float32")
    gc.collect()
    gc.freeze()
