"""The transformer block: attention and a feed-forward layer on a residual stream.

A decoder's block that reads an encoder has cross-attention between the two.

Pre-norm adds sublayer outputs to an untouched stream, so a stack needs one more norm
at its end; post-norm, the original arrangement, normalises after each addition.
"""

import keras
from keras import ops

from keras_tinygpt.checks import check_bool, check_choice, check_float, check_int
from keras_tinygpt.layers.attention import (
    CausalMultiHeadAttention,
    CrossAttention,
    padding_mask,
)
from keras_tinygpt.layers.dense import Dense
from keras_tinygpt.layers.dropout import Dropout
from keras_tinygpt.layers.normalization import (
    NORM_EPSILON,
    NORMALIZATIONS,
    make_norm,
)
from keras_tinygpt.layers.positions import MAX_WAVELENGTH

ACTIVATIONS = ("gelu", "relu", "relu2", "swiglu")
NORM_POSITIONS = ("pre", "post")


def offset_seed(seed: int | None, offset: int) -> int | None:
    """Returns the seed of a sibling dropout, from the range every backend tells apart.

    PyTorch takes no more than 31 bits, and Keras on TensorFlow reduces seeds modulo
    `2**31 - 2`.
    """
    return None if seed is None else (seed + offset) % (2**31 - 2)


def _gelu(inputs):
    """The tanh approximation; in bfloat16 on PyTorch's CPU path what it approximates.

    The two differ by less than 0.0005, which is the spacing of bfloat16 at 0.1; this
    backend takes five times as long for a tanh.
    """
    slow = keras.backend.backend() == "torch" and inputs.device.type == "cpu"
    narrow = keras.backend.standardize_dtype(inputs.dtype) == "bfloat16"
    return ops.gelu(inputs, approximate=not (slow and narrow))


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class FeedForward(keras.layers.Layer):
    """Two projections with a nonlinearity between: `g(x W1 + b1) W2 + b2`.

    With "swiglu" the middle is `silu(x Wg + bg) * (x W1 + b1)`, a third matrix.

    Args:
        intermediate_dim: width F of the middle; None means 4 D.
        activation: "gelu" (tanh approximation), "relu", "relu2" (its square) or
            "swiglu".
        use_bias: whether the projections have biases.

    Call arguments:
        inputs: float tensor (..., D).

    Returns:
        Tensor (..., D). Every position is treated alone.

    Reference: Vaswani et al., 2017, equation 2; Hendrycks and Gimpel, 2016 (gelu);
    So et al., 2021 (relu2); Shazeer, 2020 (swiglu).
    """

    def __init__(
        self,
        intermediate_dim: int | None = None,
        activation: str = "gelu",
        use_bias: bool = True,
        **kwargs,
    ):
        if intermediate_dim is not None:
            check_int("intermediate_dim", intermediate_dim)
        check_choice("activation", activation, ACTIVATIONS)
        super().__init__(**kwargs)
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.use_bias = check_bool("use_bias", use_bias)
        self.supports_masking = True

    def build(self, input_shape):
        hidden_dim = input_shape[-1]
        intermediate_dim = self.intermediate_dim or 4 * hidden_dim

        def dense(units, input_dim, name):
            layer = Dense(
                units, use_bias=self.use_bias, dtype=self.dtype_policy, name=name
            )
            layer.build((None, input_dim))
            return layer

        self._intermediate = dense(intermediate_dim, hidden_dim, "intermediate")
        if self.activation == "swiglu":
            self._gate = dense(intermediate_dim, hidden_dim, "gate")
        self._output = dense(hidden_dim, intermediate_dim, "output")
        self.built = True

    def call(self, inputs):
        hidden = self._intermediate(inputs)  # (..., F)
        if self.activation == "gelu":
            hidden = _gelu(hidden)
        elif self.activation == "swiglu":
            hidden = ops.silu(self._gate(inputs)) * hidden
        else:
            hidden = ops.relu(hidden)
            if self.activation == "relu2":
                hidden = hidden * hidden  # PyTorch's gradient of a square is slow
        return self._output(hidden)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        config = super().get_config()
        config.update(
            intermediate_dim=self.intermediate_dim,
            activation=self.activation,
            use_bias=self.use_bias,
        )
        return config


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class TransformerBlock(keras.layers.Layer):
    """Causal self-attention and a feed-forward layer, each added to its input.

    Pre-norm: `x = x + Attention(Norm(x)); x = x + FeedForward(Norm(x))`.
    Post-norm: `x = Norm(x + Attention(x)); x = Norm(x + FeedForward(x))`.
    With `cross_attention` a third sublayer between the two reads `context`.

    Args:
        num_heads: number of query heads N.
        num_kv_heads: number of key and value heads; None means N.
        intermediate_dim: width F of the feed-forward layer; None means 4 D.
        positions: "none", "rotary" or "alibi", see `CausalMultiHeadAttention`.
        normalization: "layer" or "rms".
        norm_position: "pre" or "post".
        activation: see `FeedForward`.
        dropout: share of each sublayer's output dropped in training.
        attention_dropout: share of the attention weights dropped in training.
        qkv_bias: whether query, key and value projections have a bias.
        use_bias: whether all other projections have one.
        qk_norm: whether queries and keys are RMS-normalised.
        attention_window: number of positions each query reads; None means all.
        fused_projections: whether one Dense makes queries, keys and values.
        causal: False lets every position read all others.
        cross_attention: whether a `CrossAttention` follows the self-attention; it has
            no positions and no qk norm.
        norm_epsilon: added to the variance, or the mean square, in every norm.
        max_wavelength: base of the frequencies of rotary positions.
        seed: seed of the dropouts.

    Call arguments:
        inputs: float tensor (B, T, D).
        attention_mask, cache, cache_index, return_attention_scores, mask, training:
            as in `CausalMultiHeadAttention`.
        context: float tensor (B, S, E), what cross-attention reads.
        context_mask: optional bool tensor (B, S), False is not read. Taken from
            `context` when it carries a Keras mask.
        context_cache: optional pair made by `project_context`; replaces `context`.

    Returns:
        Tensor (B, T, D), followed by the weights, those of cross-attention (B, N, T, S)
        and the cache where asked for.

    Raises:
        ValueError: for a bad argument, a missing `context`, or one that is not read.

    Example:
        >>> import keras_tinygpt as tg
        >>> tokens = keras.Input((None,), dtype="int32")
        >>> x = keras.layers.Embedding(11, 12)(tokens)
        >>> x = tg.layers.TransformerBlock(num_heads=2)(x)
        >>> keras.Model(tokens, x).output_shape
        (None, None, 12)

    Reference: Vaswani et al., 2017, section 3.1; Xiong et al., 2020 (pre-norm).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        intermediate_dim: int | None = None,
        positions: str = "none",
        normalization: str = "layer",
        norm_position: str = "pre",
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        qkv_bias: bool = False,
        use_bias: bool = True,
        qk_norm: bool = False,
        attention_window: int | None = None,
        fused_projections: bool = True,
        causal: bool = True,
        cross_attention: bool = False,
        norm_epsilon: float = NORM_EPSILON,
        max_wavelength: float = MAX_WAVELENGTH,
        seed: int | None = None,
        **kwargs,
    ):
        check_choice("normalization", normalization, NORMALIZATIONS)
        check_choice("norm_position", norm_position, NORM_POSITIONS)
        check_float("dropout", dropout, 0.0, 1.0, high_open=True)
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.intermediate_dim = intermediate_dim
        self.positions = positions
        self.normalization = normalization
        self.norm_position = norm_position
        self.activation = activation
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.qkv_bias = qkv_bias
        self.use_bias = use_bias
        self.qk_norm = qk_norm
        self.attention_window = attention_window
        self.fused_projections = fused_projections
        self.causal = causal
        self.cross_attention = check_bool("cross_attention", cross_attention)
        self.norm_epsilon = norm_epsilon
        self.max_wavelength = max_wavelength
        self.seed = seed
        self.supports_masking = True
        self._attention = CausalMultiHeadAttention(
            num_heads,
            num_kv_heads=num_kv_heads,
            positions=positions,
            qk_norm=qk_norm,
            attention_window=attention_window,
            attention_dropout=attention_dropout,
            qkv_bias=qkv_bias,
            use_bias=use_bias,
            fused_projections=fused_projections,
            causal=causal,
            norm_epsilon=norm_epsilon,
            max_wavelength=max_wavelength,
            seed=offset_seed(seed, 2),
            dtype=self.dtype_policy,
            name="attention",
        )
        self._feed_forward = FeedForward(
            intermediate_dim,
            activation,
            use_bias,
            dtype=self.dtype_policy,
            name="feed_forward",
        )
        self._attention_norm = self._norm("attention_norm")
        self._feed_forward_norm = self._norm("feed_forward_norm")
        self._attention_dropout = self._drop("attention_output_dropout", 0)
        self._feed_forward_dropout = self._drop("feed_forward_dropout", 1)
        if cross_attention:
            self._cross_attention = CrossAttention(
                num_heads,
                num_kv_heads=num_kv_heads,
                attention_dropout=attention_dropout,
                qkv_bias=qkv_bias,
                use_bias=use_bias,
                seed=offset_seed(seed, 4),
                dtype=self.dtype_policy,
                name="cross_attention",
            )
            self._cross_attention_norm = self._norm("cross_attention_norm")
            self._cross_attention_dropout = self._drop(
                "cross_attention_output_dropout", 3
            )

    def _norm(self, name: str) -> keras.Layer:
        return make_norm(self.normalization, self.dtype_policy, name, self.norm_epsilon)

    def _drop(self, name: str, offset: int) -> Dropout:
        seed = offset_seed(self.seed, offset)
        return Dropout(self.dropout, seed=seed, dtype=self.dtype_policy, name=name)

    def build(self, inputs_shape, context_shape=None):
        self._attention_norm.build(inputs_shape)
        self._attention.build(inputs_shape)
        if self.cross_attention:
            self._cross_attention_norm.build(inputs_shape)
            # Projected keys and values alone do not tell the width of what they are of.
            self._cross_attention.build(inputs_shape, context_shape or inputs_shape)
        self._feed_forward_norm.build(inputs_shape)
        self._feed_forward.build(inputs_shape)
        self.built = True

    def project_context(self, context):
        """Keys and values of `context`, see `CrossAttention.project_context`."""
        return self._cross_attention.project_context(context)

    def call(
        self,
        inputs,
        attention_mask=None,
        cache=None,
        cache_index=None,
        return_attention_scores=False,
        mask=None,
        training=None,
        context=None,
        context_mask=None,
        context_cache=None,
    ):
        self._check_context(context, context_cache)
        results = self._attention(
            self._enter(self._attention_norm, inputs),
            attention_mask=attention_mask,
            cache=cache,
            cache_index=cache_index,
            return_attention_scores=return_attention_scores,
            mask=padding_mask(inputs, mask),
            training=training,
        )
        update, *extras = results if isinstance(results, tuple) else (results,)
        update = self._attention_dropout(update, training=training)
        hidden = self._leave(self._attention_norm, inputs, update)
        if self.cross_attention:
            update, weights = self._cross_attention(
                self._enter(self._cross_attention_norm, hidden),
                context,
                context_mask=context_mask,
                cache=context_cache,
                return_attention_scores=True,
                training=training,
            )
            if return_attention_scores:
                extras.insert(1, weights)
            update = self._cross_attention_dropout(update, training=training)
            hidden = self._leave(self._cross_attention_norm, hidden, update)
        update = self._feed_forward(self._enter(self._feed_forward_norm, hidden))
        update = self._feed_forward_dropout(update, training=training)
        hidden = self._leave(self._feed_forward_norm, hidden, update)
        return (hidden, *extras) if extras else hidden

    def rematerialized_call(self, layer_call, *args, **kwargs):
        # Backends take a function of tensors, and nothing by keyword.
        if not args:
            return layer_call
        inputs, *others = args
        run = super().rematerialized_call(
            lambda inputs: layer_call(inputs, *others, **kwargs), inputs
        )
        return lambda *args, **kwargs: run(inputs)

    def _enter(self, norm, hidden):
        """What a sublayer reads."""
        return norm(hidden) if self.norm_position == "pre" else hidden

    def _leave(self, norm, hidden, update):
        """The stream after a sublayer."""
        hidden = hidden + update
        return hidden if self.norm_position == "pre" else norm(hidden)

    def _check_context(self, context, context_cache):
        given = context is not None or context_cache is not None
        if given != self.cross_attention:
            rule = "must" if self.cross_attention else "must not"
            raise ValueError(
                f"context {rule} be given to a block with "
                f"cross_attention={self.cross_attention}, "
                f"got {'one' if given else 'none'}"
            )

    def compute_output_spec(
        self,
        inputs,
        attention_mask=None,
        cache=None,
        cache_index=None,
        return_attention_scores=False,
        mask=None,
        training=None,
        context=None,
        context_mask=None,
        context_cache=None,
    ):
        self._check_context(context, context_cache)
        results = self._attention.compute_output_spec(
            inputs, cache=cache, return_attention_scores=return_attention_scores
        )
        if not (self.cross_attention and return_attention_scores):
            return results
        _, weights = self._cross_attention.compute_output_spec(
            inputs, context, cache=context_cache, return_attention_scores=True
        )
        return (*results[:2], weights, *results[2:])

    def compute_output_shape(self, input_shape):
        return input_shape

    def compute_mask(self, inputs, mask=None):
        return self._attention.compute_mask(inputs, mask)

    def get_config(self):
        config = super().get_config()
        config.update(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_dim=self.intermediate_dim,
            positions=self.positions,
            normalization=self.normalization,
            norm_position=self.norm_position,
            activation=self.activation,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            qkv_bias=self.qkv_bias,
            use_bias=self.use_bias,
            qk_norm=self.qk_norm,
            attention_window=self.attention_window,
            fused_projections=self.fused_projections,
            causal=self.causal,
            cross_attention=self.cross_attention,
            norm_epsilon=self.norm_epsilon,
            max_wavelength=self.max_wavelength,
            seed=self.seed,
        )
        return config
