"""Multi-head attention: causal self-attention and cross-attention.

One masked softmax (`attend`) and one mask rule (`causal_mask`) serve both layers, the
cached and the uncached path. Weights are float32 whatever the policy, and so is the
softmax; forbidden weights are exactly 0. There is no bidirectional self-attention here
other than `CausalMultiHeadAttention(causal=False)`.
"""

import math

import keras
from keras import ops

from keras_tinygpt.checks import check_bool, check_choice, check_float, check_int
from keras_tinygpt.layers.dense import Dense
from keras_tinygpt.layers.dropout import Dropout
from keras_tinygpt.layers.normalization import NORM_EPSILON, make_norm
from keras_tinygpt.layers.positions import (
    MAX_WAVELENGTH,
    RotaryPositions,
    alibi_bias,
)

# Finite, so that a row with no allowed key stays finite; exp(MASKED - max) is 0.0.
MASKED = -1e30
# From these lengths on flash attention is faster on a CPU under PyTorch.
FLASH_LENGTHS = {"float32": 512, "bfloat16": 1024}
ATTENTION_POSITIONS = ("none", "rotary", "alibi")


def causal_mask(query_positions, key_positions, attention_window: int | None = None):
    """Returns the bool mask (T, S): True where a query may read a key.

    Position i reads j if `j <= i`, and if `i - j < attention_window` where one is set.

    Args:
        query_positions: int tensor (T,).
        key_positions: int tensor (S,).
        attention_window: number of positions each query reads, itself included.
    """
    distance = ops.expand_dims(query_positions, 1) - ops.expand_dims(key_positions, 0)
    mask = distance >= 0
    if attention_window is not None:
        mask = ops.logical_and(mask, distance < attention_window)
    return mask


def attend(query, key, value, mask=None, bias=None, dropout=None, training=None):
    """Computes `softmax(q k^T / sqrt(H) + bias) v` over the allowed keys.

    Query heads may be a multiple G of the key heads (grouped-query attention): query
    head n then reads key head n // G.

    Args:
        query: float tensor (B, N, T, H).
        key: float tensor (B, N / G, S, H); or (B * N / G, S, H), as caches are kept.
        value: float tensor of the same shape as `key`.
        mask: optional bool tensor that broadcasts to (B, N, T, S); True may be read.
        bias: optional float32 tensor that broadcasts to (B, N, T, S).
        dropout: optional Dropout layer for the weights.
        training: whether dropout is on.

    Returns:
        Outputs (B, N, T, H) and float32 weights (B, N, T, S). A row with no allowed
        key gets weights 0 and output 0.
    """
    num_heads, head_dim = query.shape[1], query.shape[3]
    length, key_length = ops.shape(query)[2], ops.shape(key)[-2]
    key, value = _merge_rows(key), _merge_rows(value)  # (B * N / G, S, H)
    rows = ops.shape(key)[0]

    # Grouped heads are folded into the rows of one product per key head.
    query = query * (1.0 / math.sqrt(head_dim))
    query = ops.reshape(query, (rows, -1, head_dim))
    if keras.backend.standardize_dtype(query.dtype) == "float16":
        query, key = ops.cast(query, "float32"), ops.cast(key, "float32")  # overflow
    scores = ops.matmul(query, ops.transpose(key, (0, 2, 1)))
    scores = ops.cast(scores, "float32")
    scores = ops.reshape(scores, (-1, num_heads, length, key_length))  # (B, N, T, S)
    if bias is not None:
        scores = ops.add(scores, bias)
    if mask is not None:
        scores = ops.where(mask, scores, MASKED)
    if key.shape[1] == 1:  # Keras warns of a softmax over a single key
        weights = ops.ones_like(scores)
    else:
        weights = ops.softmax(scores, axis=-1)
    if mask is not None and len(mask.shape) == 4:  # a padded row may allow no key
        weights = ops.where(mask, weights, 0.0)

    kept = weights if dropout is None else dropout(weights, training=training)
    kept = ops.reshape(ops.cast(kept, value.dtype), (rows, -1, key_length))
    outputs = ops.matmul(kept, value)
    return ops.reshape(outputs, (-1, num_heads, length, head_dim)), weights


def has_fused_attention(query) -> bool:
    """Whether there is a faster way to causal attention alone, without its weights.

    JAX and PyTorch on a GPU: flash attention. PyTorch on a CPU: that too for long
    texts, else fewer passes over the scores. Nothing is gained on JAX's CPU, and
    TensorFlow's XLA fuses what it can.
    """
    if keras.backend.backend() == "torch":
        return query.device.type == "cuda" or _has_plain_scores(query)
    return keras.backend.backend() == "jax" and not all(
        name.startswith("cpu") for name in keras.distribution.list_devices()
    )


def _has_plain_scores(query) -> bool:
    """Whether scores of this type neither overflow nor need another one on a CPU."""
    dtype = keras.backend.standardize_dtype(query.dtype)
    return query.device.type == "cpu" and dtype in FLASH_LENGTHS


def _attend_fused(query, key, value):
    """Causal attention of tensors (B, N, T, H), a key head for every group of N."""
    if keras.backend.backend() == "torch" and query.device.type == "cpu":
        dtype = keras.backend.standardize_dtype(query.dtype)
        if query.shape[2] < FLASH_LENGTHS[dtype]:
            return _attend_on_torch(query, key, value)
    query, key, value = (ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value))
    outputs = ops.dot_product_attention(query, key, value, is_causal=True)
    return ops.transpose(outputs, (0, 2, 1, 3))


def _attend_on_torch(query, key, value):
    """`_attend_fused` with the mask added by the product itself.

    The scores stay in the type of the inputs: the softmax computes in float32, and its
    results would be rounded to that type anyway.
    """
    import torch

    shape = query.shape
    key, value = _merge_rows(key), _merge_rows(value)  # (B * N / G, T, H)
    query = query.reshape(len(key), -1, shape[3])  # (B * N / G, G * T, H)
    forbidden = query.new_full((shape[2], shape[2]), MASKED).triu(1)
    forbidden = forbidden.repeat(query.shape[1] // shape[2], 1)
    scores = torch.baddbmm(forbidden, query, key.mT, alpha=shape[3] ** -0.5)
    return (torch.softmax(scores, dim=-1) @ value).reshape(shape)


def _merge_rows(inputs):
    """(B, N, S, H) -> (B * N, S, H); a merged tensor stays as it is."""
    if len(inputs.shape) == 3:
        return inputs
    return ops.reshape(inputs, (-1, *ops.shape(inputs)[2:]))


def _split_heads(inputs, num_heads: int, head_dim: int):
    """(B, T, N * H) -> (B, T, N, H)."""
    return ops.reshape(inputs, (-1, ops.shape(inputs)[1], num_heads, head_dim))


def _merge_heads(inputs, num_heads: int, head_dim: int):
    """(B, N, T, H) -> (B, T, N * H)."""
    inputs = ops.transpose(inputs, (0, 2, 1, 3))
    return ops.reshape(inputs, (-1, ops.shape(inputs)[1], num_heads * head_dim))


def _check_heads(
    num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> None:
    check_int("num_heads", num_heads)
    if num_kv_heads is not None:
        check_int("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}"
            )
    if head_dim is not None:
        check_int("head_dim", head_dim)


def _resolve_head_dim(hidden_dim: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    if hidden_dim % num_heads:
        raise ValueError(
            f"hidden_dim must be divisible by num_heads={num_heads}, got {hidden_dim}"
        )
    return hidden_dim // num_heads


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class CausalMultiHeadAttention(keras.layers.Layer):
    """Multi-head self-attention in which no position reads a later one.

    `softmax(Q K^T / sqrt(H) + M) V` per head, heads concatenated and projected.

    Args:
        num_heads: number of query heads N.
        num_kv_heads: number of key and value heads; None means N. Must divide N.
        head_dim: width H of a head; None means D / N.
        positions: "none", "rotary" (queries and keys are rotated) or "alibi" (a linear
            penalty on distance is added to the scores).
        qk_norm: whether each query and key vector is RMS-normalised over H.
        attention_window: number of positions each query reads, itself included; None
            means all earlier ones.
        attention_dropout: share of the weights dropped in training.
        qkv_bias: whether query, key and value projections have a bias.
        use_bias: whether the output projection has a bias.
        fused_projections: whether one Dense makes queries, keys and values (faster);
            otherwise three named `query`, `key` and `value`.
        causal: False lets every position read all others.
        norm_epsilon: added to the mean square in qk_norm.
        max_wavelength: base of the frequencies of rotary positions.
        seed: seed of the dropout.

    Call arguments:
        inputs: float tensor (B, T, D).
        attention_mask: optional bool tensor (B, T, S), (B, 1, S) or (T, S); True may be
            read. It is combined with the causal rule.
        cache: optional pair of key and value tensors (B * N_kv, S, H) holding earlier
            positions; the new ones are written at `cache_index`. Rows and heads share
            one axis because compilers update such a tensor in place, B = 1 included.
        cache_index: int scalar, slot of the first token of `inputs`.
        return_attention_scores: whether the weights are returned too.
        mask: optional bool tensor (B, T), the Keras padding mask; False is not read.
            Taken from `inputs` when it carries one.
        training: whether dropout is on.

    Returns:
        Tensor (B, T, D); with `return_attention_scores` the pair with float32 weights
        (B, N, T, S); with `cache` the updated pair of tensors is appended. Rows with no
        key to read are finite.

    Raises:
        ValueError: for heads that do not fit, a bad rate, an odd H if rotary.

    Example:
        >>> import keras_tinygpt as tg
        >>> layer = tg.layers.CausalMultiHeadAttention(num_heads=2, positions="rotary")
        >>> tuple(layer(keras.random.normal((2, 5, 12))).shape)
        (2, 5, 12)

    Reference: Vaswani et al., 2017, section 3.2; Shazeer, 2019 and Ainslie et al., 2023
    (shared key heads); Beltagy et al., 2020 (window); Henry et al., 2020 (qk_norm).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        positions: str = "none",
        qk_norm: bool = False,
        attention_window: int | None = None,
        attention_dropout: float = 0.0,
        qkv_bias: bool = False,
        use_bias: bool = True,
        fused_projections: bool = True,
        causal: bool = True,
        norm_epsilon: float = NORM_EPSILON,
        max_wavelength: float = MAX_WAVELENGTH,
        seed: int | None = None,
        **kwargs,
    ):
        _check_heads(num_heads, num_kv_heads, head_dim)
        check_choice("positions", positions, ATTENTION_POSITIONS)
        if attention_window is not None:
            check_int("attention_window", attention_window)
            if not causal:
                raise ValueError("attention_window needs causal=True, got causal=False")
        check_float("attention_dropout", attention_dropout, 0.0, 1.0, high_open=True)
        check_float("norm_epsilon", norm_epsilon, low_open=True)
        check_float("max_wavelength", max_wavelength, low_open=True)
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.positions = positions
        self.qk_norm = check_bool("qk_norm", qk_norm)
        self.attention_window = attention_window
        self.attention_dropout = attention_dropout
        self.qkv_bias = check_bool("qkv_bias", qkv_bias)
        self.use_bias = check_bool("use_bias", use_bias)
        self.fused_projections = check_bool("fused_projections", fused_projections)
        self.causal = check_bool("causal", causal)
        self.norm_epsilon = norm_epsilon
        self.max_wavelength = max_wavelength
        self.seed = seed
        self.supports_masking = True

    def build(self, input_shape):
        hidden_dim = input_shape[-1]
        self._head_dim = _resolve_head_dim(hidden_dim, self.num_heads, self.head_dim)
        self._kv_heads = self.num_kv_heads or self.num_heads
        kv_dim = self._kv_heads * self._head_dim
        query_dim = self.num_heads * self._head_dim
        dtype = self.dtype_policy

        def dense(units, use_bias, name):
            layer = Dense(units, use_bias=use_bias, dtype=dtype, name=name)
            layer.build((None, None, hidden_dim))
            return layer

        if self.fused_projections:
            self._qkv = dense(query_dim + 2 * kv_dim, self.qkv_bias, "query_key_value")
        else:
            self._query = dense(query_dim, self.qkv_bias, "query")
            self._key = dense(kv_dim, self.qkv_bias, "key")
            self._value = dense(kv_dim, self.qkv_bias, "value")
        if self.positions == "rotary":
            self._rotary = RotaryPositions(
                self.max_wavelength, dtype=dtype, name="rotary"
            )
            self._rotary.build((None, None, self.num_heads, self._head_dim))
        if self.qk_norm:
            self._query_norm = make_norm("rms", dtype, "query_norm", self.norm_epsilon)
            self._query_norm.build((None, None, self.num_heads, self._head_dim))
            self._key_norm = make_norm("rms", dtype, "key_norm", self.norm_epsilon)
            self._key_norm.build((None, None, self._kv_heads, self._head_dim))
        self._dropout = None
        if self.attention_dropout:
            self._dropout = Dropout(
                self.attention_dropout, seed=self.seed, dtype="float32", name="dropout"
            )
        self._output = Dense(
            hidden_dim, use_bias=self.use_bias, dtype=dtype, name="output"
        )
        self._output.build((None, None, query_dim))
        self.built = True

    def call(
        self,
        inputs,
        attention_mask=None,
        cache=None,
        cache_index=None,
        return_attention_scores=False,
        mask=None,
        training=None,
    ):
        start = 0 if cache_index is None else cache_index
        query, key, value = self._project(inputs, start)  # (B, N, T, H)
        padding = padding_mask(inputs, mask)
        if cache is not None:
            if padding is not None:
                raise ValueError(
                    "mask covers the inputs and not the cache; with a cache pass "
                    "attention_mask (B, T, S), got a mask"
                )
            key = _write_rows(cache[0], start, key)
            value = _write_rows(cache[1], start, value)
        masked = attention_mask is not None or padding is not None
        plain = cache is None and not return_attention_scores and not masked
        if plain and self._is_plain(training) and has_fused_attention(query):
            outputs = _attend_fused(query, key, value)
        else:
            outputs, weights = self._attend(
                query, key, value, start, attention_mask, padding, training
            )
        outputs = _merge_heads(outputs, self.num_heads, self._head_dim)
        outputs = self._output(outputs)  # (B, T, D)
        results = [outputs]
        if return_attention_scores:
            results.append(weights)
        if cache is not None:
            results.append((key, value))
        return results[0] if len(results) == 1 else tuple(results)

    def _is_plain(self, training) -> bool:
        """Whether the causal rule is all there is to the weights."""
        return (
            self.causal
            and self.positions != "alibi"
            and self.attention_window is None
            and not (self.attention_dropout and training)
        )

    def _attend(self, query, key, value, start, attention_mask, padding, training):
        """Outputs (B, N, T, H) and weights of the explicit path."""
        query_positions = ops.arange(ops.shape(query)[2], dtype="int32") + start
        key_positions = ops.arange(ops.shape(key)[-2], dtype="int32")
        allowed = self._allowed_keys(
            query_positions, key_positions, attention_mask, padding
        )
        bias = None
        if self.positions == "alibi":
            bias = alibi_bias(query_positions, key_positions, self.num_heads)
        return attend(query, key, value, allowed, bias, self._dropout, training)

    def _project(self, inputs, start):
        """Projected, normalised, rotated heads: three tensors (B, N or N_kv, T, H)."""
        head_dim, kv_heads = self._head_dim, self._kv_heads
        if self.fused_projections:
            heads = _split_heads(
                self._qkv(inputs), self.num_heads + 2 * kv_heads, head_dim
            )
            splits = [self.num_heads, self.num_heads + kv_heads]
            query, key, value = ops.split(heads, splits, axis=2)
        else:
            query = _split_heads(self._query(inputs), self.num_heads, head_dim)
            key = _split_heads(self._key(inputs), kv_heads, head_dim)
            value = _split_heads(self._value(inputs), kv_heads, head_dim)
        if self.qk_norm:
            query, key = self._query_norm(query), self._key_norm(key)
        if self.positions == "rotary":
            query = self._rotary(query, start_index=start)
            key = self._rotary(key, start_index=start)
        return [ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value)]

    def _allowed_keys(self, query_positions, key_positions, attention_mask, padding):
        """Bool mask that broadcasts to (B, N, T, S), or None if all may be read."""
        allowed = None
        if self.causal:
            allowed = causal_mask(
                query_positions, key_positions, self.attention_window
            )  # (T, S)
        if attention_mask is not None:
            attention_mask = ops.cast(attention_mask, "bool")
            if len(attention_mask.shape) == 2:
                attention_mask = ops.expand_dims(attention_mask, 0)
            allowed = _both(allowed, ops.expand_dims(attention_mask, 1))
        if padding is not None:
            allowed = _both(allowed, ops.expand_dims(padding, (1, 2)))
        return allowed

    def compute_output_spec(
        self,
        inputs,
        attention_mask=None,
        cache=None,
        cache_index=None,
        return_attention_scores=False,
        mask=None,
        training=None,
    ):
        results = [keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)]
        batch, length = inputs.shape[:2]
        if return_attention_scores:
            key_length = length if cache is None else cache[0].shape[1]
            shape = (batch, self.num_heads, length, key_length)
            results.append(keras.KerasTensor(shape, dtype="float32"))
        if cache is not None:
            results.append(
                tuple(keras.KerasTensor(x.shape, dtype=x.dtype) for x in cache)
            )
        return results[0] if len(results) == 1 else tuple(results)

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_mask(self, inputs, mask=None):
        return None if isinstance(mask, (list, tuple)) else mask

    def get_config(self):
        config = super().get_config()
        config.update(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            positions=self.positions,
            qk_norm=self.qk_norm,
            attention_window=self.attention_window,
            attention_dropout=self.attention_dropout,
            qkv_bias=self.qkv_bias,
            use_bias=self.use_bias,
            fused_projections=self.fused_projections,
            causal=self.causal,
            norm_epsilon=self.norm_epsilon,
            max_wavelength=self.max_wavelength,
            seed=self.seed,
        )
        return config


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class CrossAttention(keras.layers.Layer):
    """Multi-head attention of one sequence over another; no causal rule, no positions.

    Args:
        num_heads: number of heads N.
        num_kv_heads: number of key and value heads; None means N. Must divide N.
        head_dim: width H of a head; None means D / N, D being the width of `inputs`.
        attention_dropout: share of the weights dropped in training.
        qkv_bias: whether query, key and value projections have a bias.
        use_bias: whether the output projection has a bias.
        seed: seed of the dropout.

    Call arguments:
        inputs: float tensor (B, T, D), the reading sequence.
        context: float tensor (B, S, E), the sequence that is read; may be None when
            `cache` is given.
        context_mask: optional bool tensor (B, S), False is not read. Taken from
            `context` when it carries a Keras mask.
        cache: optional pair of projected keys and values (B, N_kv, S, H), as made by
            `project_context`, or with rows and heads on one axis; replaces `context`.
        return_attention_scores: whether the weights are returned too.
        training: whether dropout is on.

    Returns:
        Tensor (B, T, D), and with `return_attention_scores` float32 weights
        (B, N, T, S). Weights on masked positions are exactly 0.

    Reference: Bahdanau et al., 2015; Vaswani et al., 2017, section 3.2.3.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        attention_dropout: float = 0.0,
        qkv_bias: bool = False,
        use_bias: bool = True,
        seed: int | None = None,
        **kwargs,
    ):
        _check_heads(num_heads, num_kv_heads, head_dim)
        check_float("attention_dropout", attention_dropout, 0.0, 1.0, high_open=True)
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.attention_dropout = attention_dropout
        self.qkv_bias = check_bool("qkv_bias", qkv_bias)
        self.use_bias = check_bool("use_bias", use_bias)
        self.seed = seed
        self.supports_masking = True

    def build(self, inputs_shape, context_shape):
        hidden_dim = inputs_shape[-1]
        self._head_dim = _resolve_head_dim(hidden_dim, self.num_heads, self.head_dim)
        self._kv_heads = self.num_kv_heads or self.num_heads
        query_dim = self.num_heads * self._head_dim
        kv_dim = self._kv_heads * self._head_dim

        def dense(units, use_bias, name, input_dim):
            layer = Dense(units, use_bias=use_bias, dtype=self.dtype_policy, name=name)
            layer.build((None, None, input_dim))
            return layer

        self._query = dense(query_dim, self.qkv_bias, "query", hidden_dim)
        self._key = dense(kv_dim, self.qkv_bias, "key", context_shape[-1])
        self._value = dense(kv_dim, self.qkv_bias, "value", context_shape[-1])
        self._output = dense(hidden_dim, self.use_bias, "output", query_dim)
        self._dropout = None
        if self.attention_dropout:
            self._dropout = Dropout(
                self.attention_dropout, seed=self.seed, dtype="float32", name="dropout"
            )
        self.built = True

    def project_context(self, context):
        """Keys and values of `context` (B, S, E): a pair of (B, N_kv, S, H)."""
        pair = (self._key(context), self._value(context))
        return tuple(
            ops.transpose(_split_heads(x, self._kv_heads, self._head_dim), (0, 2, 1, 3))
            for x in pair
        )

    def call(
        self,
        inputs,
        context,
        context_mask=None,
        cache=None,
        return_attention_scores=False,
        training=None,
    ):
        query = _split_heads(self._query(inputs), self.num_heads, self._head_dim)
        query = ops.transpose(query, (0, 2, 1, 3))  # (B, N, T, H)
        key, value = self.project_context(context) if cache is None else cache
        allowed = None
        if context_mask is not None:
            allowed = ops.expand_dims(ops.cast(context_mask, "bool"), (1, 2))
        outputs, weights = attend(
            query, key, value, allowed, None, self._dropout, training
        )
        outputs = self._output(_merge_heads(outputs, self.num_heads, self._head_dim))
        return (outputs, weights) if return_attention_scores else outputs

    def compute_output_spec(
        self,
        inputs,
        context,
        context_mask=None,
        cache=None,
        return_attention_scores=False,
        training=None,
    ):
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return outputs
        key_length = context.shape[1] if cache is None else cache[0].shape[-2]
        shape = (inputs.shape[0], self.num_heads, inputs.shape[1], key_length)
        return outputs, keras.KerasTensor(shape, dtype="float32")

    def compute_mask(self, inputs, mask=None):
        return None if isinstance(mask, (list, tuple)) else mask

    def get_config(self):
        config = super().get_config()
        config.update(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            attention_dropout=self.attention_dropout,
            qkv_bias=self.qkv_bias,
            use_bias=self.use_bias,
            seed=self.seed,
        )
        return config


def _write_rows(cache, start, new):
    """Writes `new` (B, N, T, H) into `cache` (B * N, S, H) from slot `start` on."""
    new = ops.cast(_merge_rows(new), cache.dtype)
    if keras.backend.backend() == "torch":  # where Keras updates element by element
        slots = ops.arange(new.shape[1], dtype="int64") + start
        return cache.index_copy(1, slots, new)
    return ops.slice_update(cache, (0, start, 0), new)


def _both(first, second):
    return second if first is None else ops.logical_and(first, second)


def padding_mask(inputs, mask):
    """The explicit mask, else the one Keras attached to `inputs`, as bool or None."""
    mask = getattr(inputs, "_keras_mask", None) if mask is None else mask
    return None if mask is None else ops.cast(mask, "bool")
