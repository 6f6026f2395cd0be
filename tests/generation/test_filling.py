"""Tests of keras_tinygpt.studies.filling."""

import types

import keras
import numpy as np
import pytest

import keras_tinygpt as tg
from keras_tinygpt.studies import filling
from keras_tinygpt.studies.filling import MASK, fill_text, mask_tokenizer, share_told

SHAPE = {"max_sequence_length": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 12}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The bell rang twice. " * 60, "utf-8")
    return path


class Known(keras.layers.Layer):
    """Logits that say: after token t comes t + 1; or that each token is itself."""

    def __init__(self, vocab_size, step):
        super().__init__()
        self.vocab_size, self.step = vocab_size, step

    def call(self, tokens):
        told = (tokens + self.step) % (self.vocab_size - 1)
        return keras.ops.one_hot(told, self.vocab_size, dtype="float32")

    def compute_output_shape(self, input_shape):
        return (*input_shape, self.vocab_size)


def test_a_gpt_is_asked_from_the_left():
    """A model that knows the next token of 0 1 2 .. is always right."""
    tokens = keras.Input((None,), dtype="int32")
    ids = np.arange(700) % 10
    for step, expected in ((1, 1.0), (0, 0.0)):
        model = keras.Model(tokens, Known(11, step)(tokens))
        model.config = tg.GPTConfig(vocab_size=11, max_sequence_length=16)
        assert share_told(model, ids) == expected


def test_an_encoder_never_sees_what_it_is_asked_for():
    """One that repeats what it reads is wrong: the tokens themselves are hidden."""
    model = tg.build_encoder(tg.EncoderConfig(vocab_size=11, **SHAPE))
    ids = np.full(700, 3)
    bias = model.get_layer("head").bias
    bias.assign(np.eye(11)[3] * 99.0)
    assert share_told(model, ids) == 1.0
    bias.assign(np.eye(11)[10] * 99.0 + np.eye(11)[4] * 50.0)  # the mask is no answer
    assert share_told(model, ids) == 0.0


@pytest.mark.slow
def test_the_study_ends_with_a_table_and_a_picture(text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(tg.EncoderConfig.PRESETS, "tiny", SHAPE)
    monkeypatch.setattr(filling, "SHOWN", f"The b{MASK}ll")
    options = types.SimpleNamespace(seeds=1, steps=2, corpus=str(text_file))
    results = filling.filling_results(options, tmp_path)
    assert [row[0] for row in results["rows"]][1:] == ["encoder", "GPT"]
    assert all(len(row) == len(results["columns"]) for row in results["rows"])
    sizes = [row[2] for row in results["rows"][1:]]
    assert sizes[0] == sizes[1]
    (path,) = filling.draw_filling(results, tmp_path, tmp_path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_text_is_filled_where_it_has_holes(text_file):
    tokenizer = mask_tokenizer(tg.load_corpus(text_file))
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == MASK
    config = tg.EncoderConfig(vocab_size=tokenizer.vocab_size, **SHAPE)
    filled = fill_text(tg.build_encoder(config), tokenizer, f"The b{MASK}ll")
    assert filled[:5] == "The b" and filled[6:] == "ll" and filled[5] != MASK
