"""Writes a GPT as a folder that transformers loads: GPT-2, Llama, Mistral or Qwen2."""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.bundle import check_free, new_folder, plain_model
from keras_tinygpt.export.source import check_plain_pair
from keras_tinygpt.files import write_json
from keras_tinygpt.models.gpt import GPT, GPTConfig
from keras_tinygpt.pretrained.layouts import FAMILIES, GPT2_NAMES, Tensor
from keras_tinygpt.pretrained.reading import CONFIG, WEIGHTS, safetensors_library
from keras_tinygpt.pretrained.tokens import write_tokenizer

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
EXACT = 1e-5  # largest error of a head bias that is moved into the last norm


def export_safetensors(
    model: keras.Model,
    tokenizer: Any,
    path: str | os.PathLike,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes `config.json`, `model.safetensors` and `tokenizer.json`, in float32.

    Rotary models become Llama (Mistral with an attention_window, Qwen2 with biases on
    queries, keys and values alone), others GPT-2; transformers then gives the same
    logits. What those families lack is written as what they have: sinusoidal positions
    as a table, embedding scales as larger embeddings, a head bias as an offset of the
    last norm where one exists. `keras_tinygpt.from_pretrained` reads the folder back.

    Args:
        model: from `build_gpt`.
        tokenizer: its tokenizer.
        path: the folder, written whole or not at all; its parents are made.
        overwrite: whether an existing folder at `path` is replaced.

    Returns:
        The folder.

    Raises:
        ValueError: if neither family has what the model has; names field and value.
        FileExistsError: if `path` exists and `overwrite` is False.
        ImportError: if safetensors is missing.
    """
    path = Path(path)
    if not isinstance(model, GPT):
        raise ValueError(
            "model must come from build_gpt to be written as safetensors, got "
            f"{type(model).__name__}"
        )
    check_plain_pair(model, tokenizer)
    check_free(path, overwrite)
    library = safetensors_library()
    kind, content = describe(model.config)
    weights = _fitted_weights(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(path) as folder:
        fill = kind == "gpt2" or model.config.use_bias
        tensors = _split(FAMILIES[kind].tensors(model.config), weights, fill)
        prefix = FAMILIES[kind].prefix
        tensors = {
            name if name.startswith("lm_head") else prefix + name: value
            for name, value in tensors.items()
        }
        library.numpy.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)  # the library lets none but the owner read
        write_json(folder / CONFIG, content)
        write_json(folder / "tokenizer.json", write_tokenizer(tokenizer))
    return path


def describe(config: GPTConfig) -> tuple[str, dict[str, Any]]:
    """The family a model is written as and its config.json, or ValueError."""
    if config.positions == "rotary":
        kind, content = _as_llama(config)
    else:
        kind, content = "gpt2", _as_gpt2(config)
    return kind, {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        **content,
    }


def _only(family: str, config: GPTConfig, **rules: tuple[Any, ...]) -> None:
    """ValueError unless each field has one of the values its family has."""
    for name, values in rules.items():
        value = getattr(config, name)
        if value not in values:
            listed = " or ".join(repr(allowed) for allowed in values)
            raise ValueError(
                f"{name} must be {listed} for a model with positions="
                f"{config.positions!r} to be written as {family}, got {value!r}"
            )


def _as_gpt2(config: GPTConfig) -> dict[str, Any]:
    _only(
        "GPT-2",
        config,
        positions=("learned", "sinusoidal"),
        normalization=("layer",),
        norm_position=("pre",),
        activation=tuple(GPT2_NAMES),
        num_kv_heads=(None, config.num_heads),
        attention_window=(None,),
        qk_norm=(False,),
        scale_embeddings=(False,) if config.tie_embeddings else (False, True),
    )
    return {
        "n_positions": config.max_sequence_length,
        "n_embd": config.hidden_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_dim,
        "activation_function": GPT2_NAMES[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _as_llama(config: GPTConfig) -> tuple[str, dict[str, Any]]:
    _only(
        "Llama",
        config,
        normalization=("rms",),
        norm_position=("pre",),
        activation=("swiglu",),
        qk_norm=(False,),
        scale_embeddings=(False,) if config.tie_embeddings else (False, True),
    )
    if config.attention_window is not None:
        _only("Mistral", config, qkv_bias=(False,), use_bias=(False,))
    theta = {"rope_type": "default", "rope_theta": config.max_wavelength}
    content = {
        "max_position_embeddings": config.max_sequence_length,
        "hidden_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_dim or 4 * config.hidden_dim,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.max_wavelength,  # as transformers 4 reads it
        "rope_parameters": theta,
    }
    if config.attention_window is not None:
        return "mistral", {**content, "sliding_window": config.attention_window}
    if config.qkv_bias and not config.use_bias:
        return "qwen2", {**content, "use_sliding_window": False}
    biases = {"attention_bias": config.use_bias, "mlp_bias": config.use_bias}
    return "llama", {**content, **biases}


def _fitted_weights(model: GPT) -> dict[str, np.ndarray]:
    """float32 weights by path, with what no family has written as what it has."""
    config = model.config
    weights = {
        weight.path: np.asarray(keras.ops.convert_to_numpy(weight)).astype("float32")
        for weight in plain_model(model).weights
    }
    if config.scale_embeddings:
        weights["token_embedding/embeddings"] *= np.float32(config.hidden_dim**0.5)
    if config.positions == "sinusoidal":
        layer = model.get_layer("position_encoding")
        empty = np.zeros((1, config.max_sequence_length, config.hidden_dim), "float32")
        table = keras.ops.convert_to_numpy(layer(empty))[0]
        weights["position_embedding/embeddings"] = np.asarray(table, "float32")
    _move_head_bias(weights)
    return weights


def _move_head_bias(weights: dict[str, np.ndarray]) -> None:
    """Adds x to the offset of the last norm, where x @ head = bias.

    There is such an x where the vocabulary is no larger than the model is wide.
    """
    bias = weights.pop("head/bias", None)
    if bias is None or not bias.any():
        return
    kernel = weights["head/kernel"].astype("float64")  # (D, V)
    offset = np.linalg.lstsq(kernel.T, bias.astype("float64"), rcond=None)[0]
    if "final_norm/beta" not in weights or np.abs(offset @ kernel - bias).max() > EXACT:
        raise ValueError(
            "the head must have no bias other than 0 to be written as safetensors, got "
            f"one up to {np.abs(bias).max():.3g}; build it with use_bias=False or "
            "tie_embeddings=True"
        )
    weights["final_norm/beta"] += offset.astype("float32")


def _split(
    layout: list[Tensor], weights: dict[str, np.ndarray], fill: bool
) -> dict[str, np.ndarray]:
    """The tensors of a file by name; `fill` makes biases that the model lacks zeros."""
    tensors = {}
    for tensor in layout:
        if tensor.path in weights:
            value = weights[tensor.path]
        elif fill and tensor.path != "head/bias":  # no family has that one
            kernel = weights[tensor.path.removesuffix("/bias") + "/kernel"]
            value = np.zeros(kernel.shape[-1], "float32")
        else:
            continue
        parts = np.split(value, np.cumsum(tensor.sizes)[:-1], axis=-1)
        for name, part in zip(tensor.names, parts, strict=True):
            part = part.T if tensor.transposed else part
            tensors[name] = np.ascontiguousarray(part)
    return tensors
