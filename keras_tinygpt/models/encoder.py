"""The encoder-only transformer: every token reads all others, to both sides.

Its head gives the logits of every token, for masked tokens to be filled in, or those of
a class for the whole text. It cannot continue a text.
"""

import dataclasses
from typing import ClassVar

import keras
from keras import ops

from keras_tinygpt.checks import check_int
from keras_tinygpt.layers.blocks import offset_seed
from keras_tinygpt.layers.dense import Dense
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


@dataclasses.dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """Shape of an encoder: the fields of `TransformerConfig` and two more.

    Args:
        num_classes: classes of a text; None means a head over the tokens instead.
        pad_token_id: the id that fills up shorter texts and is never read; None means
            that all ids are real.
    """

    PRESETS: ClassVar = {
        "mini": {"dropout": 0.1},
        "tiny": {
            "max_sequence_length": 64,
            "num_layers": 3,
            "hidden_dim": 64,
            "positions": "rotary",
        },
    }

    num_classes: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.num_classes is not None:
            check_int("num_classes", self.num_classes, 2)
        if self.pad_token_id is not None:
            check_int("pad_token_id", self.pad_token_id, 0, self.vocab_size - 1)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class Encoder(ConfiguredModel):
    """Functional Keras model of an `EncoderConfig`.

    int (B, T) -> float32 logits (B, T, V), or (B, C) of the C classes of the texts,
    from the mean of the token vectors that are no padding.

    Args:
        config: an `EncoderConfig`.
        seed: seed of the dropouts.
        dtype: Keras dtype policy or its name; None means the global one.

    Reference: Devlin et al., 2019.
    """

    config_class = EncoderConfig
    predicts_next_tokens = False

    def __init__(
        self, config: EncoderConfig, seed: int = 0, dtype=None, name="encoder"
    ):
        policy = resolve_policy(dtype)
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        real, readable = None, None
        if config.pad_token_id is not None:
            real = ops.not_equal(tokens, config.pad_token_id)  # (B, T)
            readable = ops.expand_dims(real, 1)  # (B, 1, T)
        embedding = token_embedding(config, policy)
        x = embed(config, embedding, tokens, offset_seed(seed, 0), policy)
        for index in range(config.num_layers):
            block_seed = offset_seed(seed, 1 + 3 * index)
            block = make_block(
                config, f"block_{index}", block_seed, policy, causal=False
            )
            x = block(x, attention_mask=readable)
        x = end_stack(config, x, policy)
        if config.num_classes is None:
            logits = token_logits(config, x, embedding)
        else:
            logits = Dense(config.num_classes, dtype="float32", name="head")(
                _mean_vector(x, real)
            )
        super().__init__(inputs=tokens, outputs=logits, name=name)
        self._set_up(config, seed, policy)


def _mean_vector(x, real):
    """Mean (B, D) of the vectors (B, T, D) of real tokens; 0 where there is none."""
    x = ops.cast(x, "float32")
    if real is None:
        return ops.mean(x, axis=1)
    share = ops.expand_dims(ops.cast(real, "float32"), -1)
    return ops.sum(x * share, axis=1) / ops.maximum(ops.sum(share, axis=1), 1.0)


def build_encoder(config: EncoderConfig, seed: int = 0, dtype=None) -> Encoder:
    """Returns an encoder with weights that depend on `seed` alone, as `build_gpt` does.

    Args:
        config: the shape.
        seed: from 0 to 2**32 - 1; also seeds the dropouts.
        dtype: Keras dtype policy; None means the global one.

    Returns:
        A functional `keras.Model`, int (B, T) -> float32 logits (B, T, V) or (B, C).

    Example:
        >>> import keras_tinygpt as tg
        >>> config = tg.EncoderConfig(11, 16, 2, 2, hidden_dim=12, num_classes=3)
        >>> tg.build_encoder(config).output_shape
        (None, 3)
    """
    check_int("seed", seed, 0, 2**32 - 1)
    model = Encoder(config, seed=seed, dtype=dtype)
    initialize_transformer(model, seed, 2 * config.num_layers)
    return model
