"""The decoder-only transformer: its config, its presets and the functional model.

logits = head(norm(block_L(... block_1(embed(tokens) + positions)))). The cached decode
model over the same layers lives in `keras_tinygpt.generation`.
"""

import dataclasses
from typing import ClassVar

import keras

from keras_tinygpt.checks import check_int
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


@dataclasses.dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """Shape of a GPT: the fields of `TransformerConfig` and one more.

    Args:
        attention_window: tokens each query reads in each block; None means all.
    """

    POSITIONS: ClassVar = ("learned", "sinusoidal", "rotary", "alibi", "none")
    PRESETS: ClassVar = {
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
            "dropout": 0.1,
        },
    }

    attention_window: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.attention_window is not None:
            check_int("attention_window", self.attention_window)


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
        embedding = token_embedding(config, policy)
        x = embed(config, embedding, tokens, offset_seed(seed, 0), policy)
        for index in range(config.num_layers):
            x = make_block(
                config,
                f"block_{index}",
                offset_seed(seed, 1 + 3 * index),
                policy,
                attention_window=config.attention_window,
            )(x)
        x = end_stack(config, x, policy)
        logits = token_logits(config, x, embedding)
        super().__init__(inputs=tokens, outputs=logits, name=name)
        self._set_up(config, seed, policy)


def build_gpt(config: GPTConfig, seed: int = 0, dtype=None) -> GPT:
    """Returns a GPT with weights that depend on `seed` alone, equal on every backend.

    Kernels and embeddings are normal with standard deviation 0.02, kernels that write
    to the residual stream divided by `sqrt(2 num_layers)`; embeddings that are scaled
    by `sqrt(hidden_dim)` end at 1; the head starts near uniform.

    Args:
        config: the shape.
        seed: from 0 to 2**32 - 1; also seeds the dropouts.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; None means the global one.

    Returns:
        A functional `keras.Model`, int (B, T) -> float32 logits (B, T, V).

    Reference: Radford et al., 2018, section 4.1; 2019, section 2.3 (residual scaling).
    """
    check_int("seed", seed, 0, 2**32 - 1)
    model = GPT(config, seed=seed, dtype=dtype)
    initialize_transformer(model, seed, 2 * config.num_layers)
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
