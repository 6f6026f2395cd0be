"""Generation by an encoder-decoder: the cached decoder, its samplers, beam search."""

import itertools

import keras
import numpy as np
import pytest
from helpers import randomize, to_numpy
from keras import ops

import keras_tinygpt as tg
from keras_tinygpt.generation.engine import get_engine

pytestmark = pytest.mark.backend

V, S, T, PAD = 11, 7, 5, 0
SHAPE = {
    "vocab_size": V,
    "max_sequence_length": T,
    "max_source_length": S,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 12,
}
CHANGES = {
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
        "num_kv_heads": 1,
        "qk_norm": True,
        "share_embeddings": False,
    },
}
SOURCES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
PROMPTS = [[1], [2, 7, 1], [8, 2]]
GREEDY = {"temperature": 0.0}
DRAWN = {"seed": 5, "temperature": 0.9, "top_k": 7, "repetition_penalty": 1.3}


def make_model(change):
    config = tg.EncoderDecoderConfig(**SHAPE, **CHANGES[change])
    return randomize(tg.build_encoder_decoder(config), seed=1)


@pytest.fixture(scope="module")
def model():
    return make_model("modern")


@pytest.mark.parametrize("change", CHANGES)
def test_cached_equals_plain(change, model):
    """Past the window too, for targets and sources of different lengths."""
    if change != "modern":
        model = make_model(change)
    calls = [{**DRAWN, "context": "crop"}, {**GREEDY, "context": "slide"}]
    for settings in calls:
        settings["source_ids"] = SOURCES
        cached = tg.generate(model, PROMPTS, 9, **settings)
        plain = tg.generate(model, PROMPTS, 9, use_cache=False, **settings)
        for ours, theirs, prompt in zip(cached, plain, PROMPTS, strict=True):
            assert len(ours) == len(prompt) + 9
            np.testing.assert_array_equal(ours, theirs)


def test_rows_do_not_mix(model):
    seeds = [5, 6, 7]
    batch = tg.generate(
        model, PROMPTS, 4, source_ids=SOURCES, **{**DRAWN, "seed": seeds}
    )
    settings = {**DRAWN, "seed": seeds[::-1], "source_ids": SOURCES[::-1]}
    other = tg.generate(model, PROMPTS[::-1], 4, **settings)
    for ours, theirs in zip(batch, other[::-1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_source_decides(model):
    """One prompt for all sources."""
    tokens, scores = tg.generate(
        model, [1], 4, source_ids=SOURCES, return_log_probabilities=True, **GREEDY
    )
    assert [row[0] for row in tokens] == [1, 1, 1]
    for first, second in itertools.combinations(scores, 2):
        assert np.abs(first - second).max() > 1e-3


def test_the_encoder_runs_once(model):
    """The source's keys and values are the model's own, and no step changes them."""
    engine, source = get_engine(model), np.array([SOURCES[0] + [PAD] * 2], "int32")
    source = np.repeat(source, 3, axis=0)
    start = engine.start(3, source)
    names = [name for name in start if name.startswith("source_")]
    assert len(names) == 2 * SHAPE["num_layers"] + 1
    context = keras.Model(model.inputs[0], model.context[0])(source)
    expected = model.get_layer("decoder_block_0").project_context(context)
    for kind, tensor in zip(("keys", "values"), expected, strict=True):
        ours = to_numpy(start[f"source_{kind}_0"])
        theirs = to_numpy(tensor).reshape(ours.shape)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    state, target = start, np.array([[1, 2, 3]] * 3, "int32")
    for index in range(3):
        tokens = np.ascontiguousarray(target[:, index])
        logits, state = engine.step(tokens, index, np.zeros(3, "int32"), state)
    for name in names:
        np.testing.assert_array_equal(to_numpy(state[name]), to_numpy(start[name]))
    expected = to_numpy(model([source, target]))[:, -1]
    np.testing.assert_allclose(to_numpy(logits), expected, atol=1e-4)


def test_new_sources_compile_nothing(model):
    if keras.backend.backend() == "torch":
        pytest.skip("PyTorch runs eagerly")
    engine = get_engine(model)
    tg.generate(model, [1], 4, source_ids=SOURCES, **GREEDY)
    before = dict(engine.traces)
    others = [[2], [10, 9], [8, 8, 8, 8]]
    tg.generate(model, [4, 2], 3, source_ids=others, **DRAWN)
    assert engine.traces == before


def score(model, source, tokens):
    logits = model([np.array([source]), np.array([tokens])])
    steps = to_numpy(ops.log_softmax(logits))[0, :-1]
    return steps[np.arange(len(tokens) - 1), tokens[1:]].sum()


def test_beam_search(model):
    source = SOURCES[1]
    allowed = [2, 3, 5, 7]
    exact = {
        tokens: score(model, source, [1, *tokens])
        for tokens in itertools.product(allowed, repeat=2)
    }
    best, found = tg.beam_search(
        model, [1], 2, num_beams=3, source_ids=source, allowed_tokens=allowed
    )
    assert tuple(best[1:]) == max(exact, key=exact.get)
    assert found == pytest.approx(max(exact.values()), abs=1e-4)


def test_beams_keep_to_what_is_allowed_after_each_prefix(model):
    """Only one token may follow: beams that cannot go on do not come back."""
    best, found = tg.beam_search(
        model,
        [1],
        3,
        num_beams=3,
        source_ids=SOURCES[0],
        allowed_tokens=lambda tokens: [(tokens[-1] + 1) % V],
    )
    assert best.tolist() == [1, 2, 3, 4]
    assert np.isfinite(found)


def test_errors(model):
    gpt = tg.build_gpt(tg.GPTConfig(V, T, 1, 2, hidden_dim=12))
    for call, match in (
        (lambda: tg.generate(model, [1], 3), "source_ids must be given for an Enc"),
        (
            lambda: tg.generate(gpt, [1], 3, source_ids=[1]),
            "source_ids needs a model from build_encoder_decoder, got GPT",
        ),
        (
            lambda: tg.generate(model, [1], 3, source_ids=[1] * 8),
            "source_ids must have at most max_source_length=7 tokens, got 8",
        ),
        (
            lambda: tg.generate(model, [1], 3, source_ids=[1, 11]),
            "source_ids must lie between 0 and 10",
        ),
        (
            lambda: tg.generate(model, [1], 3, source_ids=[]),
            "source_ids must hold at least 1 tokens, got 0",
        ),
        (
            lambda: tg.generate(model, PROMPTS, 3, source_ids=[1]),
            "source_ids must be one for each of the 3 prompts, got 1",
        ),
        (
            lambda: tg.beam_search(model, [1], 3, source_ids=SOURCES),
            "source_ids must be one sequence here, got 3 in a batch",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_a_bundle_translates_text(model, tmp_path):
    tokenizer = tg.CharTokenizer("_^abcdefghi")
    loaded = tg.load(tg.save(tmp_path / "bundle", model, tokenizer))
    settings = {"temperature": 0.0, "use_cache": False}
    text = loaded.generate("^", 3, source="abac", **settings)
    ids = tokenizer.encode("abac")
    expected = tg.generate(model, [1], 3, source_ids=ids, **settings)
    assert text == tokenizer.decode(expected)
    pieces = loaded.stream("^", 3, source="abac", **settings)
    assert "^" + "".join(pieces) == text
    texts = loaded.generate("^", 3, source=["abac", "c"], **settings)
    assert texts[0] == text and len(texts) == 2
    with pytest.raises(ValueError, match="source_ids must be given"):
        loaded.generate("^", 4)
