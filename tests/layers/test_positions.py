"""Tests of keras_tinygpt.layers.positions."""

import functools
import math
import re

import keras
import numpy as np
import pytest
from helpers import (
    check_layer,
    normal,
    reference_rotation,
    reference_slopes,
    to_numpy,
)
from keras import ops

from keras_tinygpt.layers import (
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    alibi_bias,
    alibi_slopes,
)

pytestmark = pytest.mark.backend

ADDED = [functools.partial(LearnedPositions, 11), SinusoidalPositions]


def sinusoid_table(length, dim, **options) -> np.ndarray:
    layer = SinusoidalPositions(**options)
    return to_numpy(layer(np.zeros((1, length, dim), "float32")))[0]


@pytest.mark.parametrize(
    ("make_layer", "input_shape", "num_parameters"),
    [
        (functools.partial(LearnedPositions, 11), (2, 5, 7), 11 * 7),
        (functools.partial(SinusoidalPositions, 100.0), (2, 5, 14), 0),
        (functools.partial(RotaryPositions, 100.0), (2, 5, 3, 14), 0),
    ],
)
def test_layer(make_layer, input_shape, num_parameters, tmp_path):
    check_layer(make_layer, input_shape, num_parameters=num_parameters, path=tmp_path)


def test_sinusoids_by_hand():
    sin, cos = math.sin, math.cos
    expected = [
        [0, 1, 0, 1],
        [sin(1), cos(1), sin(0.01), cos(0.01)],
        [sin(2), cos(2), sin(0.02), cos(0.02)],
    ]
    np.testing.assert_allclose(sinusoid_table(3, 4), expected, atol=1e-7)


@pytest.mark.parametrize(("dim", "norm"), [(32, 4.0), (14, math.sqrt(7)), (2, 1.0)])
def test_each_sinusoid_row_has_the_same_norm(dim, norm):
    norms = np.linalg.norm(sinusoid_table(101, dim), axis=1)
    np.testing.assert_allclose(norms, norm, rtol=1e-6)


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_a_sinusoid_offset_is_a_rotation(offset):
    """PE(t + k) = R(k) PE(t), one 2 x 2 rotation per frequency."""
    table = sinusoid_table(19, 32).reshape(19, 16, 2)
    angles = offset * 10000.0 ** (-np.arange(16) / 16)
    sin, cos = np.sin(angles), np.cos(angles)
    rotation = np.array([[cos, sin], [-sin, cos]])  # (2, 2, D / 2)
    rotated = np.einsum("abj,tjb->tja", rotation, table[:-offset])
    np.testing.assert_allclose(rotated, table[offset:], atol=1e-6)


@pytest.mark.parametrize("layer_class", [SinusoidalPositions, RotaryPositions])
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16", "float16"])
def test_angles_are_float32_under_every_policy(layer_class, dtype):
    """Rounding to the low type comes last, so positions 257 and 258 stay apart."""
    x = np.ones((1, 2, 1, 32), "float32")
    x = x[:, :, 0] if layer_class is SinusoidalPositions else x
    low = to_numpy(layer_class(dtype=dtype)(x, start_index=257))
    full = to_numpy(layer_class()(x, start_index=257))
    assert np.abs(low[:, 0] - low[:, 1]).max() > 0.5
    np.testing.assert_allclose(low, full, atol=0.02)


def test_rotation_by_hand():
    """A quarter turn of the pair (coordinate 0, coordinate 1) at position pi / 2."""
    layer = RotaryPositions()
    turned = layer(np.array([[[[1.0, 0.0]], [[0.0, 2.0]]]], "float32"))
    expected = [[1, 0], [-2 * math.sin(1), 2 * math.cos(1)]]
    np.testing.assert_allclose(to_numpy(turned)[0, :, 0], expected, atol=1e-6)


def test_rotation_is_a_product_of_complex_numbers():
    x = normal(2, 7, 3, 10)
    outputs = to_numpy(RotaryPositions()(x, start_index=5))
    np.testing.assert_allclose(outputs, reference_rotation(x, 5), atol=3e-6)


def test_rotation_keeps_norms_and_leaves_position_zero():
    x = normal(2, 101, 3, 10)
    outputs = to_numpy(RotaryPositions()(x))
    np.testing.assert_array_equal(outputs[:, 0], x[:, 0])
    norms = [np.linalg.norm(values, axis=-1) for values in (outputs, x)]
    np.testing.assert_allclose(*norms, rtol=1e-6)


def test_rotated_scores_depend_on_the_distance_alone():
    layer, (query, key) = RotaryPositions(), normal(2, 1, 1, 1, 10)

    def score(i, j):
        return np.sum(
            to_numpy(layer(query, start_index=i)) * to_numpy(layer(key, start_index=j))
        )

    for distance in (-3, 0, 2, 11):
        scores = [score(start + distance, start) for start in (3, 17, 40)]
        np.testing.assert_allclose(scores, scores[0], atol=2e-5)
    assert abs(score(5, 3) - score(5, 2)) > 0.01


@pytest.mark.parametrize("make_layer", [*ADDED, RotaryPositions])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_later_start_is_the_tail_of_the_whole(make_layer, as_tensor):
    x = normal(2, 7, 3, 4) if make_layer is RotaryPositions else normal(2, 7, 4)
    layer = make_layer()
    start = ops.convert_to_tensor(4, "int32") if as_tensor else 4
    tail = to_numpy(layer(x[:, 4:], start_index=start))
    np.testing.assert_allclose(tail, to_numpy(layer(x))[:, 4:], atol=1e-6)


@pytest.mark.parametrize("make_layer", ADDED)
def test_left_padding_takes_no_position(make_layer):
    x = normal(3, 7, 4)
    layer = make_layer()
    offsets = np.array([0, 2, 5], "int32")
    outputs = to_numpy(layer(x, row_offsets=offsets))
    for row, offset in enumerate(offsets):
        alone = to_numpy(layer(x[row : row + 1, offset:]))
        np.testing.assert_allclose(outputs[row : row + 1, offset:], alone, atol=1e-6)


def test_learned_positions_add_their_table():
    layer = LearnedPositions(11)
    x = normal(2, 5, 7)
    outputs = to_numpy(layer(x))
    table = to_numpy(layer.embeddings)
    np.testing.assert_allclose(outputs, x + table[:5], atol=1e-6)
    assert table.std() < 0.03


def test_a_longer_learned_table_costs_one_row_a_position():
    sizes = []
    for length in (128, 256):
        layer = LearnedPositions(length)
        layer.build((None, None, 128))
        sizes.append(layer.count_params())
    assert sizes[1] - sizes[0] == 16_384


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_sequence_longer_than_the_learned_table(symbolic):
    x = keras.KerasTensor((2, 12, 7)) if symbolic else normal(2, 12, 7)
    message = "sequence length must be at most max_sequence_length=11, got 12"
    with pytest.raises(ValueError, match=message):
        LearnedPositions(11)(x)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 17])
def test_alibi_slopes_are_those_of_the_paper(num_heads):
    slopes = alibi_slopes(num_heads)
    np.testing.assert_allclose(slopes, reference_slopes(num_heads), rtol=1e-6)
    assert slopes.dtype == "float32" and len(slopes) == num_heads


def test_alibi_by_hand():
    """Eight heads have slopes 1/2, 1/4, ... 1/256."""
    bias = to_numpy(alibi_bias(np.arange(3), np.arange(3), 8))
    assert bias.shape == (8, 3, 3)
    penalty = [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]]
    np.testing.assert_array_equal(bias[0], penalty)
    np.testing.assert_array_equal(bias[7], bias[0] / 128)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearnedPositions(0), "max_sequence_length must be at least 1, got 0"),
        (lambda: LearnedPositions(1.5), "max_sequence_length must be an integer"),
        (
            lambda: SinusoidalPositions(0),
            "max_wavelength must be .* in (0, inf), got 0",
        ),
        (lambda: RotaryPositions(-1.0), "max_wavelength must be .*, got -1.0"),
        (lambda: RotaryPositions("a"), "max_wavelength must be a number, got 'a'"),
        (lambda: alibi_slopes(0), "num_heads must be at least 1, got 0"),
        (
            lambda: SinusoidalPositions()(np.zeros((2, 5, 7))),
            "sinusoidal positions need an even width (hidden_dim), got 7",
        ),
        (
            lambda: RotaryPositions()(np.zeros((2, 5, 3, 7))),
            "rotary positions need an even head_dim, got 7",
        ),
    ],
)
def test_bad_arguments(make, message):
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(ValueError, match=pattern):
        make()


def test_inputs_of_the_wrong_rank():
    with pytest.raises(ValueError, match=r"shape \(B, T, N, H\), got \(2, 5, 6\)"):
        RotaryPositions()(ops.ones((2, 5, 6)))
    for layer in (SinusoidalPositions(), LearnedPositions(max_sequence_length=7)):
        with pytest.raises(ValueError, match=r"shape \(B, T, D\), got \(5, 6\)"):
            layer(ops.ones((5, 6)))
