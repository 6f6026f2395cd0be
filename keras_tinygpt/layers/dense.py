"""A linear projection that is fast on JAX's CPU path too."""

import keras
from keras import ops


class Quantizable:
    """Goes before a Keras layer whose subclass is quantized as the layer itself is.

    Keras leaves subclasses as they are, for they might compute something else.
    """

    def quantize(self, mode=None, type_check=True, config=None):
        return super().quantize(mode, type_check=False, config=config)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class Dense(Quantizable, keras.layers.Dense):
    """`keras.layers.Dense`, which on JAX multiplies flattened inputs.

    XLA takes almost twice as long for the gradient of a kernel when the product runs
    over batch and length apart. Elsewhere nothing changes.

    Args and call arguments: as for `keras.layers.Dense`.
    """

    def call(self, inputs, training=None):
        if keras.backend.backend() != "jax" or len(inputs.shape) < 3:
            return super().call(inputs, training=training)
        *leading, width = ops.shape(inputs)
        flat = super().call(ops.reshape(inputs, (-1, width)), training=training)
        return ops.reshape(flat, (*leading, self.units))
