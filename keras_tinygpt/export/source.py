"""What every export starts from: a checked model, float32, under TensorFlow.

Exports are written by TensorFlow; from JAX and PyTorch a bundle is handed to a second
process that runs it, `python -m keras_tinygpt.export KIND BUNDLE FOLDER`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras

from keras_tinygpt import bundle
from keras_tinygpt.export.reading import ARCHITECTURES
from keras_tinygpt.text import ByteTokenizer, CharTokenizer


def check_exportable(model: keras.Model, tokenizer: Any) -> None:
    """Raises ValueError for kinds that have no graph, or if the two disagree."""
    if not isinstance(model, tuple(ARCHITECTURES.values())):
        raise ValueError(
            f"model must come from build_gpt or build_lstm, got {type(model).__name__}"
        )
    if not isinstance(tokenizer, (CharTokenizer, ByteTokenizer)):
        raise ValueError(
            "tokenizer must be a CharTokenizer or a ByteTokenizer to be exported in "
            f"this format, got {type(tokenizer).__name__}"
        )
    check_plain_pair(model, tokenizer)


def check_plain_pair(model: keras.Model, tokenizer: Any) -> None:
    """Raises ValueError for a quantized model, or one that has another vocabulary."""
    if model.quantization is not None:
        raise ValueError(
            f"model must not be quantized to be exported, got {model.quantization}"
        )
    bundle.check_pair(model, tokenizer)


def float32_copy(model: keras.Model) -> keras.Model:
    """The same model with float32 arithmetic, and kernels that run on any device."""
    copy = type(model)(model.config, seed=model.seed, dtype="float32")
    for layer in copy.layers:
        if isinstance(layer, keras.layers.LSTM):
            layer.use_cudnn = False  # a graph made with it runs on GPUs only
    copy.set_weights(bundle.plain_model(model).get_weights())
    return copy


def write_elsewhere(
    kind: str, model, tokenizer, folder: Path, metrics: dict[str, Any] | None = None
) -> None:
    """Has a process with the TensorFlow backend fill a folder that exists."""
    with tempfile.TemporaryDirectory(prefix="keras-tinygpt-") as temporary:
        saved = bundle.save(Path(temporary) / "bundle", model, tokenizer, metrics)
        root = Path(__file__).resolve().parents[2]
        search = [str(root), os.environ.get("PYTHONPATH", "")]
        result = subprocess.run(
            [sys.executable, "-m", "keras_tinygpt.export", kind, saved, folder],
            env={
                **os.environ,
                "KERAS_BACKEND": "tensorflow",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONPATH": os.pathsep.join(filter(None, search)),
            },
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit {result.returncode}"]
        raise OSError(f"{kind} cannot be written by TensorFlow: {lines[-1]}")
