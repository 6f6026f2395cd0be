"""One way to compile a function of tensors on each backend.

TensorFlow: `tf.function` with XLA. JAX: `jit`, with the model's variables passed as
arguments, so that later training is seen. PyTorch: eager, without gradients; what is
called many times is recorded (`recorded.py`).
"""

import threading
from collections.abc import Callable

import keras
import numpy as np

# While PyTorch records, the modules that any other thread calls are recorded too.
_ONE_AT_A_TIME = threading.RLock()


def compile_function(function: Callable, variables: list) -> Callable:
    """Returns `function` compiled; it takes nested tensors or NumPy arrays.

    Args:
        function: calls Keras layers and ops only; traced once per set of shapes.
        variables: every Keras variable that `function` reads.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return _trace_alone(tf.function(function, jit_compile=True, autograph=False))
    if backend == "jax":
        import jax

        def stateless(values, *arguments):
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return function(*arguments)

        jitted = jax.jit(stateless)
        return _trace_alone(
            lambda *arguments: jitted([v.value for v in variables], *arguments)
        )
    if backend == "torch":
        import torch

        @torch.no_grad()
        def eager(*arguments):
            with _ONE_AT_A_TIME:
                return function(*keras.tree.map_structure(_tensor, arguments))

        return eager
    raise ValueError(f"generation supports tensorflow, jax and torch, got {backend!r}")


def _trace_alone(function: Callable) -> Callable:
    """Keeps threads from tracing for the same shape of the first argument at once."""
    lock, traced = threading.Lock(), set()

    def call(*arguments):
        shape = tuple(arguments[0].shape)
        if shape in traced:
            return function(*arguments)
        with lock:
            outputs = function(*arguments)
        traced.add(shape)
        return outputs

    return call


def _tensor(value):
    is_numpy = isinstance(value, (np.ndarray, np.generic))
    return keras.ops.convert_to_tensor(value) if is_numpy else value
