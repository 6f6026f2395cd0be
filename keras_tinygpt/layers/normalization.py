"""Normalisation of a vector: layer norm, or RMS norm that is fast on PyTorch's CPU."""

import functools

import keras
from keras import ops

from keras_tinygpt.checks import check_choice

NORM_EPSILON = 1e-5
NORMALIZATIONS = ("layer", "rms")


def make_norm(
    normalization: str,
    dtype=None,
    name: str | None = None,
    epsilon: float = NORM_EPSILON,
):
    """Returns a new LayerNormalization ("layer") or RMSNormalization ("rms")."""
    check_choice("normalization", normalization, NORMALIZATIONS)
    if normalization == "rms":
        return RMSNormalization(epsilon=epsilon, dtype=dtype, name=name)
    return keras.layers.LayerNormalization(epsilon=epsilon, dtype=dtype, name=name)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization`, trained four times as fast on PyTorch's CPU.

    `y = scale * x / sqrt(mean(x**2) + epsilon)` over the last axis. PyTorch has no
    gradient of its own for it; it is written out here. Elsewhere nothing changes.

    Args:
        epsilon: added to the mean square.

    Call arguments:
        inputs: float tensor (..., D).

    Reference: Zhang and Sennrich, 2019.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True  # Keras 3.15 forgets it

    def call(self, inputs):
        last = self.axis == [len(inputs.shape) - 1] or self.axis == [-1]
        on_torch = keras.backend.backend() == "torch" and inputs.device.type == "cpu"
        if not (last and on_torch):
            return super().call(inputs)
        scale = ops.cast(self.scale, inputs.dtype)
        return _torch_function().apply(inputs, scale, self.epsilon)


@functools.cache
def _torch_function():
    """The RMS norm with its gradient as a `torch.autograd.Function`."""
    import torch

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(context, inputs, scale, epsilon):
            width = inputs.shape[-1]
            norms = torch.linalg.vector_norm(
                inputs, dim=-1, keepdim=True, dtype=torch.float32
            )
            inverse = torch.rsqrt(norms * norms / width + epsilon)  # (..., 1)
            normalized = (inputs * inverse).to(inputs.dtype)
            context.save_for_backward(normalized, inverse.to(inputs.dtype), scale)
            return normalized * scale

        @staticmethod
        def backward(context, gradient):
            normalized, inverse, scale = context.saved_tensors
            width = normalized.shape[-1]
            products = gradient * normalized
            shares = (products @ scale.unsqueeze(1)) / width  # (..., 1)
            inner = torch.addcmul(gradient * scale, normalized, shares, value=-1)
            return inner * inverse, products.reshape(-1, width).sum(0), None

    return RMSNorm
