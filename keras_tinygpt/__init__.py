"""Small GPTs for Keras: layers, models, training, generation."""

from keras_tinygpt import inspection, layers
from keras_tinygpt.bundle import LanguageModel, from_pretrained, load, save
from keras_tinygpt.callbacks import SampleText
from keras_tinygpt.evaluation import Scores, evaluate
from keras_tinygpt.export.saved_model import export_saved_model
from keras_tinygpt.generation import beam_search, fill_masks, generate, stream
from keras_tinygpt.models import (
    EncoderConfig,
    EncoderDecoderConfig,
    GPTConfig,
    LSTMConfig,
    NGram,
    build_encoder,
    build_encoder_decoder,
    build_gpt,
    build_lstm,
    fingerprint,
)
from keras_tinygpt.text import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Corpus,
    MaskedWindowDataset,
    Prepared,
    WindowDataset,
    encode_corpus,
    load_corpus,
    load_ids,
    load_prepared,
    prepare,
    split_ids,
    window_schedule,
)
from keras_tinygpt.training import (
    TrainConfig,
    TrainResult,
    make_optimizer,
    train,
)

__version__ = "0.1.0"

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "Corpus",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "GPTConfig",
    "LSTMConfig",
    "LanguageModel",
    "MaskedWindowDataset",
    "NGram",
    "Prepared",
    "SampleText",
    "Scores",
    "TrainConfig",
    "TrainResult",
    "WindowDataset",
    "beam_search",
    "build_encoder",
    "build_encoder_decoder",
    "build_gpt",
    "build_lstm",
    "encode_corpus",
    "evaluate",
    "export_saved_model",
    "fill_masks",
    "fingerprint",
    "from_pretrained",
    "generate",
    "inspection",
    "layers",
    "load",
    "load_corpus",
    "load_ids",
    "load_prepared",
    "make_optimizer",
    "prepare",
    "save",
    "split_ids",
    "stream",
    "train",
    "window_schedule",
]
