"""The cached engine against the plain loop, and the plain loop against known logits."""

import gc
import weakref

import keras
import numpy as np
import pytest
from helpers import to_numpy
from keras import ops

import keras_tinygpt as tg
from keras_tinygpt.generation import decoding
from keras_tinygpt.generation.engine import get_engine
from keras_tinygpt.generation.recorded import record_operations
from keras_tinygpt.generation.sampling import BRANCHLESS_VOCAB
from keras_tinygpt.generation.steppers import make_stepper

pytestmark = pytest.mark.backend

VOCAB, WINDOW = 17, 13
CONFIGS = {
    "learned": {},
    "sinusoidal": {"positions": "sinusoidal", "scale_embeddings": True},
    "rotary": {
        "num_layers": 2,
        "positions": "rotary",
        "num_kv_heads": 2,
        "qk_norm": True,
    },
    "alibi": {"positions": "alibi", "attention_window": 5, "tie_embeddings": True},
    "none": {"positions": "none", "norm_position": "post", "normalization": "rms"},
}
GOLDEN_GPT = [1, 16, 15, 3, 5, 7, 13, 6, 6, 1, 4, 13, 12]
GOLDEN_GPT += [5, 7, 13, 7, 0, 14, 14, 10, 16, 0, 7, 6, 6]
GOLDEN_LSTM = [3, 15, 16, 5, 6, 7, 12, 6, 9, 1, 2, 11, 13]
GOLDEN_LSTM += [5, 6, 11, 6, 0, 14, 13, 12, 14, 0, 9, 3, 7]
real_run = decoding._run
GREEDY = {"temperature": 0.0}
DRAWN = {"seed": 5, "temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.01}


def sharpen(model, factor=20.0):
    """Makes an untrained model opinionated, so that close calls are rare."""
    for variable in model.weights:
        if variable.path.startswith(("head", "token_embedding")):
            variable.assign(variable * factor)
    return model


@pytest.fixture(scope="module")
def models():
    built = {
        name: sharpen(
            tg.build_gpt(
                tg.GPTConfig(
                    VOCAB, WINDOW, **{"num_layers": 1, "hidden_dim": 24, **changes}
                ),
                seed=1,
            )
        )
        for name, changes in CONFIGS.items()
    }
    built["lstm"] = sharpen(
        tg.build_lstm(tg.LSTMConfig(VOCAB, hidden_dim=19, num_layers=2), seed=1), 5.0
    )
    return built


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length)


class NextToken(keras.layers.Layer):
    """Logits that say: after token t comes t + 1, with probability almost 1."""

    def call(self, tokens):
        following = (tokens + 1) % VOCAB
        return 50.0 * ops.one_hot(following, VOCAB, dtype="float32")

    def compute_output_shape(self, input_shape):
        return (*input_shape, VOCAB)


@pytest.fixture(scope="module")
def counting_model():
    tokens = keras.Input((None,), dtype="int32")
    return keras.Model(tokens, NextToken()(tokens))


def test_plain_loop_on_known_logits(counting_model):
    tokens = tg.generate(counting_model, [3, 4], 7, use_cache=False)
    assert tokens.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("length", [None, 5])
def test_plain_loop_on_a_short_window_of_ones_own(length):
    tokens = keras.Input((length,), dtype="int32")
    hidden = keras.layers.Embedding(VOCAB, 8)(tokens)
    if length is None:
        hidden = tg.layers.LearnedPositions(5)(hidden)
    hidden = tg.layers.TransformerBlock(2)(hidden)
    model = keras.Model(tokens, keras.layers.Dense(VOCAB)(hidden))
    text = tg.generate(model, [1, 2, 3], 9, temperature=0.0, use_cache=False)
    for place in range(3, 12):
        view = text[max(0, place - 5) : place]
        padded = np.pad(view, (0, 5 - len(view)))[None]
        logits = ops.convert_to_numpy(model(padded))[0, len(view) - 1]
        assert text[place] == logits.argmax()
    with pytest.raises(ValueError, match="at most max_sequence_length=5 tokens"):
        tg.generate(model, range(6), 1, context="stop", use_cache=False)


def test_stop_sequences_end_before_themselves(counting_model):
    stopped = tg.generate(
        counting_model, [3], 9, use_cache=False, stop=[[7, 8], [9, 11]]
    )
    assert stopped.tolist() == [3, 4, 5, 6]
    rows = tg.generate(counting_model, [[3], [6, 7]], 5, use_cache=False, stop=[[5, 6]])
    assert [row.tolist() for row in rows] == [[3, 4], [6, 7, 8, 9, 10, 11, 12]]


def test_stream_holds_back_what_may_begin_a_stop(counting_model):
    pieces = [
        piece.tolist()
        for piece in tg.stream(
            counting_model, [3], 9, use_cache=False, stop=[[6, 7], [8, 9, 10]]
        )
    ]
    assert pieces == [[4], [5]]
    pieces = tg.stream(counting_model, [3], 4, use_cache=False, stop=[[6, 11]])
    assert [piece.tolist() for piece in pieces] == [[4], [5], [6, 7]]


def test_a_held_back_end_is_not_lost(counting_model):
    pieces = tg.stream(counting_model, [3], 3, use_cache=False, stop=[[6, 7]])
    assert np.concatenate(list(pieces)).tolist() == [4, 5, 6]


@pytest.mark.parametrize("name", [*CONFIGS, "lstm"])
@pytest.mark.parametrize("context", ["crop", "slide", "stop"])
def test_cached_equals_plain(models, name, context):
    lengths = (1, WINDOW - 1, WINDOW)
    if context != "stop":
        lengths = (*lengths, WINDOW + 1, 3 * WINDOW)
    for length in lengths:
        for settings in (GREEDY, DRAWN):
            arguments = (models[name], prompt(length), WINDOW + 4)
            cached = tg.generate(*arguments, context=context, **settings)
            plain = tg.generate(
                *arguments, context=context, use_cache=False, **settings
            )
            np.testing.assert_array_equal(cached, plain)
            pieces = tg.stream(*arguments, context=context, **settings)
            np.testing.assert_array_equal(
                cached, np.concatenate([prompt(length), *pieces])
            )


@pytest.mark.parametrize("name", ["learned", "rotary", "lstm"])
@pytest.mark.parametrize("context", ["crop", "slide"])
def test_each_row_equals_its_prompt_alone(models, name, context):
    prompts = [prompt(length, seed=length) for length in (1, 5, WINDOW, WINDOW + 4)]
    rows = tg.generate(models[name], prompts, 2 * WINDOW, seed=3, context=context)
    for index, row in enumerate(rows):
        alone = tg.generate(
            models[name], prompts[index], 2 * WINDOW, seed=3 + index, context=context
        )
        np.testing.assert_array_equal(row, alone)


@pytest.mark.parametrize("name", ["alibi", "lstm"])
def test_threads_share_the_rows_of_a_large_batch(models, name, monkeypatch):
    prompts = [prompt(1 + length % 7, seed=length) for length in range(11)]
    arguments = (models[name], prompts, WINDOW + 3)
    expected = tg.generate(*arguments, seed=4)
    monkeypatch.setattr(decoding, "ROWS_PER_WORKER", 3)
    monkeypatch.setattr(decoding, "CORES", 3)
    asked = []
    monkeypatch.setattr(decoding, "_run", lambda *a: asked.append(a) or real_run(*a))
    for row, alone in zip(tg.generate(*arguments, seed=4), expected, strict=True):
        np.testing.assert_array_equal(row, alone)
    sizes = [len(request.prompts) for _, request, _ in asked]
    assert sizes == ([11] if keras.backend.backend() == "torch" else [4, 4, 4])


def test_one_seed_gives_one_text_on_every_backend():
    """Recorded on TensorFlow; weights and draws are equal on every backend."""
    model = sharpen(tg.build_gpt(tg.GPTConfig(VOCAB, WINDOW, 2, 2, hidden_dim=16)), 5.0)
    tokens = tg.generate(model, [1, 2, 3], 2 * WINDOW, seed=7, top_k=9, top_p=0.95)
    assert tokens.tolist()[3:] == GOLDEN_GPT
    model = sharpen(tg.build_lstm(tg.LSTMConfig(VOCAB, hidden_dim=16)), 5.0)
    tokens = tg.generate(model, [1, 2, 3], 2 * WINDOW, seed=7, min_p=0.05)
    assert tokens.tolist()[3:] == GOLDEN_LSTM


@pytest.mark.parametrize("name", [*CONFIGS, "lstm"])
def test_step_logits_equal_a_full_forward_pass(models, name):
    model, tokens = models[name], prompt(WINDOW)[None].astype("int32")
    full = ops.convert_to_numpy(model(ops.convert_to_tensor(tokens)))
    stepper, offsets = make_stepper(model), ops.convert_to_tensor([0], "int32")
    state = stepper.initial_state(1)

    def step(piece, index, last):
        return stepper(
            ops.convert_to_tensor(piece),
            ops.convert_to_tensor(index, "int32"),
            ops.convert_to_tensor(last, "int32"),
            offsets,
            state,
        )

    padded = np.pad(tokens[:, :6], ((0, 0), (0, stepper.chunk - 6)))
    logits, state = step(padded, 0, 5)
    np.testing.assert_allclose(ops.convert_to_numpy(logits), full[:, 5], atol=1e-4)
    for place in range(6, WINDOW):
        logits, state = step(tokens[:, place : place + 1], place, 0)
        np.testing.assert_allclose(
            ops.convert_to_numpy(logits), full[:, place], atol=1e-4
        )


def test_stop_context_ends_with_the_window(models):
    tokens = tg.generate(models["learned"], prompt(5), 50, context="stop")
    assert len(tokens) == WINDOW + 1
    with pytest.raises(ValueError, match="at most max_sequence_length=13 tokens"):
        tg.generate(models["learned"], prompt(WINDOW + 1), 5, context="stop")


def test_new_settings_compile_nothing(models):
    if keras.backend.backend() == "torch":
        pytest.skip("PyTorch runs eagerly")
    model = models["rotary"]
    tg.generate(model, prompt(3), 2 * WINDOW)
    engine = get_engine(model)
    before = dict(engine.traces)
    for seed, (length, new, top_k, top_p, temperature) in enumerate(
        [(1, 30, None, None, 1.0), (9, 3, 4, None, 0.0), (40, 20, 1, 0.5, 2.0)]
    ):
        tg.generate(
            model,
            prompt(length),
            new,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            repetition_penalty=1.5,
            allowed_tokens=[1, 2, 3, seed],
        )
    assert engine.traces == before


def test_a_callable_limits_each_step(models):
    def alternate(tokens):
        return [1, 2] if tokens[-1] > 2 else [3, 4]

    settings = {"allowed_tokens": alternate, "seed": 2}
    for context in ("crop", "slide"):
        arguments = (models["learned"], [5], 2 * WINDOW)
        cached = tg.generate(*arguments, context=context, **settings)
        assert all(token in (1, 2) for token in cached[1::2])
        assert all(token in (3, 4) for token in cached[2::2])
        plain = tg.generate(*arguments, context=context, use_cache=False, **settings)
        np.testing.assert_array_equal(cached, plain)


def test_a_logits_processor_is_applied(models):
    def only_three(logits):
        return logits + 1000.0 * ops.one_hot(3, VOCAB, dtype=logits.dtype)

    tokens = tg.generate(models["learned"], [5], 4, logits_processor=only_three)
    assert tokens.tolist() == [5, 3, 3, 3, 3]


def test_log_probabilities_of_the_chosen_tokens(models):
    model = models["learned"]
    tokens, scores = tg.generate(
        model, prompt(4), 8, seed=1, return_log_probabilities=True
    )
    logits = model(ops.convert_to_tensor(tokens[None, :-1]))
    exact = ops.convert_to_numpy(ops.log_softmax(logits, axis=-1))[0]
    expected = exact[np.arange(3, 11), tokens[4:]]
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_later_training_is_seen(models):
    model = tg.build_gpt(tg.GPTConfig(VOCAB, 7, 1, 1, hidden_dim=6), seed=0)
    tg.generate(model, [1], 3, temperature=0.0)
    bias = np.zeros(VOCAB, "float32")
    bias[11] = 100.0
    model.get_layer("head").bias.assign(bias)
    assert tg.generate(model, [1], 3, temperature=0.0).tolist() == [1, 11, 11, 11]


@pytest.mark.parametrize("settings", [DRAWN, {"seed": 5}])
def test_a_vocabulary_too_large_to_sample_without_a_branch(settings):
    config = tg.GPTConfig(BRANCHLESS_VOCAB + 3, WINDOW, 1, 2, hidden_dim=24)
    model = sharpen(tg.build_gpt(config, seed=1))
    given = {"prompt_ids": [1, 2, 130], "max_new_tokens": 8, **settings}
    plain = tg.generate(model, use_cache=False, **given)
    assert tg.generate(model, **given).tolist() == plain.tolist()


def test_recorded_caches_are_overwritten_only_where_they_may_be(models):
    stepper = make_stepper(models["rotary"])
    tokens, zero = ops.ones((2, 1), "int32"), ops.zeros((), "int32")
    logits = []
    for overwrite in (False, True):
        step = record_operations(stepper, overwrite)
        state = stepper.initial_state(2)
        for _ in range(2):  # recorded, then run
            logits.append(
                to_numpy(step(tokens, zero, zero, ops.zeros(2, "int32"), state)[0])
            )
        written = bool(ops.any(state["keys_0"] != 0))
        assert written == (overwrite and keras.backend.backend() == "torch")
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=1e-6)


def test_half_precision_models_generate():
    config = tg.GPTConfig(VOCAB, WINDOW, 2, 2, hidden_dim=24, positions="rotary")
    model = sharpen(tg.build_gpt(config, dtype="mixed_bfloat16"))
    tokens = tg.generate(model, prompt(5), 2 * WINDOW, temperature=0.0)
    assert len(tokens) == 5 + 2 * WINDOW


def test_a_model_is_not_kept_alive_by_its_engine():
    model = tg.build_gpt(tg.GPTConfig(VOCAB, 5, 1, 1, hidden_dim=4))
    tg.generate(model, [1], 2)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_zero_new_tokens(models):
    assert tg.generate(models["learned"], [4, 5], 0).tolist() == [4, 5]
    assert list(tg.stream(models["learned"], [4, 5], 0)) == []


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        ([], {}, "prompt_ids must hold at least 1 token"),
        ([[1], []], {}, "prompt_ids must hold at least 1 token"),
        ([VOCAB], {}, r"prompt_ids must lie .* \(vocab_size=17\), got 17"),
        ([-1], {}, "got -1"),
        ([0.5], {}, "prompt_ids must be a one-dimensional integer"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens must be between 0 .* got -1"),
        ([1], {"context": "roll"}, "context must be one of .* got 'roll'"),
        ([1], {"seed": -1}, "seed must be"),
        ([1], {"seed": [1, 2]}, r"one per prompt \(1\), got 2"),
        ([1], {"stop": [[]]}, "stop must hold at least 1 token"),
        ([1], {"top_k": 0}, "top_k must be at least 1"),
        (
            [1],
            {"allowed_tokens": [99]},
            "allowed_tokens must lie .* got 99",
        ),
    ],
)
def test_bad_requests(models, tokens, settings, message):
    settings = {"max_new_tokens": 3, **settings}
    with pytest.raises(ValueError, match=message):
        tg.generate(models["learned"], tokens, **settings)


def test_stream_takes_one_prompt(models):
    with pytest.raises(ValueError, match="stream takes one prompt, got a batch of 2"):
        tg.stream(models["learned"], [[1], [2]], 3)


def test_cached_generation_needs_a_known_model(counting_model):
    with pytest.raises(ValueError, match="use_cache=False"):
        tg.generate(counting_model, [1], 3)


@pytest.mark.parametrize("changes", [{}, {"positions": "rotary", "num_kv_heads": 1}])
def test_prompts_of_several_chunks(changes):
    config = tg.GPTConfig(VOCAB, 37, 1, 2, hidden_dim=12, **changes)
    model = sharpen(tg.build_gpt(config, seed=1))
    for length in (16, 17, 35):
        arguments = (model, prompt(length), 5)
        cached = tg.generate(*arguments, seed=2)
        plain = tg.generate(*arguments, seed=2, use_cache=False)
        np.testing.assert_array_equal(cached, plain)


def test_one_hot_lstm():
    config = tg.LSTMConfig(VOCAB, hidden_dim=11, embedding_dim=None)
    model = sharpen(tg.build_lstm(config, seed=1), 5.0)
    cached = tg.generate(model, prompt(4), 9, **DRAWN)
    plain = tg.generate(model, prompt(4), 9, use_cache=False, **DRAWN)
    np.testing.assert_array_equal(cached, plain)
