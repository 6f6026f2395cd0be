"""The models: the GPT, the LSTM baseline and the n-gram counts."""

from keras_tinygpt.models.gpt import GPT, GPTConfig, build_gpt
from keras_tinygpt.models.initialization import fingerprint
from keras_tinygpt.models.lstm import LSTM, LSTMConfig, build_lstm
from keras_tinygpt.models.ngram import NGram

__all__ = [
    "GPT",
    "GPTConfig",
    "LSTM",
    "LSTMConfig",
    "NGram",
    "build_gpt",
    "build_lstm",
    "fingerprint",
]
