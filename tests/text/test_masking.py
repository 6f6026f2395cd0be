"""Tests of keras_tinygpt.text.masking and keras_tinygpt.generation.filling."""

import keras
import numpy as np
import pytest

import keras_tinygpt as tg
from keras_tinygpt.text import hide_tokens

V, MASK, T = 11, 10, 7


def generator(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def test_what_becomes_of_the_chosen_tokens():
    """15 % are chosen; of these 80 % are masked, 10 % replaced, 10 % left.

    The shares of n = 200,000 draws lie within five standard deviations; each of the
    four misses once in 1.7 million runs.
    """
    tokens = generator(1).integers(0, MASK, (400, 500))
    inputs, weights = hide_tokens(tokens, V, MASK, generator())
    assert (inputs.dtype, weights.dtype) == ("int32", "float32")
    chosen = weights == 1.0
    assert set(np.unique(weights)) == {0.0, 1.0}
    assert np.all(inputs[~chosen] == tokens[~chosen])
    masked = inputs[chosen] == MASK
    # Of the replaced ones a tenth get the token that stood there before.
    changed = ~masked & (inputs[chosen] != tokens[chosen])
    for found, share, count in (
        (chosen.mean(), 0.15, tokens.size),
        (masked.mean(), 0.8, chosen.sum()),
        (changed.mean(), 0.1 * 0.9, chosen.sum()),
        (np.mean(inputs[chosen] == tokens[chosen]), 0.11, chosen.sum()),
    ):
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / count)
    replaced = inputs[chosen][changed]
    assert set(np.unique(replaced)) == set(range(MASK))


def test_a_mask_may_have_any_id():
    tokens = generator(1).integers(1, V, (50, 40))
    inputs, weights = hide_tokens(tokens, V, 0, generator(), mask_rate=1.0)
    assert weights.all() and set(np.unique(inputs)) == set(range(V))


def make_dataset(**changes):
    ids = np.arange(60) % MASK
    starts = np.array([[0, 5], [11, 2], [7, 9]])
    return tg.MaskedWindowDataset(ids, starts, T, V, MASK, **changes)


def test_items_depend_on_seed_and_step_alone():
    dataset = make_dataset(mask_rate=0.5)
    assert len(dataset) == 3
    inputs, targets, weights = dataset[1]
    assert inputs.shape == targets.shape == weights.shape == (2, T)
    assert targets.tolist() == [
        [(start + i) % MASK for i in range(T)] for start in (11, 2)
    ]
    for other in (make_dataset(mask_rate=0.5), dataset):
        np.testing.assert_array_equal(other[1][0], inputs)
    resumed = make_dataset(mask_rate=0.5, start_step=1)
    assert len(resumed) == 2
    np.testing.assert_array_equal(resumed[0][0], inputs)
    # 14 draws at one half are equal once in 16,384 runs, but these seeds are fixed.
    assert np.any(make_dataset(mask_rate=0.5, seed=1)[1][2] != weights)
    assert np.any(dataset[0][2] != weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_rate": 0.0}, "mask_rate must be a finite number in"),
        ({"mask_rate": 1.5}, "mask_rate must be a finite number in"),
        ({"seed": -1}, "seed must be between 0 and"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make_dataset(**options)


def test_bad_ids_of_the_mask():
    with pytest.raises(ValueError, match="mask_token_id must be between 0 and 10"):
        tg.MaskedWindowDataset(np.arange(9), np.array([[0]]), T, V, V)
    with pytest.raises(ValueError, match="vocab_size must be at least 2, got 1"):
        tg.MaskedWindowDataset(np.arange(9), np.array([[0]]), T, 1, 0)


def small(**options):
    return tg.build_encoder(tg.EncoderConfig(V, T, 1, 2, hidden_dim=24, **options))


@pytest.mark.backend
def test_a_model_learns_to_fill_what_both_sides_tell():
    """In 0 1 2 .. 9 0 1 .. any neighbour gives a hidden token away."""
    model = small(positions="rotary")
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    ids = np.arange(999) % MASK
    starts = tg.window_schedule(len(ids), T, steps=250, batch_size=32)
    model.fit(tg.MaskedWindowDataset(ids, starts, T, V, MASK), shuffle=False, verbose=0)
    text = np.array([3, 4, 5, 6, 7, 8, 9])
    for hidden in (1, 3, 6):
        asked = text.copy()
        asked[hidden] = MASK
        filled = tg.fill_masks(model, asked, MASK)
        assert filled.tolist() == text.tolist() and filled.dtype == np.int32


@pytest.mark.backend
def test_the_mask_itself_is_never_put_in():
    model = small()
    model.get_layer("head").bias.assign(np.eye(V)[MASK] * 99.0)
    filled = tg.fill_masks(model, [1, MASK, 2, MASK], MASK)
    assert filled[[0, 2]].tolist() == [1, 2] and MASK not in filled


def test_filling_refuses_other_models():
    gpt = tg.build_gpt(tg.GPTConfig(V, T, 1, 2, hidden_dim=12))
    for model in (gpt, small(num_classes=3)):
        with pytest.raises(ValueError, match="must be an encoder with a head over"):
            tg.fill_masks(model, [1, MASK], MASK)
    with pytest.raises(ValueError, match="at most max_sequence_length=7 tokens, got 8"):
        tg.fill_masks(small(), [1] * 8, MASK)
    with pytest.raises(ValueError, match="mask_token_id must be between 0 and 10"):
        tg.fill_masks(small(), [1], 11)
    with pytest.raises(ValueError, match="ids must hold at least 1 tokens, got 0"):
        tg.fill_masks(small(), [], MASK)
