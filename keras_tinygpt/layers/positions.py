"""Ways to tell a transformer where a token stands.

Learned and sinusoidal positions are added to the token vectors once, before the
first block; rotary positions and ALiBi act inside every attention layer. All angles
are computed in float32 whatever the dtype policy, because bfloat16 cannot tell
position 257 from 258.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_float, check_int
from keras_tinygpt.layers.embedding import take_rows

MAX_WAVELENGTH = 10000.0


def position_angles(positions, dim: int, max_wavelength: float = MAX_WAVELENGTH):
    """Returns the float32 angles `position * max_wavelength ** (-2 j / dim)`.

    Args:
        positions: integer or float tensor of any shape (...).
        dim: even width; there are `dim / 2` angles per position.
        max_wavelength: base of the geometric series of frequencies.

    Returns:
        float32 tensor (..., dim / 2), in radians.
    """
    exponents = np.arange(0, dim, 2, dtype="float64") / dim
    frequencies = (max_wavelength**-exponents).astype("float32")  # (dim / 2,)
    positions = ops.expand_dims(ops.cast(positions, "float32"), -1)
    return positions * ops.convert_to_tensor(frequencies)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the per-head slopes of ALiBi as float32 (N,).

    For a power of two, head n of N gets `2 ** (-8 (n + 1) / N)`. For other counts the
    series of the next lower power of two is completed with every second slope of the
    next higher one.

    Reference: Press et al., 2021, "Train Short, Test Long", section 3.
    """
    check_int("num_heads", num_heads)
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, lower + 1) / lower)
    finer = 2.0 ** (-4.0 * np.arange(1, 2 * lower, 2) / lower)
    return np.concatenate([slopes, finer[: num_heads - lower]]).astype("float32")


def alibi_bias(query_positions, key_positions, num_heads: int):
    """Returns the ALiBi score bias `-slope * |i - j|` as float32 (N, T, S).

    Args:
        query_positions: integer tensor (T,), positions i.
        key_positions: integer tensor (S,), positions j.
        num_heads: number of heads N.
    """
    distance = ops.expand_dims(query_positions, 1) - ops.expand_dims(key_positions, 0)
    slopes = ops.reshape(ops.convert_to_tensor(alibi_slopes(num_heads)), (-1, 1, 1))
    return -slopes * ops.cast(ops.abs(distance), "float32")  # (N, T, S)


def _check_rank(shape, letters: str) -> None:
    if len(shape) != letters.count(",") + 1:
        raise ValueError(f"inputs must have shape {letters}, got {tuple(shape)}")


def _row_positions(inputs, start_index, row_offsets):
    """Positions of the tokens of `inputs` (B, T, ...), never negative: (T,) or (B, T).

    `row_offsets` (B,) is the number of padding tokens to the left of each row, which
    take no position of their own.
    """
    positions = ops.arange(ops.shape(inputs)[1], dtype="int32") + start_index
    if row_offsets is None:
        return positions
    shifted = ops.expand_dims(positions, 0) - ops.expand_dims(row_offsets, 1)
    return ops.maximum(shifted, 0)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class LearnedPositions(keras.layers.Layer):
    """Adds a trained vector for each position: `h[t] = x[t] + p[t]`.

    Args:
        max_sequence_length: number of positions; longer inputs raise ValueError.

    Call arguments:
        inputs: float tensor (B, T, D), T at most `max_sequence_length`.
        start_index: position of the first token (int or scalar tensor), default 0.
        row_offsets: optional int tensor (B,), padding tokens to the left of each row.

    Returns:
        Tensor (B, T, D).

    Raises:
        ValueError: if T is known and `T > max_sequence_length`. With a dynamic T
            inside a compiled graph the backend's own gather rules apply.

    Example:
        >>> import keras_tinygpt as tg
        >>> x = keras.random.normal((2, 5, 8))
        >>> tuple(tg.layers.LearnedPositions(max_sequence_length=7)(x).shape)
        (2, 5, 8)

    Reference: Radford et al., 2018; Gehring et al., 2017.
    """

    def __init__(self, max_sequence_length: int, **kwargs):
        check_int("max_sequence_length", max_sequence_length)
        super().__init__(**kwargs)
        self.max_sequence_length = max_sequence_length
        self.supports_masking = True

    def build(self, input_shape):
        _check_rank(input_shape, "(B, T, D)")
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.max_sequence_length, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
        )
        self.built = True

    def call(self, inputs, start_index=0, row_offsets=None):
        self._check_length(inputs.shape[1])
        positions = _row_positions(inputs, start_index, row_offsets)
        if row_offsets is not None:
            # A chunk may end in padding past the table; it is never read, but must be
            # finite, and backends differ in what they make of a row that is not there.
            positions = ops.minimum(positions, self.max_sequence_length - 1)
        return inputs + take_rows(self.embeddings, positions)

    def _check_length(self, length: int | None) -> None:
        if length is not None and length > self.max_sequence_length:
            raise ValueError(
                f"sequence length must be at most max_sequence_length="
                f"{self.max_sequence_length}, got {length}"
            )

    def compute_output_shape(self, input_shape):
        self._check_length(input_shape[1])
        return input_shape

    def get_config(self):
        config = super().get_config()
        config["max_sequence_length"] = self.max_sequence_length
        return config


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class SinusoidalPositions(keras.layers.Layer):
    """Adds the fixed sine and cosine table: coordinates 2j and 2j + 1 of position t are
    `sin(w_j t)` and `cos(w_j t)` with `w_j = max_wavelength ** (-2 j / D)`.

    Has no weights and no longest length. On zeros it returns the table itself.

    Args:
        max_wavelength: base of the frequencies.

    Call arguments:
        inputs: float tensor (B, T, D), D even.
        start_index: position of the first token (int or scalar tensor), default 0.
        row_offsets: optional int tensor (B,), padding tokens to the left of each row.

    Returns:
        Tensor (B, T, D).

    Raises:
        ValueError: if D is odd.

    Reference: Vaswani et al., 2017, section 3.5.
    """

    def __init__(self, max_wavelength: float = MAX_WAVELENGTH, **kwargs):
        check_float("max_wavelength", max_wavelength, low=0.0, low_open=True)
        super().__init__(**kwargs)
        self.max_wavelength = max_wavelength
        self.supports_masking = True

    def build(self, input_shape):
        _check_rank(input_shape, "(B, T, D)")
        if input_shape[-1] % 2:
            raise ValueError(
                "sinusoidal positions need an even width (hidden_dim), "
                f"got {input_shape[-1]}"
            )
        self.built = True

    def call(self, inputs, start_index=0, row_offsets=None):
        dim = inputs.shape[-1]
        positions = _row_positions(inputs, start_index, row_offsets)
        angles = position_angles(positions, dim, self.max_wavelength)
        table = ops.stack([ops.sin(angles), ops.cos(angles)], axis=-1)
        table = ops.reshape(table, (*ops.shape(angles)[:-1], dim))  # (..., T, D)
        return inputs + ops.cast(table, inputs.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        config = super().get_config()
        config["max_wavelength"] = self.max_wavelength
        return config


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class RotaryPositions(keras.layers.Layer):
    """Rotates coordinate pairs of queries or keys by an angle that grows with position.

    Coordinate j is paired with j + H / 2; at position t the pair is turned by
    `t * max_wavelength ** (-2 j / H)`, so a query-key product depends on the two
    positions through their difference only.

    Args:
        max_wavelength: base of the frequencies.

    Call arguments:
        inputs: float tensor (B, T, N, H), H even.
        start_index: position of the first token (int or scalar tensor), default 0.

    Returns:
        Tensor (B, T, N, H) in the dtype of `inputs`; vector norms are unchanged.

    Raises:
        ValueError: if H is odd.

    Reference: Su et al., 2021, equation 34, with halves instead of neighbours as pairs.
    """

    def __init__(self, max_wavelength: float = MAX_WAVELENGTH, **kwargs):
        check_float("max_wavelength", max_wavelength, low=0.0, low_open=True)
        super().__init__(**kwargs)
        self.max_wavelength = max_wavelength
        self.supports_masking = True

    def build(self, input_shape):
        _check_rank(input_shape, "(B, T, N, H)")
        if input_shape[-1] % 2:
            raise ValueError(
                f"rotary positions need an even head_dim, got {input_shape[-1]}"
            )
        self.built = True

    def call(self, inputs, start_index=0):
        positions = _row_positions(inputs, start_index, None)  # (T,)
        angles = position_angles(positions, inputs.shape[-1], self.max_wavelength)
        angles = ops.expand_dims(angles, 1)  # (T, 1, H / 2)
        cosine, sine = ops.cos(angles), ops.sin(angles)
        first, second = ops.split(ops.cast(inputs, "float32"), 2, axis=-1)
        rotated = ops.concatenate(
            [first * cosine - second * sine, second * cosine + first * sine], axis=-1
        )
        return ops.cast(rotated, inputs.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        config = super().get_config()
        config["max_wavelength"] = self.max_wavelength
        return config
