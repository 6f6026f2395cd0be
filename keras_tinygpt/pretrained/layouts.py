"""What GPT-2 and Llama files call the parts of a GPT: fields and tensors, both ways.

A family has three functions: its config.json as a `GPTConfig`, a `GPTConfig` as its
config.json, and the list of its tensors. A projection without a bias is one whose bias
is zero, so a family that has biases in some places only still fits `use_bias`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from keras_tinygpt.checks import check_float, check_int
from keras_tinygpt.models.gpt import GPTConfig

# Hugging Face's names; the GELU of a GPT here is the tanh approximation.
ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
GPT2_NAMES = {"gelu": "gelu_new", "relu": "relu", "relu2": "relu2"}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One weight of a GPT and where a file keeps it.

    Args:
        path: of the weight in the Keras model.
        names: of its tensors in the file; more than one are joined along the last axis
            of the Keras weight, as queries, keys and values are.
        transposed: whether the file keeps the transpose of each.
        sizes: last axis of each part, where there are several.
    """

    path: str
    names: tuple[str, ...]
    transposed: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def is_bias(self) -> bool:
        """Whether the tensor may be missing, which means zeros."""
        return self.path.endswith("/bias")


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of architecture, as `model_type` in config.json names it.

    Args:
        prefix: of all tensors but the head's.
        read: function of a config.json to a `GPTConfig`.
        tensors: function of a `GPTConfig` to its tensors, names without the prefix.
    """

    prefix: str
    read: Callable[[Mapping[str, Any]], GPTConfig]
    tensors: Callable[[GPTConfig], list[Tensor]]


class Fields:
    """The fields of a config.json; errors name the field and its value."""

    def __init__(self, content: Mapping[str, Any]):
        self.content = content

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where it is missing or null."""
        value = self.content.get(name)
        return default if value is None else value

    def size(self, name: str) -> int:
        """The value of a count that must be there."""
        if self.content.get(name) is None:
            raise ValueError(f"config.json must have {name}, got none")
        return check_int(name, self.content[name])

    def only(self, name: str, *values: Any) -> None:
        """ValueError unless the field is missing, null or one of `values`."""
        if self.get(name, values[0]) not in values:
            listed = " or ".join(repr(value) for value in values)
            raise ValueError(f"{name} must be {listed}, got {self.content[name]!r}")


def read_gpt2(content: Mapping[str, Any]) -> GPTConfig:
    """The shape of a GPT-2."""
    fields = Fields(content)
    fields.only("activation_function", *ACTIVATIONS)
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    dropout = fields.get("resid_pdrop", 0.1)
    fields.only("embd_pdrop", dropout)
    return GPTConfig(
        vocab_size=fields.size("vocab_size"),
        max_sequence_length=fields.get("n_positions", 1024),
        num_layers=fields.size("n_layer"),
        num_heads=fields.size("n_head"),
        hidden_dim=fields.size("n_embd"),
        intermediate_dim=fields.get("n_inner"),
        activation=ACTIVATIONS[fields.get("activation_function", "gelu_new")],
        dropout=dropout,
        attention_dropout=fields.get("attn_pdrop", 0.1),
        qkv_bias=True,
        tie_embeddings=fields.get("tie_word_embeddings", True),
        norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
    )


def gpt2_tensors(config: GPTConfig) -> list[Tensor]:
    """GPT-2 keeps kernels as Keras does, (in, out), and the head as (out, in)."""
    tensors = [
        Tensor("token_embedding/embeddings", ("wte.weight",)),
        Tensor("position_embedding/embeddings", ("wpe.weight",)),
    ]
    for index in range(config.num_layers):
        for ours, theirs in (
            ("attention/query_key_value", "attn.c_attn"),
            ("attention/output", "attn.c_proj"),
            ("feed_forward/intermediate", "mlp.c_fc"),
            ("feed_forward/output", "mlp.c_proj"),
        ):
            path, name = f"block_{index}/{ours}", f"h.{index}.{theirs}"
            tensors.append(Tensor(f"{path}/kernel", (f"{name}.weight",)))
            tensors.append(Tensor(f"{path}/bias", (f"{name}.bias",)))
        for ours, theirs in (("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2")):
            tensors += _layer_norm(f"block_{index}/{ours}", f"h.{index}.{theirs}")
    return [*tensors, *_layer_norm("final_norm", "ln_f"), *_head(config)]


def _layer_norm(path: str, name: str) -> list[Tensor]:
    return [
        Tensor(f"{path}/gamma", (f"{name}.weight",)),
        Tensor(f"{path}/beta", (f"{name}.bias",)),
    ]


def _head(config: GPTConfig) -> list[Tensor]:
    if config.tie_embeddings:
        return []
    return [
        Tensor("head/kernel", ("lm_head.weight",), transposed=True),
        Tensor("head/bias", ("lm_head.bias",)),
    ]


def read_llama(content: Mapping[str, Any]) -> GPTConfig:
    """The shape of a Llama, and of Mistral and Qwen2, which differ in few fields."""
    fields = Fields(content)
    kind = content["model_type"]
    fields.only("hidden_act", "silu", "swish")
    fields.only("partial_rotary_factor", 1.0)
    num_heads = fields.size("num_attention_heads")
    hidden_dim = fields.size("hidden_size")
    fields.only("head_dim", hidden_dim // num_heads)
    if kind == "qwen2":
        fields.only("use_sliding_window", False)
    window = content.get("sliding_window", 4096) if kind == "mistral" else None
    attention_bias = kind == "qwen2" or fields.get("attention_bias", False)
    output_bias = kind != "qwen2" and attention_bias
    return GPTConfig(
        vocab_size=fields.size("vocab_size"),
        max_sequence_length=fields.size("max_position_embeddings"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", num_heads),
        hidden_dim=hidden_dim,
        intermediate_dim=fields.size("intermediate_size"),
        positions="rotary",
        normalization="rms",
        activation="swiglu",
        attention_dropout=fields.get("attention_dropout", 0.0),
        qkv_bias=attention_bias,
        use_bias=output_bias or fields.get("mlp_bias", False),
        tie_embeddings=fields.get("tie_word_embeddings", False),
        attention_window=window,
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        max_wavelength=_rope_theta(fields),
    )


def _rope_theta(fields: Fields) -> float:
    """The base of the rotary frequencies; ValueError where they are scaled."""
    theta = fields.get("rope_theta", 10000.0)
    for name in ("rope_parameters", "rope_scaling"):  # by version of transformers
        rope = fields.get(name, {})
        if not isinstance(rope, dict):
            raise ValueError(f"{name} must be an object, got {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{name} must have rope_type 'default', got {kind!r}")
        Fields(rope).only("partial_rotary_factor", 1.0)
        theta = rope.get("rope_theta", theta)
    check_float("rope_theta", theta, low_open=True)
    return float(theta)


def llama_tensors(config: GPTConfig) -> list[Tensor]:
    """Llama keeps kernels as (out, in), and queries, keys and values apart."""
    tensors = [Tensor("token_embedding/embeddings", ("embed_tokens.weight",))]
    kv_dim = (config.num_kv_heads or config.num_heads) * config.head_dim
    sizes = (config.hidden_dim, kv_dim, kv_dim)
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        for ours, theirs in (
            ("attention/query_key_value", ("self_attn.q_proj", "self_attn.k_proj",
                                           "self_attn.v_proj")),
            ("attention/output", ("self_attn.o_proj",)),
            ("feed_forward/intermediate", ("mlp.up_proj",)),
            ("feed_forward/gate", ("mlp.gate_proj",)),
            ("feed_forward/output", ("mlp.down_proj",)),
        ):  # fmt: skip
            path = f"block_{index}/{ours}"
            kernels = tuple(f"{layer}.{name}.weight" for name in theirs)
            biases = tuple(f"{layer}.{name}.bias" for name in theirs)
            parts = sizes if len(theirs) > 1 else ()
            tensors.append(Tensor(f"{path}/kernel", kernels, True, parts))
            tensors.append(Tensor(f"{path}/bias", biases, False, parts))
        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("feed_forward_norm", "post_attention_layernorm"),
        ):
            path = f"block_{index}/{ours}/scale"
            tensors.append(Tensor(path, (f"{layer}.{theirs}.weight",)))
    return [*tensors, Tensor("final_norm/scale", ("norm.weight",)), *_head(config)]


_LLAMA = Family("model.", read_llama, llama_tensors)
FAMILIES = {
    "gpt2": Family("transformer.", read_gpt2, gpt2_tensors),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
}
