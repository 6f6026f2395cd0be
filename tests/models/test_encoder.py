"""Tests of keras_tinygpt.models.encoder."""

import math
import re

import keras
import numpy as np
import pytest
from helpers import (
    JIT,
    check_one_line_error,
    check_saved_model,
    copy_to_torch,
    randomize,
    to_numpy,
    token_ids,
)

import keras_tinygpt as tg

pytestmark = pytest.mark.backend

V, T, D, C, PAD = 11, 7, 12, 5, 0
SMALL = {
    "vocab_size": V,
    "max_sequence_length": T,
    "num_layers": 1,
    "num_heads": 3,
    "hidden_dim": D,
}
CHANGES = {
    "learned": {"pad_token_id": PAD},
    "post": {"norm_position": "post", "positions": "sinusoidal", "activation": "relu"},
    "modern": {
        "pad_token_id": PAD,
        "positions": "rotary",
        "normalization": "rms",
        "activation": "swiglu",
        "num_kv_heads": 1,
        "qk_norm": True,
        "tie_embeddings": True,
    },
    "classes": {"pad_token_id": PAD, "num_classes": C},
}
every_change = pytest.mark.parametrize("change", CHANGES)


def small(change="learned", seed=0, **more):
    config = tg.EncoderConfig(**{**SMALL, **CHANGES[change], **more})
    return tg.build_encoder(config, seed=seed)


def ids(*shape, seed=0):
    """Ids of real tokens."""
    return 1 + token_ids(*shape, vocab_size=V - 1, seed=seed)


@pytest.mark.parametrize(
    ("preset", "num_parameters"), [("mini", 824_897), ("tiny", 157_889)]
)
def test_presets_have_their_exact_sizes(preset, num_parameters):
    config = tg.EncoderConfig.preset(preset, vocab_size=65)
    assert tg.build_encoder(config).count_params() == num_parameters


def test_the_weights_are_those_of_a_gpt_of_the_same_shape():
    gpt = tg.build_gpt(tg.GPTConfig(**SMALL), seed=3)
    assert tg.fingerprint(small(seed=3)) == tg.fingerprint(gpt)


def test_a_class_head_has_the_width_of_its_classes():
    difference = small("classes").count_params() - small().count_params()
    assert difference == (D + 1) * (C - V)


@every_change
def test_every_output_depends_on_both_sides(change):
    """Of a text of real tokens, any changed token moves the outputs of all."""
    model, tokens = small(change), ids(2, T)
    logits = to_numpy(model(tokens))
    assert logits.shape == ((2, C) if change == "classes" else (2, T, V))
    assert keras.backend.standardize_dtype(model(tokens).dtype) == "float32"
    for changed in range(T):
        other = tokens.copy()
        other[:, changed] = other[:, changed] % (V - 1) + 1
        moved = np.abs(to_numpy(model(other)) - logits).max(-1)
        assert moved.min() > 1e-6
    if change != "classes":
        leak = tg.inspection.leak_test(model, length=T)
        assert (leak.changed, leak.earlier) == (1, 0)


@pytest.mark.parametrize("change", ["learned", "modern", "classes"])
def test_padding_changes_nothing(change):
    model = randomize(small(change, max_sequence_length=13))
    tokens = ids(2, T)
    padded = np.full((2, 13), PAD, "int32")
    padded[:, :T] = tokens
    outputs = to_numpy(model(padded))
    if change != "classes":
        outputs = outputs[:, :T]
    np.testing.assert_allclose(outputs, to_numpy(model(tokens)), atol=1e-5)
    assert np.isfinite(to_numpy(model(np.full((2, T), PAD, "int32")))).all()


def test_without_a_padding_id_all_ids_are_real():
    model, tokens = small(pad_token_id=None), ids(2, T)
    other = tokens.copy()
    other[:, -1] = 0
    assert np.abs(to_numpy(model(other)) - to_numpy(model(tokens)))[:, 0].max() > 1e-6


@pytest.mark.parametrize(
    ("norm_position", "activation"), [("pre", "gelu"), ("post", "relu")]
)
def test_equal_to_pytorch(norm_position, activation):
    torch = pytest.importorskip("torch", reason="needs the extra [torch]")
    options = {"norm_position": norm_position, "activation": activation}
    model = randomize(small(qkv_bias=True, num_layers=2, **options))
    tokens = ids(2, T)
    tokens[0, 4:] = PAD
    first = keras.Model(model.input, model.get_layer("position_embedding").output)
    last = keras.Model(model.input, model.get_layer("block_1").output)
    hidden = torch.tensor(to_numpy(first(tokens)), dtype=torch.float32)
    for index in range(2):
        layer = copy_to_torch(model.get_layer(f"block_{index}"))
        hidden = layer(hidden, src_key_padding_mask=torch.tensor(tokens == PAD))
    expected = hidden.detach().numpy()
    np.testing.assert_allclose(to_numpy(last(tokens)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preset", ["mini", "tiny"])
def test_an_untrained_model_is_near_uniform(preset):
    model = tg.build_encoder(tg.EncoderConfig.preset(preset, vocab_size=65))
    tokens = token_ids(4, 32, vocab_size=65)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = to_numpy(loss(tokens, model(tokens)))
    assert found == pytest.approx(math.log(65), abs=0.05)


def test_a_class_head_learns():
    """Which token stands at both ends: it has to be read from two places."""
    tokens = ids(199, T, seed=5)
    tokens[:, -1] = tokens[:, 0] = 1 + np.arange(199) % C
    model = small("classes")
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=JIT,
        metrics=["accuracy"],
    )
    history = model.fit(tokens, tokens[:, 0] - 1, epochs=12, verbose=0).history
    assert history["accuracy"][-1] > 0.95  # by chance 0.2


@pytest.mark.parametrize("change", ["modern", "classes"])
def test_a_keras_file_gives_the_model_back(change, tmp_path):
    model = small(change, dropout=0.1, seed=3)
    copy = check_saved_model(model, ids(2, T), tmp_path)
    assert copy.config == model.config
    assert tg.fingerprint(copy) == tg.fingerprint(model)


@pytest.mark.parametrize("change", ["learned", "classes"])
def test_a_bundle_gives_the_model_back(change, tmp_path, capsys):
    model, tokenizer = small(change), tg.CharTokenizer("_abcdefghij")
    loaded = tg.load(tg.save(tmp_path / "bundle", model, tokenizer))
    assert tg.fingerprint(loaded.model) == tg.fingerprint(model)
    with pytest.raises(ValueError, match="must predict the next token .*got Encoder"):
        loaded.generate("abc")
    error = check_one_line_error(capsys, "generate", tmp_path / "bundle", "abc")
    assert "model must predict the next token of a text" in error
    with pytest.raises(ValueError, match="tokenizer and model must agree"):
        tg.save(tmp_path / "other", model, tg.CharTokenizer("abc"))


CALLS = {
    "evaluate": lambda model: tg.evaluate(model, ids(29)),
    "train": lambda model: tg.train(model, ids(29), ids(29)),
    "generate": lambda model: tg.generate(model, [1], 3),
    "plain loop": lambda model: tg.generate(model, [1], 3, use_cache=False),
    "stream": lambda model: tg.stream(model, [1], 3),
    "beam_search": lambda model: tg.beam_search(model, [1], 3),
    "next_tokens": lambda model: tg.inspection.next_tokens(model, [1]),
    "surprise": lambda model: tg.inspection.surprise(model, [1, 2]),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_needs_the_next_token_refuses(call):
    with pytest.raises(ValueError, match="must predict the next token .*got Encoder"):
        CALLS[call](small())


def test_exports_refuse(tmp_path):
    tokenizer = tg.CharTokenizer("_abcdefghij")
    with pytest.raises(ValueError, match="build_gpt or build_lstm, got Encoder"):
        tg.export_saved_model(small(), tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"positions": "alibi"}, "'learned', 'sinusoidal', 'rotary', 'none', got 'al"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"num_classes": "two"}, "num_classes must be an integer, got 'two'"),
        ({"pad_token_id": 11}, "pad_token_id must be between 0 and 10, got 11"),
        ({"pad_token_id": -1}, "pad_token_id must be between 0 and 10, got -1"),
        ({"tie_embeddings": 1}, "tie_embeddings must be True or False, got 1"),
    ],
)
def test_bad_fields(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tg.EncoderConfig(**{**SMALL, **options})


def test_bad_preset_and_seed():
    with pytest.raises(ValueError, match="preset must be one of 'mini', 'tiny'"):
        tg.EncoderConfig.preset("book", vocab_size=V)
    with pytest.raises(ValueError, match="seed must be between 0 and .*got -1"):
        small(seed=-1)
