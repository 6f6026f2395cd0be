"""Normalisation of a vector: layer norm and RMS norm, with few passes on PyTorch."""

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
    return LayerNormalization(epsilon=epsilon, dtype=dtype, name=name)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization`, on PyTorch without casts around it.

    `y = gamma * (x - mean(x)) / sqrt(variance(x) + epsilon) + beta`. PyTorch computes
    in float32 whatever the type of its inputs. Elsewhere nothing changes.

    Args:
        epsilon: added to the variance.

    Call arguments:
        inputs: float tensor (..., D).

    Reference: Ba et al., 2016.
    """

    def call(self, inputs):
        usual = self.center and self.scale and not self.rms_scaling
        usual = usual and _is_last(self.axis, inputs)
        if keras.backend.backend() != "torch" or not usual:
            return super().call(inputs)
        import torch

        gamma, beta = (ops.cast(x, inputs.dtype) for x in (self.gamma, self.beta))
        shape = inputs.shape[-1:]
        return torch.nn.functional.layer_norm(inputs, shape, gamma, beta, self.epsilon)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization`, two to four times as fast on PyTorch's CPU.

    `y = scale * x / sqrt(mean(x**2) + epsilon)` over the last axis. PyTorch derives its
    gradient from many small operations; here it is written out. Elsewhere nothing
    changes.

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
        on_torch = keras.backend.backend() == "torch" and inputs.device.type == "cpu"
        if not on_torch or not _is_last(self.axis, inputs):
            return super().call(inputs)
        scale = ops.cast(self.scale, inputs.dtype)
        return _torch_function().apply(inputs, scale, self.epsilon)


def _is_last(axes: list[int], inputs) -> bool:
    return axes in ([-1], [len(inputs.shape) - 1])


@functools.cache
def _torch_function():
    """The RMS norm with its gradient as a `torch.autograd.Function`."""
    import torch

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(context, inputs, scale, epsilon):
            width = inputs.shape[-1]
            wide = torch.promote_types(inputs.dtype, torch.float32)
            norms = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=wide)
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
