"""Filters and draws on known logits, against exact probabilities."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tinygpt.generation import sampling
from keras_tinygpt.generation.sampling import (
    SamplingConfig,
    draw_uniforms,
    filter_logits,
    log_probabilities,
    sample,
)

pytestmark = pytest.mark.backend


WAYS = [sampling.SMALL_VOCAB, 0]
if keras.backend.backend() != "tensorflow":  # the same operations, compiled one by one
    WAYS = WAYS[:1]


@pytest.fixture(autouse=True, params=WAYS)
def both_ways_to_select(request, monkeypatch):
    """Every test runs on pairs of tokens and on sorted ones."""
    monkeypatch.setattr(sampling, "SMALL_VOCAB", request.param)


PROBS = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])


def draw(logits, uniforms, seen=None, **settings):
    logits = np.broadcast_to(logits, (len(uniforms), np.shape(logits)[-1]))
    seen = np.zeros(logits.shape, "bool") if seen is None else seen
    config = SamplingConfig(**{"temperature": 1.0, **settings})
    tokens = sample(
        ops.convert_to_tensor(logits),
        ops.convert_to_tensor(seen),
        ops.convert_to_tensor(np.asarray(uniforms, "float32")),
        config.tensors(logits.shape[-1]),
    )
    return ops.convert_to_numpy(tokens)


def kept(logits, **settings):
    logits = np.asarray(logits, "float32")[None]
    config = SamplingConfig(**{"temperature": 1.0, **settings})
    _, keep = filter_logits(
        ops.convert_to_tensor(logits),
        ops.convert_to_tensor(np.zeros(logits.shape, "bool")),
        config.tensors(logits.shape[-1]),
    )
    return np.flatnonzero(ops.convert_to_numpy(keep)[0]).tolist()


def test_inverse_cdf_by_hand():
    # CDF of PROBS: .5, .75, .875, .9375, 1.
    uniforms = [0.0, 0.49, 0.51, 0.74, 0.76, 0.88, 0.94, 0.9999999]
    expected = [0, 0, 1, 1, 2, 3, 4, 4]
    assert draw(np.log(PROBS), uniforms).tolist() == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_exact_probabilities(temperature):
    # 20,000 draws: a frequency is off by 5 standard deviations (0.018) with
    # probability below 6e-7 per token; the uniforms are fixed anyway.
    uniforms = draw_uniforms([7], 20_000)[0]
    tokens = draw(np.log(PROBS), uniforms, temperature=temperature)
    exact = PROBS ** (1 / temperature)
    exact /= exact.sum()
    found = np.bincount(tokens, minlength=5) / len(tokens)
    assert np.abs(found - exact).max() < 0.018


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-8, [0]),
        (0.499, [0]),
        (0.501, [0, 1]),
        (0.749, [0, 1]),
        (0.751, [0, 1, 2]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(top_p, expected):
    assert kept(np.log(PROBS), top_p=top_p) == expected


def test_top_p_at_an_exact_boundary():
    # Powers of two: the cumulative sums are exact in float32.
    assert kept(np.log2(PROBS) * np.log(2), top_p=0.5) in ([0], [0, 1])
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0, 1]


@pytest.mark.parametrize("top_k", [1, 3, 5, 1000])
def test_top_k(top_k):
    assert kept(np.log(PROBS), top_k=top_k) == list(range(min(top_k, 5)))


def test_ties_keep_the_smallest_ids():
    assert kept([1.0, 3.0, 3.0, 3.0, 0.0], top_k=2) == [1, 2]
    assert kept([0.0] * 7, top_k=1) == [0]


def test_min_p_is_relative_to_the_largest():
    assert kept(np.log(PROBS), min_p=0.3) == [0, 1]
    assert kept(np.log(PROBS), min_p=1.0) == [0]
    assert kept(np.log(PROBS), min_p=0.0) == [0, 1, 2, 3, 4]


def test_filters_apply_one_after_another():
    # top_k first leaves .5, .25 -> 2/3, 1/3; then top_p=.6 leaves the first alone.
    assert kept(np.log(PROBS), top_k=2, top_p=0.6) == [0]
    # Allowed tokens first: of the rest token 2 is the most probable.
    assert kept(np.log(PROBS), allowed_tokens=[2, 4], top_k=1) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("logits", [[0.0] * 11, [50.0] + [-50.0] * 10])
def test_extreme_temperatures_and_logits(logits, temperature):
    uniforms = np.linspace(0, 0.999, 13)
    tokens = draw(logits, uniforms, temperature=temperature)
    if logits[0] == 50.0 and temperature <= 1.0 or temperature == 0.0:
        assert (tokens == 0).all()
    else:
        expected = np.floor(uniforms * 11)
        assert (np.abs(tokens - expected) <= (temperature == 1e6)).all()


def test_repetition_penalty_by_hand():
    seen = np.array([[True, False, True, False]])
    # 3/2 = 1.5 and -1 * 2 = -2: token 1 (logit 2) becomes the most probable.
    logits = [3.0, 2.0, -1.0, 0.0]
    assert draw(logits, [0.0], seen, temperature=0.0).tolist() == [0]
    tokens = draw(logits, [0.0], seen, temperature=0.0, repetition_penalty=2.0)
    assert tokens.tolist() == [1]


def test_never_an_excluded_token():
    rng = np.random.default_rng(3)
    for vocab_size in (2, 17, 600):
        logits = rng.normal(0, 5, (31, vocab_size)).astype("float32")
        tokens = draw(
            logits,
            rng.random(31),
            top_k=5,
            top_p=0.9,
            allowed_tokens=[1, vocab_size - 1],
        )
        assert set(tokens.tolist()) <= {1, vocab_size - 1}


def test_a_cumulative_sum_that_falls_in_its_last_bit(monkeypatch):
    """As sums by matrix products do, at tokens of no weight."""
    falling = np.array([[0.5, 0.4999, 1.0]], "float32")
    monkeypatch.setattr(
        sampling, "cumulative_sum", lambda values: ops.convert_to_tensor(falling)
    )
    tokens = [
        draw(np.log([0.5, 0.3, 0.5]), [uniform], allowed_tokens=[0, 2]).item()
        for uniform in (0.4998, 0.49995, 0.5)
    ]
    assert tokens == [0, 0, 2]


def test_a_large_vocabulary_and_half_precision():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1, (2, 50_257)).astype("float16")
    tokens = draw(logits, [0.3, 0.999], top_k=40, top_p=0.95)
    order = np.argsort(-logits.astype("float32"), axis=1, kind="stable")[:, :40]
    assert all(token in row for token, row in zip(tokens, order, strict=True))


def test_a_vocabulary_of_one():
    assert draw([2.0], [0.7], top_k=3, top_p=0.1).tolist() == [0]


def test_uniforms_depend_on_the_row_seed_alone():
    both = draw_uniforms([3, 5], 11)
    np.testing.assert_array_equal(both[1], draw_uniforms([5], 11)[0])
    np.testing.assert_array_equal(both[:, :7], draw_uniforms([3, 5], 7))
    assert both.dtype == np.float32
    assert 0 <= both.min() and both.max() < 1


def test_log_probabilities():
    logits = ops.convert_to_tensor(np.log(PROBS)[None].astype("float32"))
    score = log_probabilities(logits, ops.convert_to_tensor([2], "int32"))
    assert float(score[0]) == pytest.approx(np.log(0.125), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a finite number in .*-0.1"),
        ({"temperature": float("nan")}, "temperature must be .*nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"top_p": 0.0}, r"top_p must be .*\(0, 1\], got 0.0"),
        ({"top_p": 1.1}, "top_p must be .*1.1"),
        ({"min_p": -1e-9}, "min_p must be"),
        ({"repetition_penalty": 0.9}, "repetition_penalty must be .*0.9"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**settings)


@pytest.mark.parametrize("allowed", [[], [0, 5], [-1], [0.5]])
def test_bad_allowed_tokens(allowed):
    with pytest.raises(ValueError, match="allowed_tokens must"):
        SamplingConfig(allowed_tokens=allowed).tensors(5)
