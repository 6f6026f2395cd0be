"""Dropout whose random numbers cost little on a CPU."""

import math

import keras
import numpy as np
from keras import ops

STEPS = 2**16  # values of one 16-bit draw
ODD = np.uint32(0x9E3779B1)  # near 2**32 / golden ratio: spreads consecutive numbers
ZERO = np.uint32(0)
FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout`, the same but for where its random numbers come from.

    Those of Keras take a sixth of a training step of a small GPT on a CPU under
    TensorFlow, a tenth under JAX, a third under PyTorch. Here, under TensorFlow and
    JAX, an element is kept or not by a hash of its place, keyed by the layer's own
    `SeedGenerator`, which compilers fuse with what follows. PyTorch compiles nothing:
    there, on a CPU, NumPy draws 16 bits per element from the same seed. Runs repeat and
    resume exactly; the rate is met to within 1/65,536.

    Args:
        rate: share of the elements set to 0; the others are divided by 1 - rate.
        seed: seed of the draws.

    Call arguments:
        inputs: float tensor of any shape.
        training: whether dropout is on.

    Reference: Srivastava et al., 2014; the hash is lowbias32 of Wellons, 2018,
    "Prospecting for Hash Functions".
    """

    def call(self, inputs, training=False):
        if not training or not self.rate or self.noise_shape is not None:
            return super().call(inputs, training=training)
        if keras.backend.backend() != "torch":
            return self._drop_by_hash(inputs)
        if inputs.device.type == "cpu":
            return self._drop_on_torch(inputs)
        return super().call(inputs, training=training)

    def _drop_by_hash(self, inputs):
        seed = ops.cast(self.seed_generator.next(), "uint32")  # (2,)
        first = _mix(_mix(seed[1]) + seed[0])
        second = _mix(first + ODD)
        shape = ops.shape(inputs)
        places = ops.cast(ops.arange(math.prod(shape), dtype="int32"), "uint32")
        hashed = ops.reshape(_mix(places * ODD + first, second), shape)
        kept = hashed >= np.uint32(round(self.rate * 2**32))
        scaled = inputs * (1.0 / (1.0 - self.rate))
        return ops.where(kept, scaled, ops.zeros((), scaled.dtype))

    def _drop_on_torch(self, inputs):
        seed = ops.convert_to_numpy(self.seed_generator.next()).tolist()
        stream = np.random.Generator(np.random.SFC64(seed))
        bits = np.frombuffer(bytearray(stream.bytes(2 * inputs.numel())), "int16")
        bits = ops.convert_to_tensor(bits.reshape(inputs.shape))
        kept = bits >= round(self.rate * STEPS) - STEPS // 2
        scale = ops.cast(kept, inputs.dtype) * (1.0 / (1.0 - self.rate))
        return inputs * scale


def _mix(bits, key=ZERO):
    """A hash of uint32 numbers; another one for every key."""
    bits = ops.bitwise_xor(bits, ops.right_shift(bits, 16)) * FACTORS[0] + key
    bits = ops.bitwise_xor(bits, ops.right_shift(bits, 15)) * FACTORS[1]
    return ops.bitwise_xor(bits, ops.right_shift(bits, 16))
