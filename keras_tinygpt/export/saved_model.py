"""A model as a TensorFlow SavedModel: text in, text out, without this package."""

import os
import tempfile
from pathlib import Path
from typing import Any

import keras

from keras_tinygpt import bundle
from keras_tinygpt.export.reading import ARCHITECTURES, FORMAT_VERSION, METADATA
from keras_tinygpt.export.source import (
    check_exportable,
    float32_copy,
    write_elsewhere,
)
from keras_tinygpt.files import sealed, write_json
from keras_tinygpt.text import ByteTokenizer, CharTokenizer


def export_saved_model(
    model: keras.Model,
    tokenizer: CharTokenizer | ByteTokenizer,
    path: str | os.PathLike,
    *,
    metrics: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a SavedModel folder, whole or not at all, from any backend.

    Loading it takes TensorFlow alone: `tf.saved_model.load(path)` has the endpoints
    below as functions, with these arguments in this order, and as `signatures` with
    named inputs and outputs; `keras.layers.TFSMLayer` takes their names. Inference is
    float32 whatever the dtype policy of `model`, and dropout is off. Token ids are
    int32: int64 tensors are refused; the functions cast arrays and lists.

    `serve(tokens (B, T)) -> logits (B, T, V)`, also the serving default. T is at most
        the window of a GPT.
    `prefill(tokens (B, T), row_offsets (B,)) -> logits (B, V) and the caches by name`:
        the logits of the last column, and keys_i and values_i (B * N_kv, S, H) for each
        block, or h_i and c_i (B, hidden_dim) for each LSTM layer. Rows are padded on
        the left, row_offsets counts that padding.
    `decode(tokens (B,), index, row_offsets (B,), caches) -> the same`: one more token
        for each row; index is the number of columns read before. Caches are keyword
        arguments.
    `generate(tokens (B, T), row_offsets, uniforms (B, N), temperature, top_k, top_p,
        min_p, repetition_penalty, allowed (V,)) -> tokens (B, N)`: the tokens that
        `keras_tinygpt.generate` adds if it draws these uniforms. T has no limit.
    `generate_text(prompts (B,), max_new_tokens, seed, temperature, top_k, top_p,
        stop) -> texts (B,)`: UTF-8 strings; the text that `LanguageModel.generate`
        returns. Row r draws with seed + r; a negative int64 seed stands for
        seed + 2**64. An empty stop is none. Lone surrogates, which UTF-8 lacks, are
        refused in prompts and read U+FFFD where a byte model makes one.
    `metadata() -> string`: JSON with config, tokenizer, metrics and versions.

    A top_k of 0 and top_p of 1.0 keep every token. XLA compiles the loops at the first
    call for each number of rows. Bad input ends with a
    `tf.errors.InvalidArgumentError` that names the rule.

    Args:
        model: from `build_gpt` or `build_lstm`.
        tokenizer: a `CharTokenizer` or `ByteTokenizer`; its vocab_size is the model's.
        path: the folder; its parents are made.
        metrics: anything JSON can hold; kept in the metadata.
        overwrite: whether an existing folder at `path` is replaced.

    Returns:
        The folder.

    Raises:
        ValueError: if the model is of another kind, or tokenizer and model disagree.
        FileExistsError: if `path` exists and `overwrite` is False.
        OSError: if the folder cannot be written.
    """
    path = Path(path)
    check_exportable(model, tokenizer)
    bundle.check_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with bundle.new_folder(path) as folder:
        if keras.backend.backend() == "tensorflow":
            write_saved_model(model, tokenizer, folder, metrics or {})
        else:
            write_elsewhere("saved_model", model, tokenizer, folder, metrics)
    return path


def write_saved_model(model, tokenizer, folder: Path, metrics: dict[str, Any]) -> None:
    """Writes into an existing folder; needs the TensorFlow backend."""
    import tensorflow as tf  # Only where it runs: JAX and PyTorch users do without.

    from keras_tinygpt.export.endpoints import make_module

    copy = float32_copy(model)
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    with tempfile.TemporaryDirectory(prefix="keras-tinygpt-") as temporary:
        metadata = Path(temporary, METADATA)
        write_json(metadata, sealed(_describe(copy, tokenizer, metrics)))
        module, signatures = make_module(copy, tokenizer, str(metadata))
        try:
            tf.saved_model.save(module, str(folder), signatures, options)
        except tf.errors.OpError as error:  # a full disk, among others
            message = f"the SavedModel cannot be written: {error.message}"
            raise OSError(message) from error


def _describe(model, tokenizer, metrics: dict[str, Any]) -> dict[str, Any]:
    """The metadata."""
    from keras_tinygpt import __version__

    config = model.get_config()
    kinds = {kind: name for name, kind in ARCHITECTURES.items()}
    return {
        "format_version": FORMAT_VERSION,
        "keras_tinygpt": __version__,
        "architecture": kinds[type(model)],
        "config": config["config"],
        "seed": config["seed"],
        "tokenizer": tokenizer.get_config(),
        "metrics": metrics,
        "weights": [weight.path for weight in model.weights],
    }
