"""The recurrent baseline: embedding or one-hot input, LSTM layers, a linear head."""

import dataclasses
from typing import Any

import keras

from keras_tinygpt.checks import check_choice, check_float, check_int
from keras_tinygpt.layers import recurrent
from keras_tinygpt.layers.blocks import offset_seed
from keras_tinygpt.layers.dropout import Dropout
from keras_tinygpt.layers.embedding import Embedding
from keras_tinygpt.models.configured import ConfiguredModel, resolve_policy
from keras_tinygpt.models.initialization import (
    INITIAL_LOGIT_STDDEV,
    fan_in_stddev,
    initialize,
)


@dataclasses.dataclass(frozen=True)
class LSTMConfig:
    """Shape of the LSTM language model.

    Args:
        vocab_size: number of token ids V.
        hidden_dim: units of each LSTM layer.
        num_layers: number of LSTM layers.
        embedding_dim: width of the token embedding; None means one-hot input.
        dropout: share of the outputs of each LSTM layer dropped in training.
        max_sequence_length: tokens per training window; the model itself has no limit.
    """

    vocab_size: int
    hidden_dim: int = 256
    num_layers: int = 1
    embedding_dim: int | None = 64
    dropout: float = 0.0
    max_sequence_length: int = 128

    def __post_init__(self):
        for name in ("vocab_size", "hidden_dim", "num_layers", "max_sequence_length"):
            check_int(name, getattr(self, name))
        if self.embedding_dim is not None:
            check_int("embedding_dim", self.embedding_dim)
        check_float("dropout", self.dropout, 0.0, 1.0, high_open=True)

    def least_weights(self) -> int:
        """A lower bound of the number of weights, known before a model is built."""
        below = self.embedding_dim or self.vocab_size  # inputs of the first layer
        recurrent = 4 * self.hidden_dim * (below + self.num_layers * self.hidden_dim)
        return recurrent + self.hidden_dim * self.vocab_size

    @classmethod
    def preset(cls, name: str, vocab_size: int, **changes: Any) -> "LSTMConfig":
        """Returns the named shape, "book" or "mini", with `changes` applied."""
        check_choice("preset", name, tuple(PRESETS))
        return cls(vocab_size=vocab_size, **{**PRESETS[name], **changes})


PRESETS: dict[str, dict[str, Any]] = {
    "book": {"hidden_dim": 128, "embedding_dim": None, "max_sequence_length": 100},
    "mini": {},
}


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class LSTM(ConfiguredModel):
    """Functional Keras model of an `LSTMConfig`: int (B, T) -> logits (B, T, V).

    `with_state()` gives a second model over the same layers that also takes and
    returns the recurrent state.

    Args:
        config: an `LSTMConfig`.
        seed: seed of the dropouts.
        dtype: Keras dtype policy or its name; None means the global one.

    Reference: Hochreiter and Schmidhuber, 1997.
    """

    config_class = LSTMConfig

    def __init__(self, config: LSTMConfig, seed: int = 0, dtype=None, name="lstm"):
        policy = resolve_policy(dtype)
        layers = _make_layers(config, seed, policy)
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        logits, _ = _apply(config, layers, policy, tokens, None)
        super().__init__(inputs=tokens, outputs=logits, name=name)
        self._set_up(config, seed, policy)

    def with_state(self) -> keras.Model:
        """Returns a model over the same layers that takes and returns the state.

        Inputs: tokens (B, T); bool (B, T), False where a token is padding and leaves
        the state as it is; a list of pairs (h, c), one a layer, each (B, hidden_dim).
        Outputs: logits (B, T, V) and the list of new pairs.
        """
        config, policy = self.config, self.dtype_policy
        layers = {layer.name: layer for layer in self.layers}
        shape = (config.hidden_dim,)
        states = [
            (
                keras.Input(shape, dtype=policy.compute_dtype, name=f"h_{index}"),
                keras.Input(shape, dtype=policy.compute_dtype, name=f"c_{index}"),
            )
            for index in range(config.num_layers)
        ]
        tokens = keras.Input((None,), dtype="int32", name="tokens")
        live = keras.Input((None,), dtype="bool", name="live")
        logits, new_states = _apply(config, layers, policy, tokens, states, live)
        return keras.Model(
            [tokens, live, states], [logits, new_states], name="lstm_step"
        )

    def zero_states(self, batch_size: int) -> list:
        """Returns the states at the start of a text: zeros."""
        shape, dtype = (batch_size, self.config.hidden_dim), self.compute_dtype
        return [
            (keras.ops.zeros(shape, dtype), keras.ops.zeros(shape, dtype))
            for _ in range(self.config.num_layers)
        ]


def _make_layers(config: LSTMConfig, seed: int, policy) -> dict[str, keras.Layer]:
    layers: list[keras.Layer] = []
    if config.embedding_dim is not None:
        layers.append(
            Embedding(
                config.vocab_size,
                config.embedding_dim,
                dtype=policy,
                name="token_embedding",
            )
        )
    for index in range(config.num_layers):
        layers.append(
            recurrent.LSTM(
                config.hidden_dim,
                return_sequences=True,
                return_state=True,
                dtype=policy,
                name=f"lstm_{index}",
            )
        )
        if config.dropout:
            layers.append(
                Dropout(
                    config.dropout,
                    seed=offset_seed(seed, index),
                    dtype=policy,
                    name=f"dropout_{index}",
                )
            )
    layers.append(keras.layers.Dense(config.vocab_size, dtype="float32", name="head"))
    return {layer.name: layer for layer in layers}


def _apply(config: LSTMConfig, layers, policy, tokens, states, live=None):
    """Runs the layers; returns logits (B, T, V) and the list of new (h, c)."""
    if config.embedding_dim is None:
        # keras.ops.one_hot reads values, which a recorded PyTorch step does not allow.
        ids = keras.ops.arange(config.vocab_size, dtype="int32")
        same = keras.ops.equal(keras.ops.expand_dims(tokens, -1), ids)
        x = keras.ops.cast(same, policy.compute_dtype)
    else:
        x = layers["token_embedding"](tokens)
    new_states = []
    for index in range(config.num_layers):
        initial = None if states is None else list(states[index])
        x, hidden, cell = layers[f"lstm_{index}"](x, initial_state=initial, mask=live)
        new_states.append((hidden, cell))
        if config.dropout:
            x = layers[f"dropout_{index}"](x)
    return layers["head"](x), new_states


def build_lstm(config: LSTMConfig, seed: int = 0, dtype=None) -> LSTM:
    """Returns an LSTM with weights that depend on `seed` alone, equal on every backend.

    Recurrent kernels are orthogonal, forget gates start at bias 1, other kernels are
    normal with standard deviation `1 / sqrt(fan in)`; the head starts near uniform.

    Args:
        config: the shape.
        seed: from 0 to 2**32 - 1; also seeds the dropouts.
        dtype: Keras dtype policy; None means the global one.

    Returns:
        A functional `keras.Model`, int (B, T) -> float32 logits (B, T, V).
    """
    check_int("seed", seed, 0, 2**32 - 1)
    model = LSTM(config, seed=seed, dtype=dtype)

    def stddev(path: str, shape: tuple[int, ...]) -> float:
        if path.startswith("token_embedding"):
            return 1.0
        if path.startswith("head"):
            return INITIAL_LOGIT_STDDEV * fan_in_stddev(shape)
        if config.embedding_dim is None and path.startswith("lstm_0"):
            return fan_in_stddev((config.hidden_dim,))  # one input row is read a time
        return fan_in_stddev(shape)

    initialize(model, seed, stddev)
    return model
