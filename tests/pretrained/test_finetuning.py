"""Adapters in files of their own, new characters, frozen layers."""

import json

import keras
import numpy as np
import pytest
from helpers import fit_some_steps, to_numpy, token_ids

import keras_tinygpt as tg
from keras_tinygpt.finetuning import (
    add_adapters,
    extend_vocabulary,
    load_adapters,
    save_adapters,
)

V, T, RANK = 11, 7, 2


def make(seed=1, quantized=False, **changes):
    settings = {"num_layers": 2, "num_heads": 2, "hidden_dim": 12, **changes}
    model = tg.build_gpt(tg.GPTConfig(V, T, **settings), seed=seed)
    if quantized:
        model.quantize("int8")
    return model


def ids(seed=0):
    return token_ids(5, T + 1, vocab_size=V, seed=seed)


@pytest.mark.backend
@pytest.mark.parametrize("change", ["adapters", "quantize"])
def test_generation_follows_the_layers(change):
    """What was compiled before computes something else."""
    model = make()
    model.predict_on_batch(ids()[:, :-1])
    both = [
        {"return_log_probabilities": True, "use_cache": use_cache}
        for use_cache in (True, False)
    ]
    first = [tg.generate(model, [1, 2], 5, **settings)[1] for settings in both]
    np.testing.assert_allclose(first[0], first[1], atol=1e-5)
    if change == "quantize":
        model.quantize("int8")
    else:
        add_adapters(model, RANK)
        rng = np.random.default_rng(0)
        for weight in model.trainable_weights:
            weight.assign(rng.normal(size=weight.shape))
    second = [tg.generate(model, [1, 2], 5, **settings)[1] for settings in both]
    np.testing.assert_allclose(second[0], second[1], atol=1e-5)
    assert np.abs(second[0] - first[0]).max() > 1e-5


@pytest.mark.backend
@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_in_a_file_of_their_own(tmp_path, quantized):
    model = make(quantized=quantized)
    before = to_numpy(model(ids()[:, :-1]))
    add_adapters(model, RANK, alpha=3.0)
    np.testing.assert_allclose(to_numpy(model(ids()[:, :-1])), before, atol=1e-6)
    assert len(model.trainable_weights) == 16
    fit_some_steps(model, ids(), steps=3)
    expected = to_numpy(model(ids()[:, :-1]))
    assert np.abs(expected - before).max() > 1e-3
    path = save_adapters(tmp_path / "adapters.npz", model)
    with np.load(path) as file:
        sizes = {name: file[name].size for name in file if name != "description"}
    assert len(sizes) == 16
    assert sum(sizes.values()) == sum(
        w.size for w in map(to_numpy, model.trainable_weights)
    )

    for copy in (make(quantized=quantized), model):
        for weight in copy.trainable_weights if copy is model else ():
            weight.assign(np.zeros(weight.shape))
        load_adapters(path, copy)
        np.testing.assert_allclose(to_numpy(copy(ids()[:, :-1])), expected, atol=1e-6)
        assert len(copy.trainable_weights) == 16
    assert [p.name for p in tmp_path.iterdir()] == ["adapters.npz"]


def test_a_bundle_and_its_adapters(tmp_path):
    """Train on a saved model, keep the adapters alone, put them on it again."""
    tokenizer = tg.CharTokenizer("abcdefghijk")
    tg.save(tmp_path / "base", make(), tokenizer)
    model = tg.load(tmp_path / "base").model
    add_adapters(model, RANK)
    config = tg.TrainConfig(steps=4, batch_size=3, validate_every=2, jit_compile=False)
    text = token_ids(200, vocab_size=V)
    tg.train(model, text[:150], text[150:], config, verbose=False)
    save_adapters(tmp_path / "a.npz", model)
    again = tg.load(tmp_path / "base")
    load_adapters(tmp_path / "a.npz", again.model)
    assert tg.fingerprint(again.model) == tg.fingerprint(model)
    merged = tg.load(tg.save(tmp_path / "merged", again.model, tokenizer))
    x = ids()[:, :-1]
    np.testing.assert_allclose(to_numpy(merged.model(x)), to_numpy(model(x)), atol=1e-5)


def test_adapters_of_other_models_are_refused(tmp_path):
    model = make()
    path = tmp_path / "adapters.npz"
    with pytest.raises(ValueError, match="model must have adapters, got none"):
        save_adapters(path, model)
    add_adapters(model, RANK)
    with pytest.raises(ValueError, match="model must have no adapters yet"):
        add_adapters(model, RANK)
    with pytest.raises(ValueError, match="path must end in .npz, got 'x'"):
        save_adapters("x", model)
    save_adapters(path, model)
    with pytest.raises(ValueError, match="belongs to other weights"):
        load_adapters(path, make(seed=2))
    other = make()
    add_adapters(other, RANK + 1)
    with pytest.raises(ValueError, match="must have rank=2 and alpha=2 as in .* got 3"):
        load_adapters(path, other)
    with pytest.raises(FileNotFoundError):
        load_adapters(tmp_path / "nowhere.npz", model)

    content = path.read_bytes()
    with np.load(path) as file:
        arrays = {name: file[name] for name in file}
    path.write_bytes(content[:-30])
    with pytest.raises(ValueError, match="holds no adapters"):
        load_adapters(path, model)
    description = json.loads(str(arrays["description"]))
    for changes, message in (
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"format_version": 2}, "format_version must be between 1 and 1, got 2"),
        ({"rank": 5}, "it must hold two matrices a Dense layer"),
    ):
        changed = np.array(json.dumps(description | changes))
        np.savez(path, **{**arrays, "description": changed})
        with pytest.raises(ValueError, match=message):
            load_adapters(path, make())


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_bad_ranks(rank):
    with pytest.raises(ValueError, match="rank must be"):
        add_adapters(make(), rank)


def test_bad_alpha_and_models():
    with pytest.raises(ValueError, match="alpha must be"):
        add_adapters(make(), RANK, alpha=0.0)
    lstm = tg.build_lstm(tg.LSTMConfig(V, 5))
    with pytest.raises(ValueError, match="model must have a Dense layer beside its"):
        add_adapters(lstm, RANK)


MODELS = {
    "untied": lambda: make(),
    "tied": lambda: make(tie_embeddings=True, positions="rotary"),
    "lstm": lambda: tg.build_lstm(tg.LSTMConfig(V, 5), seed=1),
    "one_hot": lambda: tg.build_lstm(tg.LSTMConfig(V, 5, embedding_dim=None), seed=1),
}


@pytest.mark.backend
@pytest.mark.parametrize("kind", list(MODELS))
def test_new_characters(kind):
    model, tokenizer = MODELS[kind](), tg.CharTokenizer("kjihgfedcba")
    for weight in model.weights:  # not what the seed makes
        weight.assign(to_numpy(weight) + 0.25)
    larger, longer = extend_vocabulary(model, tokenizer, "bad xyz", seed=1)
    assert "".join(longer.vocabulary) == "kjihgfedcba xyz"
    assert larger.output_shape[-1] == larger.config.vocab_size == 15
    x = ids()[:, :-1]
    np.testing.assert_allclose(
        to_numpy(larger(x))[..., :V], to_numpy(model(x)), atol=1e-5
    )
    fresh = type(model)(larger.config)
    build = tg.build_lstm if "lstm" in fresh.name else tg.build_gpt
    fresh = build(larger.config, seed=1)
    for new, old, start in zip(
        larger.weights, model.weights, fresh.weights, strict=True
    ):
        if new.shape == old.shape:
            assert np.array_equal(to_numpy(new), to_numpy(old)), new.path
            continue
        kept = tuple(slice(size) for size in old.shape)
        assert np.array_equal(to_numpy(new)[kept], to_numpy(old)), new.path
        added = np.ones(new.shape, bool)
        added[kept] = False
        assert np.array_equal(to_numpy(new)[added], to_numpy(start)[added]), new.path
    losses = fit_some_steps(larger, token_ids(5, T + 1, vocab_size=15), steps=3)
    assert losses[-1] < losses[0]


def test_a_vocabulary_that_is_not_extended():
    model, tokenizer = make(), tg.CharTokenizer("abcdefghijk")
    same, known = extend_vocabulary(model, tokenizer, "abba")
    assert known == tokenizer and tg.fingerprint(same) == tg.fingerprint(model)
    with pytest.raises(ValueError, match="must be a CharTokenizer, got ByteTokenizer"):
        extend_vocabulary(model, tg.ByteTokenizer(), "abc")
    with pytest.raises(ValueError, match="tokenizer and model must agree"):
        extend_vocabulary(model, tg.CharTokenizer("ab"), "abc")
    with pytest.raises(ValueError, match="must not be quantized, got int8"):
        extend_vocabulary(make(quantized=True), tokenizer, "xyz")


@pytest.mark.backend
def test_frozen_layers_stay_as_they_are():
    """The embedding and the first block keep their weights; all others train."""
    model = make()
    frozen = ("token_embedding", "position_embedding", "block_0")
    for name in frozen:
        model.get_layer(name).trainable = False
    before = {weight.path: to_numpy(weight) for weight in model.weights}
    text = token_ids(200, vocab_size=V)
    config = tg.TrainConfig(steps=3, batch_size=3, validate_every=3, jit_compile=False)
    tg.train(model, text[:150], text[150:], config, verbose=False)
    for weight in model.weights:
        same = np.array_equal(to_numpy(weight), before[weight.path])
        assert same == weight.path.startswith(frozen), weight.path
    assert isinstance(model.optimizer, keras.optimizers.AdamW)
