"""Tests of keras_tinygpt.models.ngram."""

import doctest
from collections import Counter

import numpy as np
import pytest
from helpers import tiny_shakespeare
from hypothesis import given
from hypothesis import strategies as st

from keras_tinygpt.models import ngram
from keras_tinygpt.models.ngram import NGram
from keras_tinygpt.text import CharTokenizer, encode_corpus, load_corpus, split_ids


def counted_nats(train, test, order, k, vocab_size) -> float:
    """The definition, one token at a time."""
    ends = range(order, len(train) + 1)
    grams = Counter(tuple(train[end - order : end]) for end in ends)
    contexts = Counter(tuple(train[end - order : end - 1]) for end in ends)
    losses = []
    for end in range(order, len(test) + 1):
        gram = tuple(test[end - order : end])
        joint, context = grams[gram] + k, contexts[gram[:-1]] + k * vocab_size
        losses.append(-np.log(joint / context))
    return float(np.mean(losses))


def test_docstring_examples():
    assert doctest.testmod(ngram).failed == 0


def test_values_by_hand():
    train = [0, 1, 0, 1, 2, 0, 1]  # 01 three times, 10, 12 and 20 once
    model = NGram(order=2, k=0.5, vocab_size=3).fit(train)
    seen, unseen = (3 + 0.5) / (3 + 1.5), (0 + 0.5) / (2 + 1.5)
    assert model.nats([0, 1]) == pytest.approx(-np.log(seen))
    assert model.nats([0, 1, 1]) == pytest.approx(-np.log(seen * unseen) / 2)
    unigram = NGram(order=1, k=1, vocab_size=3).fit(train)
    assert unigram.nats([2]) == pytest.approx(-np.log((1 + 1) / (7 + 3)))


@given(
    ids=st.lists(st.integers(0, 4), min_size=16, max_size=47),
    order=st.integers(1, 8),
    k=st.sampled_from([0.01, 0.5, 3.0]),
)
def test_the_definition(ids, order, k):
    train, test = ids[:-8], ids[-8:]
    expected = counted_nats(train, test, order, k, 5) if len(train) >= order else None
    if expected is None:
        return
    found = NGram(order, k, 5).fit(train).nats(np.array(test, np.uint8))
    assert found == pytest.approx(expected, rel=1e-12)


def test_codes_too_long_for_64_bits():
    random = np.random.default_rng(0)
    ids = random.integers(0, 7, 4001) * 571  # 4000 ** 8 is about 2 ** 96
    for order in (6, 8):
        model = NGram(order, 0.1, 4000).fit(ids[:3000])
        expected = counted_nats(ids[:3000], ids[2000:], order, 0.1, 4000)
        assert model.nats(ids[2000:]) == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one():
    model = NGram(3, 0.1, 5).fit(np.random.default_rng(0).integers(0, 5, 97))
    for context in ([0, 1], [4, 4]):
        total = sum(np.exp(-model.nats([*context, token])) for token in range(5))
        assert total == pytest.approx(1.0)
    assert NGram(3, 0.1, 5).fit([0, 0, 0]).nats([1, 1, 2]) == pytest.approx(np.log(5))


def test_long_ids_are_scored_in_chunks(monkeypatch):
    ids = np.random.default_rng(0).integers(0, 5, 97)
    model = NGram(3, 0.1, 5).fit(ids)
    whole = model.nats(ids)
    monkeypatch.setattr(ngram, "_CHUNK_TOKENS", 13)
    assert model.nats(ids) == pytest.approx(whole, rel=1e-12)


def test_fit_forgets():
    first, second = np.array([0, 1, 0, 1]), np.array([1, 1, 0, 0])
    twice = NGram(2, 0.5, 2).fit(first).fit(second)
    assert twice.nats(first) == NGram(2, 0.5, 2).fit(second).nats(first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": 0}, "order must be at least 1, got 0"),
        ({"order": 2.0}, "order must be an integer"),
        ({"k": 0.0}, r"k must be a finite number in \(0, inf\), got 0.0"),
        ({"k": -0.1}, "k must be a finite number"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        NGram(**{"order": 3, "k": 0.1, "vocab_size": 5, **arguments})


def test_bad_ids():
    model = NGram(3, 0.1, 5)
    with pytest.raises(RuntimeError, match="fit must be called before nats"):
        model.nats([0, 1, 2])
    for method in (model.fit, model.fit([0, 1, 2]).nats):
        with pytest.raises(ValueError, match="ids must lie between 0 and 4 .* got 5"):
            method([0, 1, 5])
        with pytest.raises(ValueError, match="got -1 at index 2"):
            method([0, 1, -1])
        with pytest.raises(ValueError, match="ids has 2 tokens, at least 3 are needed"):
            method([0, 1])
        with pytest.raises(ValueError, match="ids has 0 tokens"):
            method([])
        with pytest.raises(ValueError, match="one-dimensional integer array"):
            method([0.0, 1.0, 2.0])


def test_the_published_values():
    corpus = load_corpus(tiny_shakespeare())
    tokenizer = CharTokenizer.from_text(corpus)
    ids = encode_corpus(corpus, tokenizer)
    train, valid, test = split_ids(ids, counts=(1_000_000, 55_000, 60_394))
    trigram = NGram(3, 0.1, tokenizer.vocab_size).fit(train)
    assert f"{trigram.nats(test):.4f}" == "2.0859"
    fivegram = NGram(5, 0.01, tokenizer.vocab_size).fit(train)
    assert f"{fivegram.nats(test):.4f}" == "1.8327"
    # With the end of the validation part as context, every test token is scored.
    assert f"{trigram.nats(ids[-len(test) - 2 :]):.4f}" == "2.0859"
    assert f"{fivegram.nats(ids[-len(test) - 4 :]):.4f}" == "1.8326"
