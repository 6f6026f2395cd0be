"""Bundles: round trips, text in and out, and damaged or mismatched folders."""

import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_tinygpt as tg
from keras_tinygpt import bundle

TEXT = "to be, or not to be: that is the question.\n" * 3


@pytest.fixture(scope="module")
def tokenizer():
    return tg.CharTokenizer.from_text(TEXT)


def build(tokenizer, kind="gpt"):
    if kind == "lstm":
        config = tg.LSTMConfig(tokenizer.vocab_size, hidden_dim=13)
        return tg.build_lstm(config, seed=2)
    config = tg.GPTConfig(tokenizer.vocab_size, 11, 1, 2, hidden_dim=12)
    return tg.build_gpt(config, seed=2)


@pytest.mark.backend
@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_round_trip(tmp_path, tokenizer, kind):
    model = build(tokenizer, kind)
    path = tg.save(tmp_path / "deep" / "run", model, tokenizer, {"nats": 1.5})
    lm = tg.load(path)
    assert tg.fingerprint(lm.model) == tg.fingerprint(model)
    assert lm.model.config == model.config
    assert lm.tokenizer == tokenizer
    assert lm.metrics == {"nats": 1.5}
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]


def test_the_optimizer_stays_out(tmp_path, tokenizer):
    model = build(tokenizer)
    plain = tg.save(tmp_path / "plain", model, tokenizer) / "model.keras"
    size = plain.stat().st_size
    ids = tokenizer.encode(TEXT)
    config = tg.TrainConfig(steps=2, batch_size=2, jit_compile=False)
    tg.train(model, ids, ids, config, verbose=False)
    trained = tg.save(tmp_path / "trained", model, tokenizer) / "model.keras"
    assert trained.stat().st_size < 1.1 * size
    assert tg.fingerprint(tg.load(tmp_path / "trained").model) == tg.fingerprint(model)
    assert model.optimizer is not None


@pytest.mark.backend
@pytest.mark.parametrize("kind", ["gpt", "lstm"])
def test_int8_weights_round_trip(tmp_path, tokenizer, kind):
    model = build(tokenizer, kind)
    ids = keras.ops.convert_to_tensor(tokenizer.encode(TEXT[:9])[None])
    exact = keras.ops.convert_to_numpy(model(ids))
    assert model.quantization is None
    model.quantize("int8")
    dense = [x for x in model._flatten_layers() if isinstance(x, keras.layers.Dense)]
    assert dense and all(layer.quantization_mode == "int8" for layer in dense)
    expected = keras.ops.convert_to_numpy(model(ids))
    assert 0 < np.abs(expected - exact).max() < 0.1
    tg.save(tmp_path / "run", model, tokenizer)
    lm = tg.load(tmp_path / "run")
    assert lm.model.quantization == "int8"
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(lm.model(ids)), expected, atol=1e-6
    )
    assert lm.generate("to", 15) == tg.LanguageModel(model, tokenizer).generate(
        "to", 15
    )


@pytest.mark.backend
def test_text_in_text_out(tokenizer):
    lm = tg.LanguageModel(build(tokenizer), tokenizer)
    text = lm.generate("to be", 23, seed=4)
    assert text.startswith("to be") and len(text) == 28
    assert "to be" + "".join(lm.stream("to be", 23, seed=4)) == text
    assert lm.generate("to be", 23, seed=4, use_cache=False) == text
    both = lm.generate(["to be", "or"], 23, seed=4)
    assert both[0] == text
    assert both[1] == lm.generate("or", 23, seed=5)


def test_stop_strings(tokenizer):
    lm = tg.LanguageModel(build(tokenizer), tokenizer)
    text = lm.generate("to", 60, seed=1)
    stop = text[9:11]
    cut = text.index(stop, 2)
    assert lm.generate("to", 60, seed=1, stop=stop) == text[:cut]
    assert "to" + "".join(lm.stream("to", 60, seed=1, stop=[stop])) == text[:cut]


def test_bytes_stream_whole_characters():
    tokenizer = tg.ByteTokenizer()
    lm = tg.LanguageModel(build(tokenizer), tokenizer)
    allowed = list("é—".encode())

    def alternate(tokens):  # é (2 bytes) again and again
        return [allowed[0]] if tokens[-1] != allowed[0] else [allowed[1]]

    pieces = list(lm.stream("a", 8, allowed_tokens=alternate))
    assert "".join(pieces) == "é" * 4
    assert all(set(piece) == {"é"} for piece in pieces)


def test_unknown_characters(tokenizer):
    lm = tg.LanguageModel(build(tokenizer), tokenizer)
    with pytest.raises(ValueError, match="U\\+0040"):
        lm.generate("to@be", 3)
    assert lm.generate("to@be", 3, unknown="drop").startswith("tobe")
    assert lm.generate("to@be", 3, unknown=" ").startswith("to be")
    with pytest.raises(ValueError, match="at least one character the model knows"):
        lm.generate("@@", 3, unknown="drop")
    with pytest.raises(ValueError, match="at least one character"):
        lm.generate("", 3)
    with pytest.raises(ValueError, match="stop must not be an empty string"):
        lm.generate("to", 3, stop="")


def test_an_existing_folder_is_kept_unless_told(tmp_path, tokenizer):
    model, path = build(tokenizer), tmp_path / "run"
    tg.save(path, model, tokenizer, {"run": 1})
    (path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        tg.save(path, model, tokenizer, {"run": 2})
    assert tg.load(path).metrics == {"run": 1}
    tg.save(path, model, tokenizer, {"run": 2}, overwrite=True)
    assert tg.load(path).metrics == {"run": 2}
    assert (path / "notes.txt").read_text() == "mine"


def test_a_failed_save_leaves_the_old_bundle(tmp_path, tokenizer, monkeypatch):
    model, path = build(tokenizer), tmp_path / "run"
    tg.save(path, model, tokenizer, {"run": 1})

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "write_json", fail)
    with pytest.raises(OSError, match="No space left"):
        tg.save(path, model, tokenizer, {"run": 2}, overwrite=True)
    assert tg.load(path).metrics == {"run": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["folder", "link", "working directory"])
def test_a_new_folder_keeps_what_is_not_its_own(tmp_path, monkeypatch, kind):
    real = tmp_path / "real"
    real.mkdir()
    path = real
    if kind == "link":
        path = tmp_path / "link"
        path.symlink_to(real)
    elif kind == "working directory":
        monkeypatch.chdir(real)
        path = Path(".")
    (real / "old.txt").write_text("old")
    (real / "history.csv").write_text("mine")
    (real / "checkpoints").mkdir()
    (real / "checkpoints" / "state.json").write_text("mine")

    def replace():
        with bundle.new_folder(path) as folder:
            (folder / "old.txt").write_text("new")
            (folder / "other.txt").write_text("new")

    def contents():
        files = (p for p in real.rglob("*") if p.is_file())
        return {str(p.relative_to(real)): p.read_text() for p in files}

    before, rename, left = contents(), os.rename, [2]

    def fail_once(old, new):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(bundle.os, "rename", fail_once)
        with pytest.raises(KeyboardInterrupt):
            replace()
    assert contents() == before
    replace()
    assert contents() == {**before, "old.txt": "new", "other.txt": "new"}
    assert not [p for p in tmp_path.rglob(".*")]


def test_model_and_tokenizer_must_agree(tmp_path, tokenizer):
    other = tg.CharTokenizer.from_text("abc")
    with pytest.raises(ValueError, match="the tokenizer has 3 tokens, the model"):
        tg.save(tmp_path / "run", build(tokenizer), other)
    assert list(tmp_path.iterdir()) == []
    path = tg.save(tmp_path / "run", build(tokenizer), tokenizer)
    other.save(path / "tokenizer.json")
    with pytest.raises(ValueError, match="tokenizer.json is damaged or was replaced"):
        tg.load(path)
    (path / "metrics.json").unlink()  # and with it the checksums
    with pytest.raises(ValueError, match="tokenizer and model must agree"):
        tg.load(path)


def test_only_what_loads_again_is_saved(tmp_path, tokenizer):
    inputs = keras.Input((None,), dtype="int32")
    mine = keras.Model(
        inputs,
        keras.layers.Embedding(tokenizer.vocab_size, tokenizer.vocab_size)(inputs),
    )
    with pytest.raises(ValueError, match="model must be one that a build_ function"):
        tg.save(tmp_path / "run", mine, tokenizer)
    partly = build(tokenizer)
    partly.quantize("int8", filters=lambda layer: layer.name != "head")
    with pytest.raises(ValueError, match="quantized with filters cannot be saved"):
        tg.save(tmp_path / "run", partly, tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_metrics_must_be_plain(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="not JSON compliant"):
        tg.save(tmp_path / "run", build(tokenizer), tokenizer, {"nats": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_loading_what_is_not_a_bundle(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tg.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileNotFoundError, match="is a file"):
        tg.load(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="it has no model.keras"):
        tg.load(tmp_path)


@pytest.mark.parametrize("name", ["model.keras", "tokenizer.json", "metrics.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_damaged_files(tmp_path, tokenizer, name, damage):
    path = tg.save(tmp_path / "run", build(tokenizer), tokenizer)
    content = (path / name).read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, 300, dtype="uint8").tobytes()
    changed = {"cut": content[: len(content) // 2], "empty": b"", "noise": noise}
    (path / name).write_bytes(changed[damage])
    with pytest.raises(ValueError, match=name):
        tg.load(path)


def test_a_bundle_of_a_newer_version(tmp_path, tokenizer):
    path = tg.save(tmp_path / "run", build(tokenizer), tokenizer)
    content = json.loads((path / "metrics.json").read_text())
    content["format_version"] = 99
    (path / "metrics.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="format_version 99, this version .* reads 1"):
        tg.load(path)
