"""Tokenizers as TensorFlow graphs: strings to ids and back, without Python.

Strings are UTF-8. Text that is not (lone surrogates too) is refused by a character
vocabulary; bytes that a byte model makes and that are not UTF-8 read U+FFFD.
"""

import numpy as np
import tensorflow as tf

from keras_tinygpt.text import ByteTokenizer, CharTokenizer


def make_text_graph(tokenizer) -> "CharGraph | ByteGraph":
    """Returns the graph of a tokenizer; ValueError for a type that has none."""
    if isinstance(tokenizer, CharTokenizer):
        return CharGraph(tokenizer)
    if isinstance(tokenizer, ByteTokenizer):
        return ByteGraph()
    raise ValueError(
        "tokenizer must be a CharTokenizer or a ByteTokenizer to travel inside a "
        f"SavedModel, got {type(tokenizer).__name__}"
    )


class CharGraph:
    """One id per character of the vocabulary of `tokenizer`."""

    def __init__(self, tokenizer: CharTokenizer):
        self.codes = np.array([ord(c) for c in tokenizer.vocabulary], "int32")
        self.order = np.argsort(self.codes).astype("int32")

    def encode(self, texts):
        """Strings (B,) to ragged int32 ids (B, None)."""
        codes = tf.strings.unicode_decode(texts, "UTF-8", errors="strict")
        known = tf.constant(self.codes[self.order])
        places = tf.searchsorted(known, codes.flat_values)
        places = tf.minimum(places, len(self.codes) - 1)
        is_known = tf.gather(known, places) == codes.flat_values
        unknown = tf.boolean_mask(codes.flat_values, ~is_known)[:1]
        check = tf.debugging.Assert(
            tf.reduce_all(is_known),
            [
                "text must use the vocabulary's characters only, got",
                tf.strings.unicode_encode(unknown[:, None], "UTF-8"),
                "with code point",
                unknown,
            ],
        )
        with tf.control_dependencies([check]):
            ids = tf.gather(tf.constant(self.order), places)
        return codes.with_flat_values(ids)

    def decode(self, prompts, ids):
        """Prompts (B,) followed by the text of ragged ids (B, None)."""
        codes = tf.ragged.map_flat_values(tf.gather, tf.constant(self.codes), ids)
        return prompts + tf.strings.unicode_encode(codes, "UTF-8")


class ByteGraph:
    """One id per byte."""

    def encode(self, texts):
        """Strings (B,) to ragged int32 ids (B, None)."""
        pieces = tf.strings.bytes_split(texts)
        values = tf.reshape(tf.io.decode_raw(pieces.flat_values, tf.uint8), [-1])
        return pieces.with_flat_values(tf.cast(values, tf.int32))

    def decode(self, prompts, ids):
        """Prompts (B,) followed by the text of ragged ids (B, None)."""
        table = tf.constant([bytes([value]) for value in range(256)])
        pieces = tf.ragged.map_flat_values(tf.gather, table, ids)
        joined = prompts + tf.strings.reduce_join(pieces, axis=-1)
        return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8")


def pad_left(ragged):
    """Ragged int32 (B, None) to dense (B, T), zeros on the left, and how many (B,)."""
    dense, lengths = ragged.to_tensor(), tf.cast(ragged.row_lengths(), tf.int32)
    offsets = tf.shape(dense)[1] - lengths
    places = tf.range(tf.shape(dense)[1]) - offsets[:, None]
    dense = tf.gather(dense, tf.maximum(places, 0), batch_dims=1)
    return tf.where(places >= 0, dense, 0), offsets
