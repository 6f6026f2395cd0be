"""The models: GPT, encoder, encoder-decoder, the LSTM baseline, the n-gram counts."""

from keras_tinygpt.models.encoder import Encoder, EncoderConfig, build_encoder
from keras_tinygpt.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    build_encoder_decoder,
)
from keras_tinygpt.models.gpt import GPT, GPTConfig, build_gpt
from keras_tinygpt.models.initialization import fingerprint
from keras_tinygpt.models.lstm import LSTM, LSTMConfig, build_lstm
from keras_tinygpt.models.ngram import NGram

__all__ = [
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "GPT",
    "GPTConfig",
    "LSTM",
    "LSTMConfig",
    "NGram",
    "build_encoder",
    "build_encoder_decoder",
    "build_gpt",
    "build_lstm",
    "fingerprint",
]
