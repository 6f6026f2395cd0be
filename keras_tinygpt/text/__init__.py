"""Text in, token ids and windows out: corpora, tokenizers, schedules."""

from keras_tinygpt.text.bpe import BPETokenizer
from keras_tinygpt.text.corpus import EMBEDDED_NAME, Corpus, load_corpus
from keras_tinygpt.text.masking import MaskedWindowDataset, hide_tokens
from keras_tinygpt.text.names import rename_speakers
from keras_tinygpt.text.prepared import Prepared, load_ids, load_prepared
from keras_tinygpt.text.preparing import prepare
from keras_tinygpt.text.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    encode_corpus,
    load_tokenizer,
)
from keras_tinygpt.text.windows import (
    WindowDataset,
    even_starts,
    fingerprint_array,
    split_ids,
    split_parts,
    window_schedule,
)

__all__ = [
    "EMBEDDED_NAME",
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "Corpus",
    "MaskedWindowDataset",
    "Prepared",
    "WindowDataset",
    "encode_corpus",
    "even_starts",
    "fingerprint_array",
    "hide_tokens",
    "load_corpus",
    "load_ids",
    "load_prepared",
    "load_tokenizer",
    "prepare",
    "rename_speakers",
    "split_ids",
    "split_parts",
    "window_schedule",
]
