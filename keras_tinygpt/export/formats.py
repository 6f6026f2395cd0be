"""ONNX, LiteRT and OpenVINO: folders that generate without Keras and TensorFlow.

A folder holds the graphs of one cached step, `tokenizer.json` and `metadata.json`.
Text goes in and out in the program that runs them: see `examples/generate_onnx.py`,
`generate_litert.py` and `generate_openvino.py`.
"""

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.bundle import TOKENIZER, check_free, new_folder
from keras_tinygpt.export.graphs import StepGraphs
from keras_tinygpt.export.source import check_exportable, write_elsewhere
from keras_tinygpt.files import write_json

FORMAT_VERSION = 1
METADATA = "metadata.json"
OPSET = 18  # of ONNX; onnxruntime reads it since 1.14
WRITE = "XlaDynamicUpdateSlice"  # how TensorFlow writes into a cache


def export_onnx(
    model: keras.Model,
    tokenizer: Any,
    path: str | os.PathLike,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a folder with `model.onnx`: one graph for any batch and chunk length.

    Args:
        model: from `build_gpt` or `build_lstm`; exported in float32, dropout off.
        tokenizer: its tokenizer.
        path: the folder, written whole or not at all; its parents are made.
        overwrite: whether an existing folder at `path` is replaced.

    Returns:
        The folder.

    Raises:
        ValueError: for any other model, or one that disagrees with the tokenizer.
        FileExistsError: if `path` exists and `overwrite` is False.
        ImportError: if tf2onnx is missing.
    """
    return _export("onnx", model, tokenizer, path, overwrite)


def export_litert(
    model: keras.Model,
    tokenizer: Any,
    path: str | os.PathLike,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a folder with `model.tflite`: signatures `prefill` and `decode`.

    Shapes are static: one row, a chunk or a single token. Arguments, result and errors
    are those of `export_onnx`; no package beyond TensorFlow is needed.
    """
    return _export("litert", model, tokenizer, path, overwrite)


def export_openvino(
    model: keras.Model,
    tokenizer: Any,
    path: str | os.PathLike,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a folder with `model.xml` and `model.bin`, for any batch and length.

    On some processors OpenVINO computes in bfloat16 unless INFERENCE_PRECISION_HINT is
    set to f32. Arguments, result and errors are those of `export_onnx`; the package
    is openvino.
    """
    return _export("openvino", model, tokenizer, path, overwrite)


def _export(kind: str, model, tokenizer, path, overwrite: bool) -> Path:
    path = Path(path)
    check_exportable(model, tokenizer)
    check_free(path, overwrite)
    _check_package(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(path) as folder:
        if keras.backend.backend() == "tensorflow":
            write_format(kind, model, tokenizer, folder)
        else:
            write_elsewhere(kind, model, tokenizer, folder)
    return path


def write_format(kind: str, model, tokenizer, folder: Path) -> None:
    """Writes into an existing folder; needs the TensorFlow backend."""
    graphs = StepGraphs(model)
    sizes = _WRITERS[kind](graphs, folder)
    tokenizer.save(folder / TOKENIZER)
    write_json(folder / METADATA, _metadata(kind, model, graphs, sizes))


def _check_package(kind: str) -> None:
    """ImportError, with the extra to install, unless the converter is there."""
    # Without this, importing openvino reports its use over the network.
    sys.modules.setdefault("openvino_telemetry", None)
    try:
        if kind == "onnx":
            import tf2onnx  # noqa: F401
        elif kind == "openvino":
            import openvino  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{kind} export needs a package: pip install 'keras-tinygpt[{kind}]' "
            f"({error})"
        ) from error


def _write_onnx(graphs: StepGraphs, folder: Path) -> dict:
    import onnx
    import tf2onnx

    model, _ = tf2onnx.convert.from_function(
        graphs.function(None, None),
        graphs.signature(None, None),
        opset=OPSET,
        custom_op_handlers={WRITE: (_write_cache_onnx, [])},
        output_path=str(folder / "model.onnx"),
    )
    onnx.checker.check_model(model)  # tf2onnx only logs what it cannot convert
    return {name: ("model.onnx", None, None) for name in ("prefill", "decode")}


def _write_cache_onnx(graph, node, name, _) -> None:
    """cache[:, :start], new, cache[:, start + length:] joined along axis 1."""
    from onnx import TensorProto

    def constant(value):
        array = np.array([value], "int64")
        return graph.make_const(f"{name}/constant_{value}", array).output[0]

    def make(kind, *inputs, **attributes):
        return graph.make_node(kind, list(inputs), attr=attributes).output[0]

    cache, new, starts = node.input
    zero, one, two = constant(0), constant(1), constant(2)
    starts = make("Cast", starts, to=TensorProto.INT64)
    start = make("Slice", starts, one, two, zero)
    length = make("Slice", make("Shape", new), one, two, zero)
    before = make("Slice", cache, zero, start, one)
    far = constant(np.iinfo("int64").max)
    after = make("Slice", cache, make("Add", start, length), far, one)
    shapes, dtypes, outputs = node.output_shapes, node.output_dtypes, node.output
    graph.remove_node(name)
    graph.make_node(
        "Concat",
        [before, new, after],
        attr={"axis": 1},
        name=name,
        outputs=outputs,
        shapes=shapes,
        dtypes=dtypes,
    )


def _write_openvino(graphs: StepGraphs, folder: Path) -> dict:
    _check_package("openvino")
    import openvino
    from openvino.frontend.tensorflow import ConversionExtension

    function = graphs.function(None, None).get_concrete_function()
    model = openvino.convert_model(
        function, extension=ConversionExtension(WRITE, _write_cache_openvino)
    )
    names = {f"new_{name}" for name in graphs.state_shapes} | {"logits"}
    for output in model.outputs:  # beside them TensorFlow's own
        output.get_tensor().set_names(output.get_names() & names)
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
    return {name: ("model.xml", None, None) for name in ("prefill", "decode")}


def _write_cache_openvino(node) -> list:
    """The same as `_write_cache_onnx`."""
    from openvino import opset13 as ov

    cache, new, starts = (node.get_input(number) for number in range(3))
    one, two = ov.constant([1]), ov.constant([2])
    start = ov.convert(ov.slice(starts, one, two, one), "i64")
    length = ov.slice(ov.shape_of(new), one, two, one)
    far = ov.constant([np.iinfo("int64").max])
    before = ov.slice(cache, ov.constant([0]), start, one, one)
    after = ov.slice(cache, ov.add(start, length), far, one, one)
    return ov.concat([before, new, after], 1).outputs()


def _write_litert(graphs: StepGraphs, folder: Path) -> dict:
    import tensorflow as tf

    lengths = {"prefill": graphs.stepper.chunk, "decode": 1}
    functions = {name: graphs.function(1, length) for name, length in lengths.items()}
    with tempfile.TemporaryDirectory() as saved_model:
        tf.saved_model.save(tf.Module(), saved_model, signatures=functions)
        converter = tf.lite.TFLiteConverter.from_saved_model(
            saved_model, signature_keys=list(functions)
        )
        (folder / "model.tflite").write_bytes(converter.convert())
    return {name: ("model.tflite", 1, length) for name, length in lengths.items()}


_WRITERS = {"onnx": _write_onnx, "litert": _write_litert, "openvino": _write_openvino}
FORMATS = tuple(_WRITERS)


def _metadata(kind: str, model, graphs: StepGraphs, sizes: dict) -> dict:
    """What `metadata.json` holds: all a program needs to call the graphs."""
    stepper = graphs.stepper
    return {
        "format_version": FORMAT_VERSION,
        "format": kind,
        **({"opset": OPSET} if kind == "onnx" else {}),
        "architecture": type(model).__name__.lower(),
        "config": dataclasses.asdict(model.config),
        "window": stepper.window,
        "chunk": stepper.chunk,
        "segment": stepper.segment,
        "state": graphs.state_shapes,
        "graphs": {
            name: {"file": file, **graphs.describe(batch_size, length)}
            for name, (file, batch_size, length) in sizes.items()
        },
    }
