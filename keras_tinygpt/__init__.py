"""Small GPTs for Keras: layers, models, training, generation, export."""

from keras_tinygpt import layers
from keras_tinygpt.models import (
    GPTConfig,
    LSTMConfig,
    build_gpt,
    build_lstm,
    fingerprint,
)

__version__ = "0.1.0"

__all__ = [
    "GPTConfig",
    "LSTMConfig",
    "build_gpt",
    "build_lstm",
    "fingerprint",
    "layers",
]
