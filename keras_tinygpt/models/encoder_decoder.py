"""The encoder-decoder transformer: a text is written while another one is read.

The encoder reads the whole source; each block of the decoder reads the earlier target
tokens, then the encoder's output. The cached decoder over the same layers lives in
`keras_tinygpt.generation`.
"""

import dataclasses
from typing import ClassVar

import keras
from keras import ops

from keras_tinygpt.checks import check_bool, check_int
from keras_tinygpt.layers.blocks import offset_seed
from keras_tinygpt.models.configured import ConfiguredModel, resolve_policy
from keras_tinygpt.models.transformer import (
    TransformerConfig,
    embed,
    end_stack,
    initialize_transformer,
    make_block,
    token_embedding,
    token_logits,
)

ENCODER, DECODER = "encoder_", "decoder_"  # what the names of their layers begin with


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(TransformerConfig):
    """Shape of an encoder-decoder: the fields of `TransformerConfig` and three more.

    Source and target have one vocabulary; `max_sequence_length` is the target's.

    Args:
        max_source_length: tokens of the longest source.
        pad_token_id: the id that fills up shorter sources and is never read there.
        share_embeddings: whether one table serves both sides; with tie_embeddings the
            head shares the target's.
    """

    PRESETS: ClassVar = {
        "original": {
            "num_layers": 2,
            "hidden_dim": 64,
            "positions": "sinusoidal",
            "norm_position": "post",
            "activation": "relu",
            "dropout": 0.1,
            "tie_embeddings": True,
            "scale_embeddings": True,
        },
        "mini": {"num_layers": 2, "hidden_dim": 64},
    }

    max_source_length: int = 128
    pad_token_id: int = 0
    share_embeddings: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_int("max_source_length", self.max_source_length)
        check_int("pad_token_id", self.pad_token_id, 0, self.vocab_size - 1)
        check_bool("share_embeddings", self.share_embeddings)

    def least_weights(self) -> int:
        """A lower bound of the number of weights, known before a model is built."""
        block = 4 * self.hidden_dim**2  # query and output, twice more
        table = self.max_source_length if self.positions == "learned" else 0
        more = self.num_layers * block + self.hidden_dim * table
        return super().least_weights() + more


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class EncoderDecoder(ConfiguredModel):
    """Functional Keras model of an `EncoderDecoderConfig`.

    [source int (B, S), target int (B, T)] -> float32 logits (B, T, V). Position t of
    the target sees its tokens up to t and all source tokens that are no padding.

    Args:
        config: an `EncoderDecoderConfig`.
        seed: seed of the dropouts.
        dtype: Keras dtype policy or its name; None means the global one.

    Reference: Vaswani et al., 2017.
    """

    config_class = EncoderDecoderConfig
    predicts_next_tokens = False

    def __init__(
        self,
        config: EncoderDecoderConfig,
        seed: int = 0,
        dtype=None,
        name="encoder_decoder",
    ):
        policy = resolve_policy(dtype)
        source = keras.Input((None,), dtype="int32", name="source")
        target = keras.Input((None,), dtype="int32", name="target")
        names = ("token_embedding",)
        if not config.share_embeddings:
            names = (f"{ENCODER}token_embedding", f"{DECODER}token_embedding")
        tables = [token_embedding(config, policy, name) for name in names]
        real = ops.not_equal(source, config.pad_token_id)  # (B, S)
        context = _encode(config, tables[0], source, real, seed, policy)
        x = _decode(config, tables[-1], target, context, real, seed, policy)
        logits = token_logits(config, x, tables[-1])
        super().__init__(inputs=[source, target], outputs=logits, name=name)
        self._set_up(config, seed, policy)

    @property
    def context(self):
        """The symbolic output (B, S, D) of the encoder and its bool mask (B, S)."""
        arguments = self.get_layer(f"{DECODER}block_0").input
        return arguments[1], arguments[2]


def _encode(config, embedding, source, real, seed: int, policy):
    """Source tokens (B, S) -> (B, S, D)."""
    length = config.max_source_length
    readable = ops.expand_dims(real, 1)  # (B, 1, S)
    x = embed(config, embedding, source, offset_seed(seed, 0), policy, ENCODER, length)
    for index in range(config.num_layers):
        x = make_block(
            config,
            f"{ENCODER}block_{index}",
            offset_seed(seed, 2 + 5 * index),
            policy,
            causal=False,
        )(x, attention_mask=readable)
    return end_stack(config, x, policy, ENCODER)


def _decode(config, embedding, target, context, real, seed: int, policy):
    """Target tokens (B, T) that read the encoder's output (B, S, D) -> (B, T, D)."""
    x = embed(config, embedding, target, offset_seed(seed, 1), policy, DECODER)
    for index in range(config.num_layers):
        x = make_block(
            config,
            f"{DECODER}block_{index}",
            offset_seed(seed, 2 + 5 * (config.num_layers + index)),
            policy,
            cross_attention=True,
        )(x, context=context, context_mask=real)
    return end_stack(config, x, policy, DECODER)


def build_encoder_decoder(
    config: EncoderDecoderConfig, seed: int = 0, dtype=None
) -> EncoderDecoder:
    """Returns an encoder-decoder with weights that depend on `seed` alone.

    Args:
        config: the shape.
        seed: from 0 to 2**32 - 1; also seeds the dropouts.
        dtype: Keras dtype policy; None means the global one.

    Returns:
        A functional `keras.Model`, [int (B, S), int (B, T)] -> float32 (B, T, V).

    Example:
        >>> import keras_tinygpt as tg
        >>> config = tg.EncoderDecoderConfig(11, 16, 2, 2, hidden_dim=12)
        >>> model = tg.build_encoder_decoder(config)
        >>> tuple(model([keras.ops.ones((2, 5)), keras.ops.ones((2, 3))]).shape)
        (2, 3, 11)
    """
    check_int("seed", seed, 0, 2**32 - 1)
    model = EncoderDecoder(config, seed=seed, dtype=dtype)
    initialize_transformer(model, seed, 3 * config.num_layers)
    return model
