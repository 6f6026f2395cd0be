"""The decoder-only transformer: its config, its presets and the functional model.

logits = head(norm(block_L(... block_1(embed(tokens) + positions)))). The cached decode
model over the same layers lives in `keras_tinygpt.generation`.
"""

import dataclasses
import math
from typing import Any

import keras

from keras_tinygpt.checks import check_bool, check_choice, check_float, check_int
from keras_tinygpt.layers import (
    LearnedPositions,
    SinusoidalPositions,
    TransformerBlock,
)
from keras_tinygpt.layers.blocks import (
    ACTIVATIONS,
    NORM_EPSILON,
    NORM_POSITIONS,
    NORMALIZATIONS,
    make_norm,
    offset_seed,
)
from keras_tinygpt.layers.dense import Dense
from keras_tinygpt.layers.dropout import Dropout
from keras_tinygpt.layers.positions import MAX_WAVELENGTH
from keras_tinygpt.models.configured import ConfiguredModel, resolve_policy
from keras_tinygpt.models.initialization import (
    INITIAL_LOGIT_STDDEV,
    fan_in_stddev,
    initialize,
)

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "none")


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Args:
        vocab_size: number of token ids V.
        max_sequence_length: the window T, tokens a prediction can depend on.
        num_layers: number of blocks.
        num_heads: query heads per block; must divide hidden_dim.
        num_kv_heads: key and value heads per block; None means num_heads.
        hidden_dim: width D of the token vectors.
        intermediate_dim: width of the feed-forward layers; None means 4 x hidden_dim.
        positions: learned, sinusoidal, rotary, alibi or none.
        normalization: layer or rms.
        norm_position: pre (before each sublayer) or post (after each addition).
        activation: gelu (tanh approximation), relu, relu2 or swiglu.
        dropout: share of the input vectors and of each sublayer output dropped.
        attention_dropout: share of the attention weights dropped.
        qkv_bias: whether query, key and value projections have a bias.
        use_bias: whether all other projections, the untied head included, have one.
        qk_norm: whether queries and keys are RMS-normalised.
        kv_shift: whether keys and values are mixed with those of the token before, by
            a learned share per head; not with attention_window.
        tie_embeddings: whether the head shares the token embedding (and has no bias).
        scale_embeddings: whether token vectors are multiplied by sqrt(hidden_dim).
        attention_window: tokens each query reads in each block; None means all.
        norm_epsilon: added to the variance, or the mean square, in every norm.
        max_wavelength: base of the frequencies of rotary and sinusoidal positions.
    """

    vocab_size: int
    max_sequence_length: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    hidden_dim: int = 128
    intermediate_dim: int | None = None
    positions: str = "learned"
    normalization: str = "layer"
    norm_position: str = "pre"
    activation: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    qkv_bias: bool = False
    use_bias: bool = True
    qk_norm: bool = False
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    attention_window: int | None = None
    kv_shift: bool = False
    norm_epsilon: float = NORM_EPSILON
    max_wavelength: float = MAX_WAVELENGTH

    def __post_init__(self):
        for name in ("vocab_size", "max_sequence_length", "num_layers", "hidden_dim"):
            check_int(name, getattr(self, name))
        check_int("num_heads", self.num_heads)
        for name in ("num_kv_heads", "intermediate_dim", "attention_window"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))
        check_choice("positions", self.positions, POSITIONS)
        check_choice("normalization", self.normalization, NORMALIZATIONS)
        check_choice("norm_position", self.norm_position, NORM_POSITIONS)
        check_choice("activation", self.activation, ACTIVATIONS)
        for name in ("dropout", "attention_dropout"):
            check_float(name, getattr(self, name), 0.0, 1.0, high_open=True)
        for name in ("norm_epsilon", "max_wavelength"):
            check_float(name, getattr(self, name), low_open=True)
        for field in dataclasses.fields(self):
            if field.type is bool:
                check_bool(field.name, getattr(self, field.name))
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                f"hidden_dim must be divisible by num_heads={self.num_heads}, "
                f"got {self.hidden_dim}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.kv_shift and self.attention_window is not None:
            raise ValueError(
                "kv_shift needs attention_window=None, got "
                f"attention_window={self.attention_window}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                "rotary positions need an even hidden_dim / num_heads, "
                f"got {self.head_dim}"
            )
        if self.positions == "sinusoidal" and self.hidden_dim % 2:
            raise ValueError(
                f"sinusoidal positions need an even hidden_dim, got {self.hidden_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_dim // self.num_heads

    def least_weights(self) -> int:
        """A lower bound of the number of weights, known before a model is built."""
        wide = self.hidden_dim * (self.intermediate_dim or 4 * self.hidden_dim)
        block = 2 * self.hidden_dim**2 + 2 * wide  # query, output; feed-forward
        table = self.max_sequence_length if self.positions == "learned" else 0
        return self.hidden_dim * (self.vocab_size + table) + self.num_layers * block

    @classmethod
    def preset(cls, name: str, vocab_size: int, **changes: Any) -> "GPTConfig":
        """Returns the named shape: "book", "mini" or "tiny", with `changes` applied."""
        check_choice("preset", name, tuple(PRESETS))
        return cls(vocab_size=vocab_size, **{**PRESETS[name], **changes})


PRESETS: dict[str, dict[str, Any]] = {
    "book": {
        "max_sequence_length": 100,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_dim": 84,
        "intermediate_dim": 168,
        "positions": "sinusoidal",
        "activation": "relu",
        "qkv_bias": True,
        "scale_embeddings": True,
    },
    "mini": {"dropout": 0.1},
    "tiny": {
        "positions": "rotary",
        "normalization": "rms",
        "activation": "relu2",
        "qk_norm": True,
        "use_bias": False,
        "dropout": 0.2,
    },
}


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class GPT(ConfiguredModel):
    """Functional Keras model of a `GPTConfig`: int (B, T) -> float32 logits (B, T, V).

    A .keras file stores the config alone and rebuilds the graph from it. Use
    `build_gpt` to make one with seeded weights.

    Args:
        config: a `GPTConfig`.
        seed: seed of the dropouts.
        dtype: Keras dtype policy or its name; None means the global one. Logits are
            float32 under every policy.
    """

    config_class = GPTConfig

    def __init__(self, config: GPTConfig, seed: int = 0, dtype=None, name="gpt"):
        policy = resolve_policy(dtype)
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        embedding = _token_embedding(config, policy)
        x = embedding(tokens)  # (B, T, D)
        if config.scale_embeddings:
            x = keras.layers.Rescaling(
                math.sqrt(config.hidden_dim), dtype=policy, name="embedding_scale"
            )(x)
        if config.positions == "learned":
            x = LearnedPositions(
                config.max_sequence_length, dtype=policy, name="position_embedding"
            )(x)
        elif config.positions == "sinusoidal":
            x = SinusoidalPositions(
                config.max_wavelength, dtype=policy, name="position_encoding"
            )(x)
        if config.dropout:
            x = Dropout(
                config.dropout,
                seed=offset_seed(seed, 0),
                dtype=policy,
                name="input_dropout",
            )(x)
        for index in range(config.num_layers):
            x = _block(config, index, seed, policy)(x)
        if config.norm_position == "pre":
            x = make_norm(
                config.normalization, policy, "final_norm", config.norm_epsilon
            )(x)
        if config.tie_embeddings:
            logits = embedding(x, reverse=True)
            # Already float32, but Keras 3.15 declares it to be in the compute type.
            logits = keras.ops.cast(logits, "float32")
        else:
            logits = Dense(
                config.vocab_size,
                use_bias=config.use_bias,
                dtype="float32",
                name="head",
            )(x)
        super().__init__(inputs=tokens, outputs=logits, name=name)
        self._set_up(config, seed, policy)


def _token_embedding(config: GPTConfig, policy):
    return keras.layers.ReversibleEmbedding(
        config.vocab_size,
        config.hidden_dim,
        reverse_dtype="float32",
        dtype=policy,
        name="token_embedding",
    )


def _block(config: GPTConfig, index: int, seed: int, policy) -> TransformerBlock:
    in_attention = config.positions in ("rotary", "alibi")
    return TransformerBlock(
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        intermediate_dim=config.intermediate_dim,
        positions=config.positions if in_attention else "none",
        normalization=config.normalization,
        norm_position=config.norm_position,
        activation=config.activation,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        qkv_bias=config.qkv_bias,
        use_bias=config.use_bias,
        qk_norm=config.qk_norm,
        kv_shift=config.kv_shift,
        attention_window=config.attention_window,
        norm_epsilon=config.norm_epsilon,
        max_wavelength=config.max_wavelength,
        seed=offset_seed(seed, 1 + 3 * index),
        dtype=policy,
        name=f"block_{index}",
    )


def build_gpt(config: GPTConfig, seed: int = 0, dtype=None) -> GPT:
    """Returns a GPT with weights that depend on `seed` alone, equal on every backend.

    Kernels are normal with standard deviation `1 / sqrt(fan in)`, those that write to
    the residual stream divided by `sqrt(2 num_layers)`; the head starts near uniform.

    Args:
        config: the shape.
        seed: from 0 to 2**32 - 1; also seeds the dropouts.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; None means the global one.

    Returns:
        A functional `keras.Model`, int (B, T) -> float32 logits (B, T, V).

    Reference: Radford et al., 2019 (residual scaling).
    """
    check_int("seed", seed, 0, 2**32 - 1)
    model = GPT(config, seed=seed, dtype=dtype)
    logit_stddev = INITIAL_LOGIT_STDDEV / math.sqrt(config.hidden_dim)

    def stddev(path: str, shape: tuple[int, ...]) -> float:
        if path.startswith("token_embedding"):
            if config.tie_embeddings:  # a token's own logit stays below stddev * D
                return min(logit_stddev, 1.0 / config.hidden_dim)
            return 1.0 / math.sqrt(config.hidden_dim)
        if path.startswith("position_embedding"):
            return 0.02
        if path.startswith("head"):
            return logit_stddev
        residual = path.endswith("output/kernel")
        scale = 1.0 / math.sqrt(2 * config.num_layers) if residual else 1.0
        return scale * fan_in_stddev(shape)

    initialize(model, seed, stddev)
    return model


def remat_scope(config: GPTConfig) -> keras.RematScope:
    """A scope to build a model in that takes less memory to train, and more time.

    Of each block only the input is kept for the backward pass, which computes the rest
    of it anew. The gradients are the same, which takes a model without dropout.

    Example:
        >>> import keras_tinygpt as tg
        >>> config = tg.GPTConfig(vocab_size=11, hidden_dim=8)
        >>> with remat_scope(config):
        ...     model = tg.build_gpt(config)

    Reference: Chen et al., 2016.
    """
    if not isinstance(config, GPTConfig):
        raise ValueError(
            f"config must be a GPTConfig to be rematerialized, got {config!r}"
        )
    for name in ("dropout", "attention_dropout"):
        if getattr(config, name):  # the second pass would drop others than the first
            raise ValueError(
                f"{name} must be 0 to rematerialize blocks, got {getattr(config, name)}"
            )
    names = [f"block_{index}" for index in range(config.num_layers)]
    return keras.RematScope("list_of_layers", layer_names=names)
