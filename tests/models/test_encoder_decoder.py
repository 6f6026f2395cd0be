"""Tests of keras_tinygpt.models.encoder_decoder."""

import math
import re

import keras
import numpy as np
import pytest
from helpers import check_saved_model, copy_to_torch, randomize, to_numpy, token_ids
from keras import ops

import keras_tinygpt as tg

pytestmark = pytest.mark.backend

V, S, T, D, PAD = 11, 7, 5, 12, 0
SMALL = {
    "vocab_size": V,
    "max_sequence_length": T,
    "max_source_length": S,
    "num_layers": 1,
    "num_heads": 3,
    "hidden_dim": D,
}
CHANGES = {
    "learned": {},
    "original": {
        "norm_position": "post",
        "positions": "sinusoidal",
        "activation": "relu",
        "tie_embeddings": True,
        "scale_embeddings": True,
    },
    "modern": {
        "positions": "rotary",
        "normalization": "rms",
        "activation": "swiglu",
        "num_kv_heads": 1,
        "qk_norm": True,
        "use_bias": False,
    },
    "separate": {
        "positions": "none",
        "share_embeddings": False,
        "tie_embeddings": True,
        "pad_token_id": 3,
    },
}
every_change = pytest.mark.parametrize("change", CHANGES)


def small(change="learned", seed=0, **more):
    config = tg.EncoderDecoderConfig(**{**SMALL, **CHANGES[change], **more})
    return tg.build_encoder_decoder(config, seed=seed)


def pair(rows=2, source=S, target=T, seed=0, pad=PAD):
    """A source without padding, and a target."""
    source = token_ids(rows, source, vocab_size=V - 1, seed=seed)
    return [source + (source >= pad), token_ids(rows, target, vocab_size=V, seed=seed)]


def layer_output(model, name):
    return keras.Model(model.inputs, model.get_layer(name).output)


@pytest.mark.parametrize(
    ("preset", "num_parameters"), [("original", 236_480), ("mini", 257_345)]
)
def test_presets_have_their_exact_sizes(preset, num_parameters):
    config = tg.EncoderDecoderConfig.preset(preset, vocab_size=65)
    assert tg.build_encoder_decoder(config).count_params() == num_parameters


def test_what_each_option_costs():
    sizes = [
        small(**options).count_params()
        for options in (
            {},
            {"share_embeddings": False},
            {"tie_embeddings": True},
            {"share_embeddings": False, "tie_embeddings": True},
            {"max_source_length": S + 1},
            {"norm_position": "post"},
        )
    ]
    table, head = V * D, V * D + V
    differences = [size - sizes[0] for size in sizes[1:]]
    assert differences == [table, -head, table - head, D, -2 * 2 * D]


@every_change
def test_the_decoder_reads_no_later_token(change):
    model = small(change)
    assert model.output_shape == (None, None, V)
    source, _ = pair(pad=model.config.pad_token_id)

    def decode(target, training):
        return model([ops.convert_to_tensor(source), target], training=training)

    assert tg.inspection.leak_test(decode, V, T) is None


@every_change
def test_every_output_depends_on_the_whole_source(change):
    model = small(change)
    source, target = pair(pad=model.config.pad_token_id)
    logits = to_numpy(model([source, target]))
    for changed in range(S):
        other = source.copy()
        while True:
            other[:, changed] = (other[:, changed] + 1) % V
            if not np.any(other[:, changed] == model.config.pad_token_id):
                break
        moved = np.abs(to_numpy(model([other, target])) - logits).max(-1)
        assert moved.min() > 1e-7


@every_change
def test_padding_of_the_source_changes_nothing(change):
    model = randomize(small(change, max_source_length=13))
    pad = model.config.pad_token_id
    source, target = pair(pad=pad)
    padded = np.full((2, 13), pad, "int32")
    padded[:, :S] = source
    expected = to_numpy(model([source, target]))
    outputs = to_numpy(model([padded, target]))
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    assert np.isfinite(to_numpy(model([np.full((2, S), pad), target]))).all()


@pytest.mark.parametrize(
    ("norm_position", "activation"), [("pre", "gelu"), ("post", "relu")]
)
def test_equal_to_pytorch(norm_position, activation):
    """The same layers, PyTorch's, between the embeddings and the final norms."""
    torch = pytest.importorskip("torch", reason="needs the extra [torch]")
    options = {"norm_position": norm_position, "activation": activation}
    model = randomize(small(qkv_bias=True, num_layers=2, **options))
    source, target = pair()
    source[0, 4:] = PAD
    padding = torch.tensor(source == PAD)

    def start(name):
        values = layer_output(model, name)([source, target])
        return torch.tensor(to_numpy(values), dtype=torch.float32)

    hidden = start("encoder_position_embedding")
    for index in range(2):
        layer = copy_to_torch(model.get_layer(f"encoder_block_{index}"))
        hidden = layer(hidden, src_key_padding_mask=padding)
    if norm_position == "pre":
        norm = model.get_layer("encoder_final_norm")
        hidden = torch.nn.functional.layer_norm(
            hidden, (D,), *(torch.tensor(np.array(w)) for w in norm.get_weights())
        )
    context, hidden = hidden, start("decoder_position_embedding")
    later = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
    for index in range(2):
        layer = copy_to_torch(model.get_layer(f"decoder_block_{index}"))
        hidden = layer(hidden, context, tgt_mask=later, memory_key_padding_mask=padding)
    ours = layer_output(model, "decoder_block_1")([source, target])
    expected = hidden.detach().numpy()
    np.testing.assert_allclose(to_numpy(ours), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_a_tied_head_is_the_table_of_the_target(share):
    model = small("original", share_embeddings=share)
    inputs = pair()
    hidden = to_numpy(layer_output(model, "decoder_block_0")(inputs))
    name = "token_embedding" if share else "decoder_token_embedding"
    table = to_numpy(model.get_layer(name).embeddings)
    np.testing.assert_allclose(to_numpy(model(inputs)), hidden @ table.T, atol=1e-5)


@pytest.mark.parametrize("preset", ["original", "mini"])
def test_an_untrained_model_is_near_uniform(preset):
    config = tg.EncoderDecoderConfig.preset(preset, vocab_size=65)
    tokens = token_ids(4, 33, vocab_size=65)
    model = tg.build_encoder_decoder(config)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = to_numpy(loss(tokens[:, 1:], model([tokens, tokens[:, :-1]])))
    assert found == pytest.approx(math.log(65), abs=0.05)


def test_each_dropout_draws_its_own_numbers():
    model = small(dropout=0.5, attention_dropout=0.5, seed=2**32 - 1)
    dropouts = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Dropout)
    ]
    assert len(dropouts) == 2 + (3 + 5) * SMALL["num_layers"]
    masks = {
        to_numpy(layer(np.ones((1, 101), "float32"), training=True)).tobytes()
        for layer in dropouts
    }
    # Two independent masks of 101 fair draws are equal once in 2 ** 101 runs.
    assert len(masks) == len(dropouts)


@pytest.mark.parametrize("change", ["original", "separate"])
def test_a_keras_file_gives_the_model_back(change, tmp_path):
    model = small(change, dropout=0.1, seed=3)
    copy = check_saved_model(model, pair(), tmp_path)
    assert copy.config == model.config
    assert tg.fingerprint(copy) == tg.fingerprint(model)


def test_logits_are_float32_under_mixed_policies():
    config = tg.EncoderDecoderConfig(**SMALL)
    low = tg.build_encoder_decoder(config, dtype="mixed_bfloat16")
    logits = low(pair())
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    np.testing.assert_allclose(to_numpy(logits), to_numpy(small()(pair())), atol=0.03)


def test_a_bundle_gives_the_model_back(tmp_path):
    model, tokenizer = small(), tg.CharTokenizer("_abcdefghij")
    loaded = tg.load(tg.save(tmp_path / "bundle", model, tokenizer))
    assert tg.fingerprint(loaded.model) == tg.fingerprint(model)


CALLS = {
    "evaluate": lambda model: tg.evaluate(model, pair()[0][0]),
    "train": lambda model: tg.train(model, pair()[0][0], pair()[0][0]),
    "next_tokens": lambda model: tg.inspection.next_tokens(model, [1]),
    "surprise": lambda model: tg.inspection.surprise(model, [1, 2]),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_continues_a_text_refuses(call):
    match = "must predict the next token .*got EncoderDecoder"
    with pytest.raises(ValueError, match=match):
        CALLS[call](small())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"positions": "alibi"}, "'learned', 'sinusoidal', 'rotary', 'none', got 'al"),
        ({"max_source_length": 0}, "max_source_length must be at least 1, got 0"),
        ({"pad_token_id": 11}, "pad_token_id must be between 0 and 10, got 11"),
        ({"pad_token_id": None}, "pad_token_id must be an integer, got None"),
        ({"share_embeddings": 1}, "share_embeddings must be True or False, got 1"),
    ],
)
def test_bad_fields(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tg.EncoderDecoderConfig(**{**SMALL, **options})


def test_a_source_longer_than_the_learned_positions():
    source, target = pair(source=S + 1)
    with pytest.raises(ValueError, match="max_sequence_length=7, got 8"):
        small()([source, target])
