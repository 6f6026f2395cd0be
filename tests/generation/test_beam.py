"""Beam search against greedy decoding and against trying everything."""

import itertools

import numpy as np
import pytest
from keras import ops

import keras_tinygpt as tg

pytestmark = pytest.mark.backend

VOCAB, WINDOW = 5, 7


@pytest.fixture(scope="module", params=["gpt", "lstm"])
def model(request):
    if request.param == "gpt":
        model = tg.build_gpt(tg.GPTConfig(VOCAB, WINDOW, 2, 2, hidden_dim=12), seed=5)
    else:
        model = tg.build_lstm(tg.LSTMConfig(VOCAB, hidden_dim=11), seed=5)
    kernel = model.get_layer("head").kernel
    kernel.assign(kernel * 40)
    return model


def score(model, prompt, continuation):
    tokens = np.array([[*prompt, *continuation]], "int32")
    logits = model(ops.convert_to_tensor(tokens[:, :-1]))
    steps = ops.convert_to_numpy(ops.log_softmax(logits))[0, len(prompt) - 1 :]
    return steps[np.arange(len(continuation)), continuation].sum()


def test_one_beam_is_greedy(model):
    tokens, _ = tg.beam_search(model, [1, 2], 11, num_beams=1)
    greedy = tg.generate(model, [1, 2], 11, temperature=0.0)
    np.testing.assert_array_equal(tokens, greedy)


def test_enough_beams_find_the_best(model):
    every = itertools.product(range(VOCAB), repeat=3)
    exact = {continuation: score(model, [3, 1], continuation) for continuation in every}
    tokens, found = tg.beam_search(model, [3, 1], 3, num_beams=VOCAB**2)
    assert tuple(tokens[2:]) == max(exact, key=exact.get)
    assert found == pytest.approx(max(exact.values()), abs=1e-4)


def test_more_beams_than_tokens_and_a_long_prompt(model):
    prompt = [0, 1, 2, 3, 4, 3, 2, 1, 0]
    tokens, found = tg.beam_search(model, prompt, 4, num_beams=9)
    assert tokens[: len(prompt)].tolist() == prompt
    assert np.isfinite(found)


def test_errors(model):
    with pytest.raises(ValueError, match="num_beams must be at least 1, got 0"):
        tg.beam_search(model, [1], 3, num_beams=0)
    with pytest.raises(ValueError, match="prompt_ids must hold at least 1 token"):
        tg.beam_search(model, [], 3)
