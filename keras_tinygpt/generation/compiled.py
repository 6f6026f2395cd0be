"""One way to compile a function of tensors on each backend.

TensorFlow: `tf.function` with XLA. JAX: `jit`, with the model's variables passed as
arguments, so that later training is seen. PyTorch: eager, without gradients.
"""

from collections.abc import Callable

import keras


def compile_function(function: Callable, variables: list) -> Callable:
    """Returns `function` compiled; it takes and returns nested tensors.

    Args:
        function: calls Keras layers and ops only; traced once per set of shapes.
        variables: every Keras variable that `function` reads.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True, autograph=False)
    if backend == "jax":
        import jax

        def stateless(values, *arguments):
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return function(*arguments)

        jitted = jax.jit(stateless)
        return lambda *arguments: jitted([v.value for v in variables], *arguments)
    if backend == "torch":
        import torch

        return torch.no_grad()(function)
    raise ValueError(f"generation supports tensorflow, jax and torch, got {backend!r}")
