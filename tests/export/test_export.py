"""Exported SavedModels, used by a process that cannot import this package."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import ROOT

import keras_tinygpt as tg
from keras_tinygpt import cli
from keras_tinygpt.export import saved_model, source
from keras_tinygpt.export.reading import is_saved_model
from keras_tinygpt.generation import draw_uniforms

WINDOW = 13
NEW = 150  # more than one call of a compiled loop
CHARACTERS = "abcdefghijklmno\né"
PROMPTS = {
    "rotary": ["a", "né", CHARACTERS],
    "bytes": ["a", "né—", "the last prompt is long"],
    "lstm": ["a", "né", CHARACTERS * 9],  # more than a segment
}
MANY = [CHARACTERS[: 1 + index] for index in range(17)]  # rows in several groups
every_name = pytest.mark.parametrize(
    "name", ["rotary", "lstm", pytest.param("bytes", marks=pytest.mark.slow)]
)
SIZES, STEP = (1, 2, 12), [8, 9, 10]  # of the rows of prefill; tokens of decode
SAMPLING = {"temperature": 0.9, "top_k": 9, "top_p": 0.95}
ALONE = """
import json, sys
for name in ("keras_tinygpt", "keras_hub"):
    sys.modules[name] = None  # importing it fails
import numpy as np
import tensorflow as tf

def plain(value):
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tf.Tensor):
        value = value.numpy()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tolist()
    return [plain(item) for item in value]

models, answers = {}, {}
for key, (folder, endpoint, inputs) in json.load(sys.stdin).items():
    if folder not in models:
        models[folder] = tf.saved_model.load(folder)
    inputs |= {k: v for k, v in answers.get(inputs.pop("after", ""), {}).items()
               if k != "logits"}  # the caches of an earlier answer
    try:
        if endpoint.startswith("signature "):
            signature = models[folder].signatures[endpoint.split()[1]]
            inputs = {name: tf.constant(value) for name, value in inputs.items()}
            answers[key] = plain(signature(**inputs))
        else:
            answers[key] = plain(getattr(models[folder], endpoint)(**inputs))
    except (tf.errors.OpError, ValueError, TypeError) as error:
        answers[key] = {"error": str(error)}
print(json.dumps(answers))
"""


def sharpen(model, factor):
    """Makes an untrained model opinionated, so that close calls are rare."""
    for variable in model.weights:
        if variable.path.startswith(("head", "token_embedding")):
            variable.assign(variable * factor)
    return model


def make_models():
    characters, data = tg.CharTokenizer.from_text(CHARACTERS), tg.ByteTokenizer()
    shape = {"max_sequence_length": WINDOW, "num_layers": 2, "hidden_dim": 24}
    rotary = tg.GPTConfig(
        17, num_kv_heads=2, positions="rotary", dropout=0.3, attention_window=7, **shape
    )
    learned = tg.GPTConfig(256, num_heads=2, **{**shape, "num_layers": 1})
    lstm = tg.LSTMConfig(17, hidden_dim=19, num_layers=2, dropout=0.1)
    return {
        "rotary": tg.LanguageModel(
            sharpen(tg.build_gpt(rotary, seed=1), 20.0), characters, {"nats": 1.5}
        ),
        "bytes": tg.LanguageModel(sharpen(tg.build_gpt(learned, seed=1), 20.0), data),
        "lstm": tg.LanguageModel(sharpen(tg.build_lstm(lstm, seed=1), 5.0), characters),
    }


@pytest.fixture(scope="module")
def models(request):
    """By name; the byte model is for the slow tests."""
    made = make_models()
    if "not slow" in request.config.getoption("markexpr"):
        del made["bytes"]
    return made


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    return {
        name: tg.export_saved_model(
            lm.model, lm.tokenizer, root / name, metrics=lm.metrics
        )
        for name, lm in models.items()
    }


def padded(rows):
    """Rows of ids as a dense list of lists, and their offsets."""
    longest = max(map(len, rows))
    offsets = [longest - len(row) for row in rows]
    pairs = zip(rows, offsets, strict=True)
    return [[0] * offset + list(map(int, row)) for row, offset in pairs], offsets


def text_inputs(name, **changes):
    inputs = {"prompts": PROMPTS[name], "max_new_tokens": NEW, "seed": 5, "stop": ""}
    return {**inputs, **SAMPLING, **changes}


def ids(lm, length):
    return np.random.default_rng(length).integers(0, lm.tokenizer.vocab_size, length)


def requests(models):
    """What the process without the package is asked, by name."""
    asked = {}
    for name, lm in models.items():

        def ask(key, endpoint, inputs, name=name):
            asked[f"{name} {key}"] = (name, endpoint, inputs)

        for length in (1, 5, WINDOW, WINDOW + 1):
            rows = [ids(lm, length).tolist()] * (1 + length % 3)
            ask(f"serve {length}", "serve", {"tokens": rows})
        ask("serving default", "signature serving_default", {"tokens": [[1, 2, 3]]})
        rows, offsets = padded([lm.tokenizer.encode(text) for text in PROMPTS[name]])
        gaps = [max(SIZES) - size for size in SIZES]
        short = {"tokens": [row[-max(SIZES) :] for row in rows], "row_offsets": gaps}
        ask("prefill", "signature prefill", short)
        step = {"tokens": STEP, "index": max(SIZES), "row_offsets": gaps}
        ask("decode", "decode", {**step, "after": f"{name} prefill"})
        inputs = {
            "tokens": rows,
            "row_offsets": offsets,
            "uniforms": draw_uniforms([5, 6, 7], NEW).tolist(),
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "allowed": [token != 3 for token in range(lm.tokenizer.vocab_size)],
            **SAMPLING,
        }
        ask("generate", "generate", inputs)
        ask("text", "generate_text", text_inputs(name))
        ask("text again", "generate_text", text_inputs(name))
        ask("other seed", "generate_text", text_inputs(name, seed=8))
        ask("negative seed", "generate_text", text_inputs(name, seed=-1))
        ask("greedy", "generate_text", text_inputs(name, temperature=0.0, top_k=0))
        ask("nothing", "generate_text", text_inputs(name, max_new_tokens=0))
        ask("metadata", "metadata", {})
    rotary = models["rotary"]
    asked["rotary stop"] = (
        *("rotary", "generate_text"),
        text_inputs("rotary", stop=stop_string(rotary)),
    )
    many = text_inputs("lstm", prompts=MANY, max_new_tokens=20, stop="n")
    asked["lstm many"] = ("lstm", "generate_text", many)
    for key, changes in BAD_TEXT.items():
        asked[key] = ("rotary", "generate_text", text_inputs("rotary", **changes))
    for key, (endpoint, inputs) in BAD_TOKENS.items():
        asked[key] = ("rotary", endpoint, inputs)
    return asked


BAD_TEXT = {
    "unknown": {"prompts": ["a", "n~b"]},
    "empty": {"prompts": ["a", ""]},
    "none": {"prompts": np.zeros(0, "U1").tolist()},
    "temperature": {"temperature": -1.0},
    "top_k": {"top_k": -1},
    "top_p": {"top_p": 0.0},
    "max_new_tokens": {"max_new_tokens": -1},
}
BAD_TOKENS = {
    "vocabulary": ("serve", {"tokens": [[17]]}),
    "offsets": ("prefill", {"tokens": [[1, 2]], "row_offsets": [2]}),
    "rows": ("prefill", {"tokens": [[1, 2]], "row_offsets": [0, 0]}),
    "int64": ("signature serve", {"tokens": [[2**40]]}),
}
MESSAGES = {
    "unknown": "text must use the vocabulary's characters only, got",
    "empty": "prompts must hold at least 1 character",
    "none": "",
    "temperature": "temperature must be at least 0",
    "top_k": "top_k must be at least 0",
    "top_p": "top_p must lie in (0, 1]",
    "max_new_tokens": "max_new_tokens must not be negative, got] [-1]",
    "vocabulary": "tokens must lie between 0 and 16 (vocab_size=17)",
    "offsets": "row_offsets must lie between 0 and the columns of tokens less 1",
    "rows": "row_offsets must hold one number per row of tokens, got] [2]",
    "int64": "expected to be a int32 tensor but is a int64 tensor",
}


def stop_string(lm):
    """Two characters that the first row makes late enough to cut something."""
    text = lm.generate(PROMPTS["rotary"], NEW, seed=5, **SAMPLING)[0]
    return text[9:11]


@pytest.fixture(scope="module")
def answers(models, folders):
    asked = {
        key: (str(folders[name]), *rest)
        for key, (name, *rest) in requests(models).items()
    }
    return ask_alone(asked, folders["rotary"].parent)


def ask_alone(asked, where):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", ALONE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=where,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def logits(lm, rows):
    outputs = lm.model(keras.ops.convert_to_tensor(np.asarray(rows, "int32")))
    return keras.ops.convert_to_numpy(outputs)


@every_name
def test_serve_equals_the_model(models, answers, name):
    lm = models[name]
    for length in (1, 5, WINDOW):
        rows = [ids(lm, length)] * (1 + length % 3)
        served = answers[f"{name} serve {length}"]
        np.testing.assert_allclose(served, logits(lm, rows), atol=1e-4)
    served = answers[f"{name} serving default"]["logits"]
    np.testing.assert_allclose(served, logits(lm, [[1, 2, 3]]), atol=1e-4)


@every_name
def test_serve_past_the_window(models, answers, name):
    answer = answers[f"{name} serve {WINDOW + 1}"]
    if name == "lstm":  # has none
        rows = [ids(models[name], WINDOW + 1)] * (1 + (WINDOW + 1) % 3)
        np.testing.assert_allclose(answer, logits(models[name], rows), atol=1e-4)
    else:
        rule = "tokens must have at most max_sequence_length=13 columns, got] [14]"
        assert rule in answer["error"]


@every_name
def test_decode_continues_prefill(models, answers, name):
    lm = models[name]
    rows = [lm.tokenizer.encode(text).tolist() for text in PROMPTS[name]]
    rows = [row[-size:] for row, size in zip(rows, SIZES, strict=True)]
    state = {"h_0", "h_1", "c_0", "c_1"}
    if name != "lstm":
        pairs = range(lm.model.config.num_layers)
        state = {f"{kind}_{index}" for kind in ("keys", "values") for index in pairs}
    for endpoint in ("prefill", "decode"):
        answer = answers[f"{name} {endpoint}"]
        assert set(answer) == {"logits", *state}
        for row, row_logits in zip(rows, answer["logits"], strict=True):
            expected = logits(lm, [row])[0, -1]
            np.testing.assert_allclose(row_logits, expected, atol=1e-4)
        rows = [[*row, token] for row, token in zip(rows, STEP, strict=True)]


@every_name
def test_generate_gives_the_tokens_of_the_package(models, answers, name):
    lm = models[name]
    prompts = [lm.tokenizer.encode(text) for text in PROMPTS[name]]
    allowed = [token for token in range(lm.tokenizer.vocab_size) if token != 3]
    settings = {"min_p": 0.01, "repetition_penalty": 1.2, "allowed_tokens": allowed}
    rows = tg.generate(lm.model, prompts, NEW, seed=5, **settings, **SAMPLING)
    for row, prompt, new in zip(
        rows, prompts, answers[f"{name} generate"], strict=True
    ):
        assert row[len(prompt) :].tolist() == new


@every_name
def test_generate_text_equals_the_package(models, answers, name):
    lm, asked = models[name], PROMPTS[name]

    def expected(**settings):
        """Lone surrogates, which the byte model may make, are not UTF-8."""
        return [
            text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
            for text in lm.generate(asked, NEW, **settings)
        ]

    texts = answers[f"{name} text"]
    assert texts == expected(seed=5, **SAMPLING)
    assert texts == answers[f"{name} text again"]
    other = answers[f"{name} other seed"]
    assert all(a != b for a, b in zip(texts, other, strict=True))
    assert other == expected(seed=8, **SAMPLING)
    unsigned = expected(seed=2**64 - 1, **SAMPLING)
    assert answers[f"{name} negative seed"] == unsigned
    assert answers[f"{name} greedy"] == expected(temperature=0.0)
    assert answers[f"{name} nothing"] == asked


def test_a_stop_string_ends_the_text(models, answers):
    lm = models["rotary"]
    stop = stop_string(lm)
    expected = lm.generate(PROMPTS["rotary"], NEW, seed=5, stop=stop, **SAMPLING)
    assert len(expected[0]) < 1 + NEW
    assert answers["rotary stop"] == expected


def test_rows_in_groups(models, answers):
    """One more than fills the groups; some of them stop early."""
    expected = models["lstm"].generate(MANY, 20, seed=5, stop="n", **SAMPLING)
    added = [len(new) - len(old) for new, old in zip(expected, MANY, strict=True)]
    assert min(added) < 20 == max(added)
    assert answers["lstm many"] == expected


def test_metadata(models, answers):
    for name, lm in models.items():
        content = json.loads(answers[f"{name} metadata"])
        assert content["config"] == dataclasses.asdict(lm.model.config)
        assert content["tokenizer"] == lm.tokenizer.get_config()
        assert content["metrics"] == lm.metrics
        assert content["format_version"] == 1
        assert content["keras_tinygpt"] == tg.__version__


@pytest.mark.parametrize("key", MESSAGES)
def test_bad_inputs(answers, key):
    assert MESSAGES[key] in answers[key]["error"].replace("\\'", "'")


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_draws_are_those_of_numpy(seed):
    from keras_tinygpt.export import draws

    seeds = [(seed + row) % 2**64 for row in range(3)]
    for count in (0, 1, 7, 8, 9, 300):
        drawn = draws.draw_uniforms(np.uint64(seed).astype("int64"), 3, count)
        np.testing.assert_array_equal(drawn, draw_uniforms(seeds, count))


@every_name
def test_loading_back(models, folders, name):
    lm, back = models[name], tg.load(folders[name])
    assert back.model.config == lm.model.config
    assert tg.fingerprint(back.model) == tg.fingerprint(lm.model)
    assert (back.tokenizer, back.metrics) == (lm.tokenizer, lm.metrics)
    rows = [ids(lm, 5)]
    np.testing.assert_array_equal(logits(back, rows), logits(lm, rows))
    plain = {"max_new_tokens": 5, "use_cache": False}
    assert back.generate("a", **plain) == lm.generate("a", **plain)
    assert "".join(back.stream("a", **plain)) == lm.generate("a", **plain)[1:]


@pytest.mark.backend
def test_export_from_every_backend(tmp_path):
    """A loaded bundle, in bfloat16: the SavedModel computes in float32."""
    tokenizer = tg.CharTokenizer.from_text("abcde")
    config = tg.GPTConfig(5, 7, 1, 1, hidden_dim=6)
    model = sharpen(tg.build_gpt(config, seed=3, dtype="mixed_bfloat16"), 9.0)
    lm = tg.load(tg.save(tmp_path / "bundle", model, tokenizer, {"nats": 1.5}))
    path = tg.export_saved_model(lm.model, lm.tokenizer, tmp_path / "exported")
    assert is_saved_model(path)
    back = tg.load(path)
    assert tg.fingerprint(back.model) == tg.fingerprint(model)
    tokens = [[0, 1, 2, 3, 4]]
    asked = {
        "serve": (str(path), "serve", {"tokens": tokens}),
        "text": (str(path), "generate_text", {**text_inputs("rotary"),
                 "prompts": ["ab"]}),
    }  # fmt: skip
    answers = ask_alone(asked, tmp_path)
    asked = back.generate("ab", NEW, seed=5, use_cache=False, **SAMPLING)
    assert answers["text"] == [asked]
    np.testing.assert_allclose(answers["serve"], logits(back, tokens), atol=1e-4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "exported"]


@pytest.fixture
def quick(models, monkeypatch):
    """Arguments of an export whose writing is replaced by two small files."""

    def write(model, tokenizer, folder, metrics):
        (folder / "saved_model.pb").write_text("graph")
        (folder / "variables").mkdir()

    monkeypatch.setattr(saved_model, "write_saved_model", write)
    return models["lstm"].model, models["lstm"].tokenizer


def test_an_existing_folder_is_kept_unless_told(quick, tmp_path):
    path = tmp_path / "deep" / "out"
    tg.export_saved_model(*quick, path)
    (path / "saved_model.pb").write_text("old")
    with pytest.raises(FileExistsError, match="exists already"):
        tg.export_saved_model(*quick, path)
    assert (path / "saved_model.pb").read_text() == "old"
    tg.export_saved_model(*quick, path, overwrite=True)
    assert (path / "saved_model.pb").read_text() == "graph"


@pytest.mark.parametrize("failure", ["disk", "interrupt"])
def test_a_failure_leaves_nothing(models, tmp_path, monkeypatch, failure):
    tf = pytest.importorskip("tensorflow")
    endpoints = pytest.importorskip("keras_tinygpt.export.endpoints")

    def fail(module, folder, *arguments):
        Path(folder, "saved_model.pb").write_text("half")
        if failure == "interrupt":
            raise KeyboardInterrupt
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(endpoints, "make_module", lambda *arguments: (None, {}))
    monkeypatch.setattr(tf.saved_model, "save", fail)
    lm = models["lstm"]
    with pytest.raises((OSError, KeyboardInterrupt)) as caught:
        tg.export_saved_model(lm.model, lm.tokenizer, tmp_path / "out")
    if failure == "disk":
        assert "cannot be written: No space left on device" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_process_is_one_line(models, tmp_path, monkeypatch):
    """What happens under JAX and PyTorch when the process under TensorFlow fails."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    monkeypatch.setattr(source.sys, "executable", "/bin/false")
    lm = models["lstm"]
    with pytest.raises(
        OSError, match="cannot be written by TensorFlow: exit 1"
    ) as error:
        tg.export_saved_model(lm.model, lm.tokenizer, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_only_what_can_travel(models, tmp_path):
    model = models["lstm"].model
    with pytest.raises(ValueError, match="the tokenizer has 256 tokens, the model"):
        tg.export_saved_model(model, tg.ByteTokenizer(), tmp_path / "out")
    with pytest.raises(ValueError, match="must be a CharTokenizer or a ByteTokenizer"):
        tg.export_saved_model(model, "abc", tmp_path / "out")
    tokens = keras.Input((None,), dtype="int32")
    other = keras.Model(tokens, keras.ops.one_hot(tokens, 17))
    with pytest.raises(ValueError, match="must come from build_gpt or build_lstm"):
        tg.export_saved_model(other, models["lstm"].tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_loading_a_damaged_folder(quick, folders, tmp_path):
    (tmp_path / "saved_model.pb").write_text("of another program")
    with pytest.raises(FileNotFoundError, match="was not exported by keras_tinygpt"):
        tg.load(tmp_path)
    (tmp_path / "assets").mkdir()
    metadata = tmp_path / "assets" / "metadata.json"
    content = json.loads((folders["lstm"] / "assets" / "metadata.json").read_text())
    for damage, message in (
        ("{", "is damaged"),
        ("[]", "is damaged"),
        (json.dumps({**content, "config": {"size": 1}}), "is damaged"),
        (json.dumps({**content, "format_version": 99}), "format_version 99"),
        (json.dumps(content), "its weights are 0 bytes"),
    ):
        metadata.write_text(damage)
        with pytest.raises(ValueError, match=message) as error:
            tg.load(tmp_path)
        assert "\n" not in str(error.value)


def test_the_command(models, tmp_path, capsys, monkeypatch):
    lm = models["rotary"]
    path = str(tg.save(tmp_path / "run", lm.model, lm.tokenizer, {"nats": 1.5}))
    cli.main(["export", path])
    assert "saved_model: " in capsys.readouterr().out
    cli.main(["generate", f"{path}/saved_model", "né", "--max-new-tokens", "9"])
    assert capsys.readouterr().out == lm.generate("né", 9, use_cache=False) + "\n"
    assert tg.load(Path(path) / "saved_model").metrics == {"nats": 1.5}
    cli.main(["export", path, "--format", "weights"])
    fresh = tg.build_gpt(lm.model.config, seed=4)
    fresh.load_weights(Path(path) / "model.weights.h5")
    assert tg.fingerprint(fresh) == tg.fingerprint(lm.model)
    capsys.readouterr()
    for argv, message in (
        ([path], "exists already; --force replaces it"),
        ([path, "--format", "weights"], "exists already; --force replaces it"),
        ([f"{path}x"], "does not exist"),
        ([path, "--format", "weights", "--out", f"{path}/w.h5"], "end in .weights.h5"),
        ([path, "--format", "csv"], "--format"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["export", *argv])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and message in error
        assert len(error.splitlines()) == 1


def test_the_example(folders):
    script = ROOT / "examples" / "use_saved_model.py"
    assert len(script.read_text("utf-8").splitlines()) < 50
    code = (
        "import runpy, sys; sys.modules['keras_tinygpt'] = None; "
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(script), str(folders["lstm"]), "né"],
        capture_output=True,
        cwd=folders["rotary"].parent,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    output = result.stdout.decode("utf-8")
    assert "lstm {'vocab_size': 17" in output
    assert "(2, 3, 17)\n(2, 3, 17)\n(2, 17)" in output
