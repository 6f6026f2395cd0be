"""Folders of transformers, read and written; those in folders/ came from there."""

import json
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import check_one_line_error, to_numpy

import keras_tinygpt as tg
from keras_tinygpt import cli
from keras_tinygpt.pretrained.tokens import read_characters, write_tokenizer
from keras_tinygpt.pretrained.writing import describe, export_safetensors

FOLDERS = Path(__file__).resolve().parent / "folders"
V, T = 23, 13
LLAMA = {
    "positions": "rotary",
    "normalization": "rms",
    "activation": "swiglu",
    "use_bias": False,
}

safetensors = pytest.importorskip("safetensors", reason="needs the extra [gpt2]")
pytest.importorskip("tokenizers", reason="needs the extra [gpt2]")
every_kind = pytest.mark.parametrize("kind", ["gpt2", "llama"])


def expected_of(kind):
    content = json.loads((FOLDERS / kind / "expected.json").read_text("utf-8"))
    return content["text"], content["ids"], np.load(FOLDERS / kind / "logits.npy")


def change(folder, **changes):
    """Writes other fields into config.json; None takes one away."""
    content = json.loads((folder / "config.json").read_text())
    content = {k: v for k, v in {**content, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(content))


@pytest.fixture
def folder(request, tmp_path):
    """A copy of a folder; gpt2 unless a test asks for another by `kind`."""
    kind = request.node.callspec.params.get("kind", "gpt2")
    return shutil.copytree(FOLDERS / kind, tmp_path / kind)


@pytest.mark.backend
@every_kind
def test_logits_and_tokens_are_those_of_transformers(kind):
    text, ids, logits = expected_of(kind)
    lm = tg.from_pretrained(FOLDERS / kind)
    assert lm.tokenizer.encode(text).tolist() == ids
    assert lm.tokenizer.decode(ids) == text
    ours = to_numpy(lm.model(np.array([ids], "int32")))[0]
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert lm.metrics["source"]["model_type"] == kind
    config = lm.model.config
    assert (config.norm_epsilon, config.max_wavelength) == {
        "gpt2": (1e-2, 10000.0),
        "llama": (1e-3, 501.0),
    }[kind]
    if kind == "llama":
        cached = lm.generate("the bell", 6, seed=1)
        assert cached == lm.generate("the bell", 6, seed=1, use_cache=False)


@every_kind
def test_a_bundle_of_it_is_the_same_model(tmp_path, kind):
    lm = tg.load(FOLDERS / kind)
    path = tg.save(tmp_path / "bundle", lm.model, lm.tokenizer, lm.metrics)
    copy = tg.load(path)
    assert tg.fingerprint(copy.model) == tg.fingerprint(lm.model)
    assert copy.tokenizer == lm.tokenizer and copy.metrics == lm.metrics


@every_kind
def test_the_command_line_continues_text(capsys, kind):
    cli.main(["generate", str(FOLDERS / kind), "the bell", "--max-new-tokens", "3",
              "--no-use-cache"])  # fmt: skip
    assert capsys.readouterr().out.startswith("the bell")


@every_kind
def test_a_shorter_window(kind):
    _, ids, logits = expected_of(kind)
    lm = tg.from_pretrained(FOLDERS / kind, max_sequence_length=7)
    assert lm.model.config.max_sequence_length == 7
    ours = to_numpy(lm.model(np.array([ids[:7]], "int32")))[0]
    np.testing.assert_allclose(ours, logits[:7], atol=1e-4)
    with pytest.raises(ValueError, match="between 1 and 29, got 30"):
        tg.from_pretrained(FOLDERS / kind, max_sequence_length=30)


@every_kind
def test_parts_bare_names_and_buffers(folder, kind):
    """Files of older versions: no prefix, masks saved as well, several files."""
    library = pytest.importorskip("safetensors.numpy")
    prefix = {"gpt2": "transformer.", "llama": "model."}[kind]
    tensors = library.load_file(folder / "model.safetensors")
    tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    buffer = {
        "gpt2": "h.0.attn.bias",
        "llama": "layers.0.self_attn.rotary_emb.inv_freq",
    }
    tensors[buffer[kind]] = np.ones((2, 2), "float32")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        library.save_file({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    first, second = tg.from_pretrained(folder), tg.from_pretrained(FOLDERS / kind)
    assert tg.fingerprint(first.model) == tg.fingerprint(second.model)
    index[names[0]] = "../a.safetensors"
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    with pytest.raises(ValueError, match=r"must name files beside it, got '\.\./a"):
        tg.from_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {"model_type": "bert"}, "model_type must be one of 'gpt2', .* 'bert'"),
        ("gpt2", {"activation_function": "gelu"}, "activation_function .* got 'gelu'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights must be True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "_layer_idx must be False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be False"),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop must be 0.1, got 0.3"),
        ("gpt2", {"n_head": None}, "config.json must have n_head, got none"),
        ("gpt2", {"n_head": 5}, "divisible by num_heads=5"),
        ("gpt2", {"n_layer": 3}, r"must have the tensor h\.2\.attn\.c_attn\.weight"),
        ("gpt2", {"vocab_size": 10**9}, "its config declares 12,000"),
        ("gpt2", {"n_layer": 1}, r"tensors of its config\.json only, got h\.1\."),
        (
            "gpt2",
            {"n_inner": 16},
            r"c_fc\.weight must give .*12, 16\), got .*12, 17",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be 'silu' .* got 'gelu'"),
        ("llama", {"head_dim": 8}, "head_dim must be 4, got 8"),
        ("llama", {"num_attention_heads": 0}, "must be at least 1, got 0"),
        ("llama", {"partial_rotary_factor": 0.5}, "must be 1.0, got 0.5"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rope_parameters must have rope_type 'default', got 'llama3'",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling must have rope_type 'default', got 'linear'",
        ),
        (
            "llama",
            {"model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window must be False, got True",
        ),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 0.0}, "norm_epsilon"),
        ("llama", {"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        (
            "llama",
            {"rope_parameters": None, "rope_theta": "x"},
            "rope_theta must be a number, got 'x'",
        ),
    ],
)
def test_what_has_no_equal_is_refused(folder, kind, changes, message):
    change(folder, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        tg.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_older_fields_of_llama(tmp_path):
    folder = shutil.copytree(FOLDERS / "llama", tmp_path / "llama")
    change(folder, rope_parameters=None, rope_theta=499.0)
    assert tg.from_pretrained(folder).model.config.max_wavelength == 499.0
    change(folder, model_type="mistral", sliding_window=5)
    assert tg.from_pretrained(folder).model.config.attention_window == 5
    change(folder, tie_word_embeddings=True)  # the file's head is not read
    assert tg.from_pretrained(folder).model.config.tie_embeddings


def test_without_a_tokenizer(tmp_path, capsys):
    folder = shutil.copytree(FOLDERS / "gpt2", tmp_path / "gpt2")
    (folder / "merges.txt").unlink()
    lm = tg.load(folder)
    _, ids, logits = expected_of("gpt2")
    assert lm.tokenizer is None
    np.testing.assert_allclose(
        to_numpy(lm.model(np.array([ids], "int32")))[0], logits, atol=1e-4
    )
    for use in (lambda: lm.generate("the", 3), lambda: lm.stream("the", 3)):
        with pytest.raises(ValueError, match="the model has none: the folder has no"):
            use()
    with pytest.raises(ValueError, match="tokenizer must be one of this package"):
        tg.save(tmp_path / "bundle", lm.model, lm.tokenizer)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    error = check_one_line_error(capsys, "generate", folder, "the")
    assert "text needs a tokenizer" in error and "got 'Unigram'" in error


def test_damaged_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json and model\.safetensors"):
        tg.from_pretrained(tmp_path)
    folder = shutil.copytree(FOLDERS / "gpt2", tmp_path / "gpt2")
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        tg.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    for places in ({}, {"weight_map": [1]}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(places))
        with pytest.raises(ValueError, match="must have a weight_map that names files"):
            tg.from_pretrained(folder)
    for content, message in (
        ("{", "must be JSON, got"),
        ("[]", "must be a JSON object"),
    ):
        (folder / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            tg.from_pretrained(folder)


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'keras-tinygpt\[gpt2\]'"):
        tg.from_pretrained(FOLDERS / "gpt2")


def built(**changes):
    """A small GPT with no weight left at its initial 0 or 1, but the head's bias."""
    shape = {"num_layers": 2, "num_heads": 3, "hidden_dim": 12}
    model = tg.build_gpt(tg.GPTConfig(V, T, **{**shape, **changes}), seed=1)
    rng = np.random.default_rng(2)
    for weight in model.trainable_weights:
        if weight.path != "head/bias":
            noise = 0.3 * rng.standard_normal(tuple(weight.shape))
            weight.assign(keras.ops.convert_to_numpy(weight) + noise)
    return model


TOKENIZER = tg.CharTokenizer("abcdefghijklmnopqrstu\n ")
IDS = np.random.default_rng(0).integers(0, V, (2, T)).astype("int32")


@pytest.mark.backend
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"tie_embeddings": True, "use_bias": False, "activation": "relu2"}),
        ("llama", {**LLAMA, "num_kv_heads": 1, "max_wavelength": 501.0}),
        ("llama", {**LLAMA, "use_bias": True, "tie_embeddings": True}),
        ("mistral", {**LLAMA, "attention_window": 4, "norm_epsilon": 0.01}),
        ("qwen2", {**LLAMA, "qkv_bias": True, "intermediate_dim": 17}),
    ],
)
def test_a_round_trip_is_exact(tmp_path, kind, changes):
    model = built(dropout=0.1, attention_dropout=0.2, **changes)
    folder = export_safetensors(model, TOKENIZER, tmp_path / "folder")
    assert json.loads((folder / "config.json").read_text())["model_type"] == kind
    back = tg.from_pretrained(folder)
    assert back.tokenizer == TOKENIZER
    np.testing.assert_array_equal(to_numpy(back.model(IDS)), to_numpy(model(IDS)))
    again = export_safetensors(back.model, TOKENIZER, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "sinusoidal", "scale_embeddings": True, "max_wavelength": 99.0},
        {"use_bias": True},
    ],
)
def test_what_the_family_lacks_is_written_as_what_it_has(tmp_path, changes):
    """A table of positions, larger embeddings, a larger offset of the last norm."""
    config = tg.GPTConfig(V, T, 1, 3, hidden_dim=36, **changes)
    model = tg.build_gpt(config, seed=1)
    bias = np.random.default_rng(0).standard_normal(V)
    model.get_layer("head").bias.assign(bias)
    for weight in model.weights:
        if weight.path == "head/kernel":  # initial ones are near 0
            weight.assign(weight * 20.0)
    folder = export_safetensors(model, TOKENIZER, tmp_path / "folder")
    back = tg.from_pretrained(folder).model
    assert back.config.positions == "learned" and not back.config.scale_embeddings
    assert not keras.ops.convert_to_numpy(back.get_layer("head").bias).any()
    np.testing.assert_allclose(to_numpy(back(IDS)), to_numpy(model(IDS)), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": "alibi"},
            "positions must be 'learned' or 'sinusoidal' .* 'alibi",
        ),
        ({"positions": "none"}, "positions must be .* as GPT-2, got 'none'"),
        ({"normalization": "rms"}, "normalization must be 'layer' .* GPT-2, got 'rms'"),
        ({"norm_position": "post"}, "norm_position must be 'pre' .* got 'post'"),
        ({"activation": "swiglu"}, "activation must be 'gelu' or .* got 'swiglu'"),
        ({"num_kv_heads": 1}, "num_kv_heads must be None or 3 .* got 1"),
        ({"attention_window": 4}, "attention_window must be None .* got 4"),
        ({"qk_norm": True}, "qk_norm must be False .* got True"),
        (
            {"scale_embeddings": True, "tie_embeddings": True},
            "scale_embeddings must be",
        ),
        (
            {**LLAMA, "normalization": "layer"},
            "normalization must be 'rms' .* as Llama",
        ),
        ({**LLAMA, "activation": "gelu"}, "activation must be 'swiglu' .* got 'gelu'"),
        ({**LLAMA, "qk_norm": True}, "qk_norm must be False .* as Llama, got True"),
        (
            {**LLAMA, "attention_window": 4, "qkv_bias": True},
            "qkv_bias must be False .* as Mistral, got True",
        ),
    ],
)
def test_what_fits_no_family_is_refused(changes, message):
    config = tg.GPTConfig(V, T, 2, 3, hidden_dim=12, **changes)
    with pytest.raises(ValueError, match=message):
        describe(config)


def test_other_models_and_folders_are_refused(tmp_path, capsys):
    path = tmp_path / "folder"
    lstm = tg.build_lstm(tg.LSTMConfig(V, hidden_dim=5))
    bundle = tg.save(tmp_path / "run", lstm, TOKENIZER)
    error = check_one_line_error(capsys, "export", bundle, "--format", "safetensors")
    assert "from build_gpt to be written as safetensors, got LSTM" in error
    model = built(num_layers=1)
    with pytest.raises(ValueError, match="tokenizer and model must agree"):
        export_safetensors(model, tg.ByteTokenizer(), path)
    model.get_layer("head").bias.assign(np.arange(V))  # V > D: no norm can hold it
    with pytest.raises(ValueError, match="no bias other than 0 .* got one up to 22"):
        export_safetensors(model, TOKENIZER, path)
    model.quantize("int8")
    with pytest.raises(ValueError, match="must not be quantized"):
        export_safetensors(model, TOKENIZER, path)
    assert not path.exists()
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        export_safetensors(built(num_layers=1), TOKENIZER, path)


def test_the_command_exports(tmp_path, capsys):
    bundle = tg.save(tmp_path / "run", built(), TOKENIZER)
    cli.main(["export", str(bundle), "--format", "safetensors"])
    assert "saved" in capsys.readouterr().out
    names = {path.name for path in (bundle / "safetensors").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert tg.load(bundle / "safetensors").tokenizer == TOKENIZER


def test_tokenizers_as_hugging_face_keeps_them(tmp_path):
    import tokenizers

    text = "to be,\r\n\n or — not \U0001f642  to be" * 3
    for tokenizer in (
        tg.CharTokenizer.from_text(text),
        tg.ByteTokenizer(),
        tg.BPETokenizer.from_text(text, 264),
    ):
        content = write_tokenizer(tokenizer)
        theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
        ids = theirs.encode(text).ids
        assert ids == tokenizer.encode(text).tolist()
        assert theirs.decode(ids) == text
        read = read_characters(content) or tg.BPETokenizer(content)
        assert read.encode(text).tolist() == ids
        assert read.vocab_size == tokenizer.vocab_size
