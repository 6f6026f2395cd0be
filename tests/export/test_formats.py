"""ONNX, LiteRT and OpenVINO folders against the Keras models they came from.

Under another backend than TensorFlow, which exports in a second process, one model of
each architecture is compared.
"""

import importlib
import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import ROOT, to_numpy

import keras_tinygpt as tg
from keras_tinygpt.export import __main__ as export_process
from keras_tinygpt.export import formats

# `import openvino` forks a process that reports the import over the network.
sys.modules.setdefault("openvino_telemetry", None)

EXAMPLES = ROOT / "examples"
TEXT = "the bell rang; no one came."
WINDOW = 19
CONFIGS = {
    "learned": {},
    "rotary": {
        "positions": "rotary",
        "num_kv_heads": 2,
        "qk_norm": True,
        "normalization": "rms",
        "activation": "swiglu",
    },
    "alibi": {"positions": "alibi", "attention_window": 5, "tie_embeddings": True},
}
NAMES, KINDS = [*CONFIGS, "lstm"], list(formats.FORMATS)
if keras.backend.backend() != "tensorflow":  # the second process runs the same code
    NAMES, KINDS = ["learned", "lstm"], ["litert"]
SLOW_NAMES = ("rotary", "alibi")  # conversion takes longest of all
RUNTIMES = {"onnx": "onnxruntime", "litert": "ai_edge_litert", "openvino": "openvino"}
CONVERTERS = {"onnx": "tf2onnx", "litert": "tensorflow", "openvino": "openvino"}
EXPORTS = {
    "onnx": formats.export_onnx,
    "litert": formats.export_litert,
    "openvino": formats.export_openvino,
}
every_format = pytest.mark.parametrize("kind", KINDS)
every_model = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW_NAMES else name
        for name in NAMES
    ],
)


def need(kind):
    for package in (CONVERTERS[kind], RUNTIMES[kind]):
        pytest.importorskip(package, reason=f"needs the extra [{kind}]")


@pytest.fixture(scope="module")
def tokenizer():
    return tg.CharTokenizer.from_text(TEXT)


@pytest.fixture(scope="module")
def models(tokenizer):
    """Untrained, with sharpened logits so that close calls are rare."""
    size = tokenizer.vocab_size
    built = {
        name: tg.build_gpt(
            tg.GPTConfig(size, WINDOW, 2, 4, hidden_dim=24, dropout=0.1, **changes),
            seed=1,
        )
        for name, changes in CONFIGS.items()
    }
    built["lstm"] = tg.build_lstm(
        tg.LSTMConfig(size, hidden_dim=23, num_layers=2, dropout=0.1), seed=1
    )
    for model in built.values():
        for weight in model.weights:
            if weight.path.startswith(("head", "token_embedding")):
                weight.assign(weight * 5.0)
    return built


@pytest.fixture(scope="module")
def exported(models, tokenizer, tmp_path_factory):
    """Function of a format and a model to its folder, written once."""
    folders = {}

    def export(kind, name):
        need(kind)
        if (kind, name) not in folders:
            path = tmp_path_factory.mktemp("formats") / f"{kind}-{name}"
            EXPORTS[kind](models[name], tokenizer, path)
            folders[kind, name] = path
        return folders[kind, name]

    return export


@pytest.fixture
def example(monkeypatch):
    """Function of a script's name to its module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def metadata_of(folder):
    return json.loads((folder / "metadata.json").read_text("utf-8"))


@every_model
@every_format
def test_logits_of_every_step(exported, models, tokenizer, example, kind, name):
    folder = exported(kind, name)
    metadata = metadata_of(folder)
    step = example(f"generate_{kind}").load(folder, metadata)
    ids = tokenizer.encode(TEXT[:WINDOW]).tolist()
    expected = to_numpy(models[name](np.array([ids], "int32")))[0]  # (T, V)
    for length in (1, metadata["chunk"] - 1, metadata["chunk"] + 1):
        logits, state = example("text_loop").read(step, metadata, ids[:length])
        np.testing.assert_allclose(logits, expected[length - 1], atol=1e-4)
        for index in range(length, len(ids)):
            tokens = np.array([[ids[index]]], "int32")
            logits, state = step(tokens, index, 0, state)
            np.testing.assert_allclose(logits, expected[index], atol=1e-4)


@pytest.mark.backend
@every_model
@every_format
def test_tokens_are_those_of_generate(exported, models, tokenizer, example, kind, name):
    """Past the window and from a prompt that is longer, greedy and drawn."""
    folder = exported(kind, name)
    metadata = metadata_of(folder)
    step = example(f"generate_{kind}").load(folder, metadata)
    for length, temperature in ((3, 0.0), (WINDOW, 0.9), (WINDOW + 5, 1.3)):
        ids = tokenizer.encode(TEXT[:length]).tolist()
        expected = tg.generate(
            models[name], ids, 40, temperature=temperature, seed=3, context="slide"
        )
        new = example("text_loop").generate(step, metadata, ids, 40, temperature, 3)
        assert ids + list(new) == expected.tolist()


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
@every_model
def test_rows_of_different_lengths(exported, models, tokenizer, kind, name):
    """Any batch and any chunk length, padding on the left."""
    folder = exported(kind, name)
    run = whole_batches(kind, folder)
    metadata = metadata_of(folder)
    texts = [tokenizer.encode(text) for text in (TEXT[:11], TEXT[5:12])]
    offsets = np.array([0, 4], "int32")
    tokens = np.zeros((2, 11), "int32")
    for row, offset, text in zip(tokens, offsets, texts, strict=True):
        row[offset:] = text
    state = {
        key: np.zeros((2 * rows, *shape), "float32")
        for key, (rows, *shape) in metadata["state"].items()
    }
    for start, length in ((0, 7), (7, 4)):
        outputs = run(
            {
                "tokens": tokens[:, start : start + length],
                "index": np.array(start, "int32"),
                "last": np.array(length - 1, "int32"),
                "row_offsets": offsets,
                **state,
            }
        )
        state = {key: outputs[f"new_{key}"] for key in state}
    for row, text in enumerate(texts):
        expected = to_numpy(models[name](text[None]))[0, -1]
        np.testing.assert_allclose(outputs["logits"][row], expected, atol=1e-4)


def whole_batches(kind, folder):
    """Function of all inputs to all outputs, by name."""
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx")
        names = [output.name for output in session.get_outputs()]
        return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
    import openvino

    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(folder / "model.xml", "CPU", hint)
    return lambda inputs: {
        output.any_name: value for output, value in model(inputs).items()
    }


@every_format
def test_scripts_run_without_keras(exported, models, tokenizer, kind):
    folder = exported(kind, "learned")
    code = """if True:
        import runpy, sys
        sys.modules["openvino_telemetry"] = None
        sys.argv.pop(0)
        runpy.run_path(sys.argv[0], run_name="__main__")
        assert not {"keras", "tensorflow"} & set(sys.modules)
    """
    script = f"generate_{kind}.py"
    assert len((EXAMPLES / script).read_text("utf-8").splitlines()) < 90
    argv = [script, str(folder), "the bell", "--max-new-tokens", "25"]
    argv += ["--temperature", "0.7", "--seed", "5"]
    result = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        cwd=EXAMPLES,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lm = tg.LanguageModel(models["learned"], tokenizer)
    settings = {"temperature": 0.7, "seed": 5, "context": "slide"}
    assert result.stdout == lm.generate("the bell", 25, **settings) + "\n"


@every_model
@every_format
def test_metadata_describes_the_graphs(exported, models, kind, name):
    folder = exported(kind, name)
    metadata = metadata_of(folder)
    assert metadata["format_version"] == formats.FORMAT_VERSION
    assert metadata["architecture"] == ("lstm" if name == "lstm" else "gpt")
    config = type(models[name].config)(**metadata["config"])
    assert config == models[name].config
    assert metadata["window"] == (None if name == "lstm" else WINDOW)
    graphs = metadata["graphs"]
    assert {graph["file"] for graph in graphs.values()} <= {
        path.name for path in folder.iterdir()
    }
    assert list(graphs) == ["prefill", "decode"]
    for graph_name, described in actual_graphs(kind, folder).items():
        for part in ("inputs", "outputs"):
            stated = graphs[graph_name][part]
            assert set(stated) == set(described[part])
            for key, shape in described[part].items():
                for size, actual in zip(stated[key]["shape"], shape, strict=True):
                    # OpenVINO leaves open how many slots a written cache has.
                    assert size == actual or (actual is None and part == "outputs")


def actual_graphs(kind, folder):
    """Shapes of inputs and outputs by name, as the runtime reports them."""
    if kind == "litert":
        from ai_edge_litert.interpreter import Interpreter

        runners = {
            name: Interpreter(str(folder / "model.tflite")).get_signature_runner(name)
            for name in ("prefill", "decode")
        }
        return {
            name: {
                "inputs": shapes_of(runner.get_input_details()),
                "outputs": shapes_of(runner.get_output_details()),
            }
            for name, runner in runners.items()
        }
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx")
        parts = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
        shapes = {
            part: {x.name: [known(size) for size in x.shape] for x in tensors}
            for part, tensors in parts.items()
        }
    else:
        import openvino

        model = openvino.Core().read_model(folder / "model.xml")
        parts = {"inputs": model.inputs, "outputs": model.outputs}
        shapes = {
            part: {
                x.any_name: [
                    None if size.is_dynamic else size.get_length()
                    for size in x.partial_shape
                ]
                for x in tensors
            }
            for part, tensors in parts.items()
        }
    return {"prefill": shapes, "decode": shapes}


def shapes_of(details):
    return {name: detail["shape"].tolist() for name, detail in details.items()}


def known(size):
    return size if isinstance(size, int) else None


def test_other_precisions_are_exported_in_float32(models, tokenizer, example, tmp_path):
    need("litert")
    model = models["learned"]
    low = type(model)(model.config, dtype="mixed_bfloat16")
    low.set_weights(model.get_weights())
    folder = formats.export_litert(low, tokenizer, tmp_path / "low")
    metadata = metadata_of(folder)
    step = example("generate_litert").load(folder, metadata)
    ids = tokenizer.encode(TEXT[:7])
    logits, _ = example("text_loop").read(step, metadata, ids.tolist())
    expected = to_numpy(model(ids[None]))[0, -1]
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_byte_tokens(example):
    text_loop = example("text_loop")
    content = tg.ByteTokenizer().get_config()
    ids = text_loop.encode(content, "né")
    assert ids == tg.ByteTokenizer().encode("né").tolist()
    assert text_loop.decode(content, ids) == "né"


def test_a_bundle_is_exported_from_the_command_line(models, tokenizer, tmp_path):
    """What the export does under JAX and PyTorch, here in this process."""
    bundle = tg.save(tmp_path / "bundle", models["lstm"], tokenizer)
    (tmp_path / "out").mkdir()
    export_process.main("litert", str(bundle), str(tmp_path / "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.tflite", "metadata.json", "tokenizer.json"}


@pytest.mark.backend
@every_format
def test_bad_requests_write_nothing(models, tokenizer, tmp_path, monkeypatch, kind):
    model, export = models["learned"], EXPORTS[kind]
    other = keras.Sequential([keras.layers.Dense(tokenizer.vocab_size)])
    other.build((None, 3))
    with pytest.raises(ValueError, match="model must come from build_gpt or"):
        export(other, tokenizer, tmp_path / "out")
    with pytest.raises(ValueError, match="tokenizer and model must agree"):
        export(model, tg.ByteTokenizer(), tmp_path / "out")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError, match="exists already"):
        export(model, tokenizer, tmp_path)

    if kind != "litert":
        monkeypatch.setitem(sys.modules, CONVERTERS[kind], None)
        extra = rf"pip install 'keras-tinygpt\[{kind}\]'"
        with pytest.raises(ImportError, match=extra):
            export(model, tokenizer, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_conversion_leaves_no_folder(models, tokenizer, tmp_path, monkeypatch):
    def fail(graphs, folder):
        (folder / "model.tflite").write_bytes(b"half")
        raise RuntimeError("no room")

    monkeypatch.setitem(formats._WRITERS, "litert", fail)
    with pytest.raises(RuntimeError, match="no room"):
        formats.export_litert(models["lstm"], tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_table_of_the_readme():
    """Every cell says what the tests above prove under its backend."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.split("## Export")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `export_(\w+)` \|(.*)\|$", section, re.MULTILINE)
    assert [kind for kind, _ in rows] == ["saved_model", *formats.FORMATS]
    for _, cells in rows:
        assert [cell.strip() for cell in cells.split("|")] == ["yes"] * 6
