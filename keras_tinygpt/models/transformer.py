"""What the transformers share: the fields of a shape, its parts, its initial weights.

The three variants differ in what a block may read: earlier tokens (`gpt.py`), all
tokens (`encoder.py`), or earlier tokens and another sequence (`encoder_decoder.py`).
"""

import dataclasses
import math
from typing import Any, ClassVar

import keras

from keras_tinygpt.checks import check_bool, check_choice, check_float, check_int
from keras_tinygpt.layers import (
    LearnedPositions,
    SinusoidalPositions,
    TransformerBlock,
)
from keras_tinygpt.layers.blocks import ACTIVATIONS, NORM_POSITIONS
from keras_tinygpt.layers.dense import Dense
from keras_tinygpt.layers.dropout import Dropout
from keras_tinygpt.layers.embedding import ReversibleEmbedding
from keras_tinygpt.layers.normalization import (
    NORM_EPSILON,
    NORMALIZATIONS,
    make_norm,
)
from keras_tinygpt.layers.positions import MAX_WAVELENGTH
from keras_tinygpt.models.configured import ConfiguredModel
from keras_tinygpt.models.initialization import (
    INITIAL_LOGIT_STDDEV,
    KERNEL_STDDEV,
    initialize,
)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The fields that every transformer has.

    Args:
        vocab_size: number of token ids V.
        max_sequence_length: the window T, tokens a prediction can depend on.
        num_layers: number of blocks, in an encoder-decoder of each of the two stacks.
        num_heads: query heads per block; must divide hidden_dim.
        num_kv_heads: key and value heads per block; None means num_heads.
        hidden_dim: width D of the token vectors.
        intermediate_dim: width of the feed-forward layers; None means 4 x hidden_dim.
        positions: learned, sinusoidal, rotary, alibi (GPT alone) or none.
        normalization: layer or rms.
        norm_position: pre (before each sublayer) or post (after each addition).
        activation: gelu (tanh approximation), relu, relu2 or swiglu.
        dropout: share of the input vectors and of each sublayer output dropped.
        attention_dropout: share of the attention weights dropped.
        qkv_bias: whether query, key and value projections have a bias.
        use_bias: whether all other projections, the untied head included, have one.
        qk_norm: whether queries and keys of self-attention are RMS-normalised.
        tie_embeddings: whether the head shares the token embedding (and has no bias).
        scale_embeddings: whether token vectors are multiplied by sqrt(hidden_dim).
        norm_epsilon: added to the variance, or the mean square, in every norm.
        max_wavelength: base of the frequencies of rotary and sinusoidal positions.
    """

    POSITIONS: ClassVar[tuple[str, ...]] = ("learned", "sinusoidal", "rotary", "none")
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}

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
    norm_epsilon: float = NORM_EPSILON
    max_wavelength: float = MAX_WAVELENGTH

    def __post_init__(self):
        for name in ("vocab_size", "max_sequence_length", "num_layers", "hidden_dim"):
            check_int(name, getattr(self, name))
        check_int("num_heads", self.num_heads)
        for name in ("num_kv_heads", "intermediate_dim"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))
        check_choice("positions", self.positions, self.POSITIONS)
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
        self._check_widths()

    def _check_widths(self) -> None:
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
    def preset(cls, name: str, vocab_size: int, **changes: Any):
        """Returns the named shape, a key of `PRESETS`, with `changes` applied."""
        check_choice("preset", name, tuple(cls.PRESETS))
        return cls(vocab_size=vocab_size, **{**cls.PRESETS[name], **changes})


def token_embedding(config: TransformerConfig, policy, name: str = "token_embedding"):
    """Returns the layer of the token vectors, which can also serve as the head."""
    return ReversibleEmbedding(
        config.vocab_size,
        config.hidden_dim,
        reverse_dtype="float32",
        dtype=policy,
        name=name,
    )


def embed(
    config: TransformerConfig,
    embedding: keras.Layer,
    tokens,
    seed: int,
    policy,
    prefix: str = "",
    max_sequence_length: int | None = None,
):
    """Token vectors, scaled, with positions and dropout: int (B, T) -> (B, T, D).

    Args:
        config: the shape.
        embedding: made by `token_embedding`.
        tokens: symbolic int tensor (B, T).
        seed: of the dropout.
        policy: Keras dtype policy.
        prefix: begins the names of all layers but the embedding.
        max_sequence_length: rows of learned positions; None means the config's.
    """
    x = embedding(tokens)
    if config.scale_embeddings:
        x = keras.layers.Rescaling(
            math.sqrt(config.hidden_dim), dtype=policy, name=f"{prefix}embedding_scale"
        )(x)
    if config.positions == "learned":
        x = LearnedPositions(
            max_sequence_length or config.max_sequence_length,
            dtype=policy,
            name=f"{prefix}position_embedding",
        )(x)
    elif config.positions == "sinusoidal":
        x = SinusoidalPositions(
            config.max_wavelength, dtype=policy, name=f"{prefix}position_encoding"
        )(x)
    if config.dropout:
        x = Dropout(
            config.dropout, seed=seed, dtype=policy, name=f"{prefix}input_dropout"
        )(x)
    return x


def make_block(
    config: TransformerConfig, name: str, seed: int, policy, **options: Any
) -> TransformerBlock:
    """Returns a block of this shape; `options` are the variant's own arguments."""
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
        norm_epsilon=config.norm_epsilon,
        max_wavelength=config.max_wavelength,
        seed=seed,
        dtype=policy,
        name=name,
        **options,
    )


def end_stack(config: TransformerConfig, x, policy, prefix: str = ""):
    """The norm that a stack of pre-norm blocks needs at its end."""
    if config.norm_position == "post":
        return x
    name = f"{prefix}final_norm"
    return make_norm(config.normalization, policy, name, config.norm_epsilon)(x)


def token_logits(config: TransformerConfig, x, embedding: keras.Layer):
    """Token vectors (B, T, D) -> float32 logits (B, T, V)."""
    if config.tie_embeddings:
        logits = embedding(x, reverse=True)
        # Already float32, but Keras 3.15 declares it to be in the compute type.
        return keras.ops.cast(logits, "float32")
    return Dense(
        config.vocab_size, use_bias=config.use_bias, dtype="float32", name="head"
    )(x)


def initialize_transformer(
    model: ConfiguredModel, seed: int, num_sublayers: int
) -> None:
    """Overwrites the weights by seeded ones, equal on every backend.

    Kernels and embeddings are normal with standard deviation 0.02, kernels that write
    to the residual stream divided by `sqrt(num_sublayers)`; embeddings that are scaled
    by `sqrt(hidden_dim)` end at 1; the head starts near uniform.

    Args:
        model: fresh from its constructor.
        seed: from 0 to 2**32 - 1.
        num_sublayers: how many outputs are added to the longest residual stream.
    """
    config = model.config
    logit_stddev = INITIAL_LOGIT_STDDEV / math.sqrt(config.hidden_dim)

    def stddev(path: str, shape: tuple[int, ...]) -> float:
        layer = path.split("/")[0]
        if layer.endswith("token_embedding"):
            if config.tie_embeddings:  # a token's own logit stays below stddev * D
                return min(logit_stddev, 1.0 / config.hidden_dim)
            if config.scale_embeddings:
                return 1.0 / math.sqrt(config.hidden_dim)
        if layer == "head":
            return logit_stddev
        residual = path.endswith("output/kernel")
        return KERNEL_STDDEV / (math.sqrt(num_sublayers) if residual else 1.0)

    initialize(model, seed, stddev)
