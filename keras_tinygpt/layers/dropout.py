"""Dropout that is fast on PyTorch's CPU path too."""

import keras
import numpy as np
from keras import ops

STEPS = 2**16  # values of one 16-bit draw


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout`, the same but for where its random numbers come from.

    On PyTorch and the CPU Keras draws one float per element with a serial generator,
    a third of a training step of a small GPT. There NumPy draws 16 bits per element,
    seeded by the layer's own `SeedGenerator`, so that runs repeat and resume exactly;
    the rate is met to within 1/65,536. Elsewhere nothing changes.

    Args:
        rate: share of the elements set to 0; the others are divided by 1 - rate.
        seed: seed of the draws.

    Call arguments:
        inputs: float tensor of any shape.
        training: whether dropout is on.
    """

    def call(self, inputs, training=False):
        on_torch = keras.backend.backend() == "torch" and self.noise_shape is None
        if training and self.rate and on_torch and inputs.device.type == "cpu":
            return self._drop_on_torch(inputs)
        return super().call(inputs, training=training)

    def _drop_on_torch(self, inputs):
        seed = ops.convert_to_numpy(self.seed_generator.next()).tolist()
        stream = np.random.Generator(np.random.SFC64(seed))
        bits = np.frombuffer(bytearray(stream.bytes(2 * inputs.numel())), "int16")
        bits = ops.convert_to_tensor(bits.reshape(inputs.shape))
        kept = bits >= round(self.rate * STEPS) - STEPS // 2
        scale = ops.cast(kept, inputs.dtype) * (1.0 / (1.0 - self.rate))
        return inputs * scale
