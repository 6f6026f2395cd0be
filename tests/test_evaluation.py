"""Every target once, whatever the method; values checked against a NumPy loop."""

import math

import keras
import numpy as np
import pytest

import keras_tinygpt as tg

pytestmark = pytest.mark.backend

VOCAB, WINDOW = 11, 7


def ids_of(length):
    return np.random.default_rng(length).integers(0, VOCAB, length).astype("uint8")


@pytest.fixture(scope="module")
def gpt():
    model = tg.build_gpt(tg.GPTConfig(VOCAB, WINDOW, 2, 2, hidden_dim=12), seed=3)
    model.get_layer("head").kernel.assign(model.get_layer("head").kernel * 30)
    return model


@pytest.fixture(scope="module")
def lstm():
    config = tg.LSTMConfig(
        VOCAB, hidden_dim=13, num_layers=2, max_sequence_length=WINDOW
    )
    model = tg.build_lstm(config, seed=3)
    model.get_layer("head").kernel.assign(model.get_layer("head").kernel * 10)
    return model


def nats_at(model, ids, start, target):
    """Loss of `ids[target]` given `ids[start:target]`."""
    window = keras.ops.convert_to_tensor(ids[None, start:target].astype("int32"))
    logits = keras.ops.convert_to_numpy(model(window))[0, -1].astype("float64")
    return np.log(np.exp(logits).sum()) - logits[ids[target]]


@pytest.mark.parametrize("length", [2, 5, 8, 9, 15, 22, 24])
@pytest.mark.parametrize("method", ["windows", "strided"])
def test_windowed_scores_equal_a_loop(gpt, method, length):
    ids = ids_of(length)
    stride = WINDOW if method == "windows" else WINDOW // 2
    size = min(WINDOW, length - 1)
    starts = [*range(0, length - 1 - size, stride), length - 1 - size]
    total, scored = 0.0, 1
    for start in starts:
        for target in range(max(scored, start + 1), start + size + 1):
            total += nats_at(gpt, ids, start, target)
            scored = target + 1
    assert scored == length
    scores = tg.evaluate(gpt, ids, method=method, batch_size=3)
    assert scores.tokens == length - 1
    assert scores.nats == pytest.approx(total / (length - 1), abs=1e-5)
    assert scores.perplexity == pytest.approx(math.exp(scores.nats))
    assert scores.bits_per_token == pytest.approx(scores.nats / math.log(2))


@pytest.mark.parametrize("length", [2, 30, 514, 1025])
def test_stateful_scores_equal_one_pass(lstm, length):
    ids = ids_of(length)
    window = keras.ops.convert_to_tensor(ids[None, :-1].astype("int32"))
    logits = keras.ops.convert_to_numpy(lstm(window))[0].astype("float64")
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(length - 1), ids[1:]]
    scores = tg.evaluate(lstm, ids, method="stateful")
    assert scores.tokens == length - 1
    assert scores.nats == pytest.approx(losses.mean(), abs=1e-5)


def test_windows_reset_the_state(lstm):
    ids = ids_of(15)
    total = sum(
        nats_at(lstm, ids, start, target)
        for start in (0, 7)
        for target in range(start + 1, start + 8)
    )
    scores = tg.evaluate(lstm, ids, method="windows")
    assert scores.nats == pytest.approx(total / 14, abs=1e-5)


def test_the_default_method_is_the_best_a_model_can_do(gpt, lstm):
    ids = ids_of(40)
    assert tg.evaluate(gpt, ids) == tg.evaluate(gpt, ids, method="strided")
    assert tg.evaluate(lstm, ids) == tg.evaluate(lstm, ids, method="stateful")


def test_dropout_is_off():
    config = tg.GPTConfig(VOCAB, WINDOW, 1, 2, hidden_dim=12, dropout=0.5)
    model = tg.build_gpt(config)
    assert tg.evaluate(model, ids_of(30)) == tg.evaluate(model, ids_of(30))


def test_an_untrained_model_scores_about_uniform():
    model = tg.build_gpt(tg.GPTConfig.preset("mini", VOCAB), seed=0)
    assert tg.evaluate(model, ids_of(300)).nats == pytest.approx(
        math.log(VOCAB), abs=0.05
    )


def test_errors(gpt):
    with pytest.raises(ValueError, match="ids must hold at least 2 tokens"):
        tg.evaluate(gpt, ids_of(1))
    with pytest.raises(ValueError, match="ids must hold at least 2 tokens, got 0"):
        tg.evaluate(gpt, np.zeros(0, "int32"))
    with pytest.raises(ValueError, match="sequence_length must be left out with meth"):
        tg.evaluate(
            tg.build_lstm(tg.LSTMConfig(VOCAB, 5)), ids_of(9), sequence_length=3
        )
    with pytest.raises(ValueError, match='"stateful" needs a model from build_lstm'):
        tg.evaluate(gpt, ids_of(9), method="stateful")
    with pytest.raises(ValueError, match="method must be one of"):
        tg.evaluate(gpt, ids_of(9), method="sliding")
    with pytest.raises(ValueError, match="got 11"):
        tg.evaluate(gpt, np.array([1, 11]))
    with pytest.raises(ValueError, match="sequence_length must be at most"):
        tg.evaluate(gpt, ids_of(30), sequence_length=9)
