"""Attention maps of encoders and encoder-decoders."""

import keras
import numpy as np
import pytest
from helpers import randomize, to_numpy

import keras_tinygpt as tg
from keras_tinygpt.inspection import figures

pytestmark = pytest.mark.backend

V, S, T, L, N, D, PAD = 11, 7, 5, 2, 3, 12, 0
SHAPE = {"vocab_size": V, "num_layers": L, "num_heads": N, "hidden_dim": D}
SOURCE, TARGET = [3, 1, 4, 1, PAD, PAD], [1, 5, 9, 2]


@pytest.fixture(scope="module")
def encoder():
    config = tg.EncoderConfig(**SHAPE, max_sequence_length=S, pad_token_id=PAD)
    return randomize(tg.build_encoder(config))


@pytest.fixture(scope="module")
def translator():
    config = tg.EncoderDecoderConfig(
        **SHAPE, max_sequence_length=T, max_source_length=S, num_kv_heads=1
    )
    return randomize(tg.build_encoder_decoder(config))


def test_maps_of_an_encoder(encoder):
    """Both sides are read; weights on padding are exactly 0."""
    maps = tg.inspection.attention_maps(encoder, SOURCE)
    assert maps.weights.shape == (L, N, 6, 6)
    assert maps.source_weights is None and maps.cross_weights is None
    assert np.all(maps.weights[..., :4] > 0) and np.all(maps.weights[..., 4:] == 0.0)
    assert maps.forbidden_weight == 0.0 and maps.row_sum_error < 1e-6
    logits = to_numpy(encoder(np.array([SOURCE])))[0]
    np.testing.assert_allclose(maps.logits, logits, atol=1e-5)
    unpadded = tg.inspection.attention_maps(encoder, SOURCE[:4])
    np.testing.assert_allclose(unpadded.weights, maps.weights[:, :, :4, :4], atol=1e-5)


def test_maps_of_a_translation(translator):
    """The target reads earlier tokens and the source without its padding."""
    maps = tg.inspection.attention_maps(translator, TARGET, SOURCE)
    shapes = [x.shape for x in (maps.source_weights, maps.weights, maps.cross_weights)]
    assert shapes == [(L, N, 6, 6), (L, N, 4, 4), (L, N, 4, 6)]
    assert np.all(maps.weights[..., ~np.tri(4, dtype=bool)] == 0.0)
    for weights in (maps.source_weights, maps.cross_weights):
        assert np.all(weights[..., :4] > 0) and np.all(weights[..., 4:] == 0.0)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    assert maps.forbidden_weight == 0.0 and maps.row_sum_error < 1e-6
    inputs = [np.array([SOURCE]), np.array([TARGET])]
    logits = to_numpy(translator(inputs))[0]
    np.testing.assert_allclose(maps.logits, logits, atol=1e-5)


def test_the_maps_are_what_the_block_weighs_with(translator):
    """The last block's maps, from the inputs it has in the model."""
    maps = tg.inspection.attention_maps(translator, TARGET, SOURCE)
    block = translator.get_layer("decoder_block_1")
    inputs = [np.array([SOURCE]), np.array([TARGET])]
    hidden, context, real = keras.Model(translator.inputs, block.input)(inputs)
    _, own, cross = block(
        hidden, context=context, context_mask=real, return_attention_scores=True
    )
    np.testing.assert_allclose(maps.weights[1], to_numpy(own)[0], atol=1e-6)
    np.testing.assert_allclose(maps.cross_weights[1], to_numpy(cross)[0], atol=1e-6)


def test_heads_of_an_encoder_look_ahead(encoder):
    ids = 1 + np.random.default_rng(0).integers(0, V - 1, 61)
    metrics = tg.inspection.head_metrics(encoder, ids, sequence_length=5)
    ahead = metrics.mean_map[..., ~np.tri(5, dtype=bool)]
    assert ahead.min() > 0


def test_what_cannot_be_read(encoder, translator):
    gpt = tg.build_gpt(tg.GPTConfig(**SHAPE, max_sequence_length=T))
    for call, match in (
        (
            lambda: tg.inspection.attention_maps(translator, TARGET),
            "is read by attention_maps with source_ids, got EncoderDecoder",
        ),
        (
            lambda: tg.inspection.causes(translator, TARGET),
            "is read by attention_maps with source_ids, got EncoderDecoder",
        ),
        (
            lambda: tg.inspection.attention_maps(gpt, TARGET, SOURCE),
            "source_ids needs a model with cross-attention, got GPT",
        ),
        (
            lambda: tg.inspection.attention_maps(translator, TARGET, [V]),
            "source_ids must lie between 0 and 10",
        ),
        (
            lambda: tg.inspection.causes(encoder, SOURCE),
            "ids must hold no padding here, got pad_token_id=0",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_a_map_may_be_wider_than_high(tmp_path):
    path = tmp_path / "map.png"
    weights = np.full((1, 2, 3, 5), 0.2)
    figures.plot_attention(weights, list("abc"), path, key_labels=list("vwxyz"))
    assert path.read_bytes()[:4] == b"\x89PNG"
