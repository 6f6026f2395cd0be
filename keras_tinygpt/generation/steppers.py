"""Models that read a few tokens at a time and keep what they need of the earlier ones.

A stepper wraps a second functional model over the *same layer objects* as the trained
model: (tokens, index, last, row_offsets, state) -> (logits of one position, new
state). A GPT's state is its keys and values, an LSTM's its (h, c); the state of an
encoder-decoder also holds the keys and values of its source, which stay as they are.
"""

import keras
from keras import ops

from keras_tinygpt.models import GPT, LSTM, EncoderDecoder
from keras_tinygpt.models.encoder_decoder import DECODER

CHUNK = 16  # tokens per step while a prompt is read
SEGMENT = 8 * CHUNK  # tokens per call where a prompt may have any length


def make_stepper(model: keras.Model) -> "GPTStepper | DecoderStepper | LSTMStepper":
    """Returns the stepper of a model; ValueError for those that have none."""
    if isinstance(model, EncoderDecoder):
        return DecoderStepper(model)
    if isinstance(model, GPT):
        return GPTStepper(model)
    if isinstance(model, LSTM):
        return LSTMStepper(model)
    raise ValueError(
        "cached generation needs a model from build_gpt, build_lstm or "
        "build_encoder_decoder (use_cache=False takes any), got "
        f"{type(model).__name__}"
    )


class _CachedBlock(keras.layers.Layer):
    """Calls a block with its cache.

    A Keras graph refuses a layer that returns one tensor at one call and three at
    another, so the cached call is a node of its own; the weights are the block's.
    """

    def __init__(self, block: keras.layers.Layer):
        super().__init__(dtype=block.dtype_policy, name=f"cached_{block.name}")
        self.block = block
        self.built = True

    def call(self, inputs, row_offsets, keys, values, index, **context):
        slots = ops.arange(ops.shape(keys)[1], dtype="int32")
        readable = slots >= ops.expand_dims(row_offsets, (1, 2))  # (B, 1, S)
        outputs, (keys, values) = self.block(
            inputs,
            attention_mask=readable,
            cache=(keys, values),
            cache_index=index,
            **context,
        )
        return outputs, keys, values

    def compute_output_spec(self, inputs, row_offsets, keys, values, index, **context):
        return tuple(
            keras.KerasTensor(x.shape, dtype=x.dtype) for x in (inputs, keys, values)
        )


class GPTStepper:
    """Cached steps of a GPT, or of what reads earlier tokens as a GPT does.

    Attributes:
        window: most tokens the model reads.
        chunk: tokens per step while a prompt is read.
        segment: tokens per call while a prompt is read; here also the cache slots.
        model: functional model with the inputs, by name,
            tokens: int32 (B, C), consecutive tokens of each row;
            index: int32 scalar, cache slot of the first of them;
            last: int32 scalar, the one whose logits are wanted (0 to C - 1);
            row_offsets: int32 (B,), padding slots to the left of each row;
            keys_i, values_i: (B * N_kv, S, H) for each block i, any S;
            and the outputs logits (float32 (B, V)), keys_i, values_i.
    """

    def __init__(self, model: GPT):
        config = model.config
        self.config = config
        self.window = config.max_sequence_length
        self.chunk = min(CHUNK, self.window)
        self.segment = -(-self.window // self.chunk) * self.chunk  # whole chunks
        self.dtype = model.compute_dtype
        self.model = self._build(model)

    def initial_state(self, batch_size: int) -> dict:
        """Empty caches for the whole window, by input name."""
        heads = self.config.num_kv_heads or self.config.num_heads
        shape = (batch_size * heads, self.segment, self.config.head_dim)
        return {
            f"{kind}_{index}": ops.zeros(shape, self.dtype)
            for index in range(self.config.num_layers)
            for kind in ("keys", "values")
        }

    def take_rows(self, state: dict, rows) -> dict:
        """The state of some rows, int (B,), of the batch."""
        heads = self.config.num_kv_heads or self.config.num_heads
        merged = ops.expand_dims(rows * heads, 1) + ops.arange(heads, dtype="int32")
        merged = ops.reshape(merged, (-1,))
        return {
            name: ops.take(value, merged if len(value.shape) == 3 else rows, axis=0)
            for name, value in state.items()
        }

    def _layers(self, model: keras.Model) -> dict[str, keras.Layer]:
        """The layers a step runs through, by the names they have in a GPT."""
        return {layer.name: layer for layer in model.layers}

    def _source_inputs(self) -> dict:
        """Inputs of the step model that no step changes."""
        return {}

    def _context_of(self, inputs: dict, index: int) -> dict:
        """What block `index` reads of them, as arguments of its call."""
        return {}

    def _build(self, model: keras.Model) -> keras.Model:
        config = self.config
        inputs = {
            "tokens": keras.Input((None,), dtype="int32", name="tokens"),
            "index": keras.Input(batch_shape=(), dtype="int32", name="index"),
            "last": keras.Input(batch_shape=(), dtype="int32", name="last"),
            "row_offsets": keras.Input((), dtype="int32", name="row_offsets"),
        }
        for index in range(config.num_layers):
            for kind in ("keys", "values"):
                name = f"{kind}_{index}"
                inputs[name] = keras.Input(
                    (None, config.head_dim), dtype=self.dtype, name=name
                )
        inputs |= self._source_inputs()
        layers = self._layers(model)
        x = layers["token_embedding"](inputs["tokens"])  # (B, C, D)
        if config.scale_embeddings:
            x = layers["embedding_scale"](x)
        for name in ("position_embedding", "position_encoding"):
            if name in layers:
                x = layers[name](
                    x, start_index=inputs["index"], row_offsets=inputs["row_offsets"]
                )
        outputs = {}
        for index in range(config.num_layers):
            keys, values = f"keys_{index}", f"values_{index}"
            x, outputs[keys], outputs[values] = _CachedBlock(layers[f"block_{index}"])(
                x,
                inputs["row_offsets"],
                inputs[keys],
                inputs[values],
                inputs["index"],
                **self._context_of(inputs, index),
            )
        x = ops.take(x, inputs["last"], axis=1)  # (B, D)
        if "final_norm" in layers:
            x = layers["final_norm"](x)
        if config.tie_embeddings:
            logits = layers["token_embedding"](x, reverse=True)
        else:
            logits = layers["head"](x)
        return keras.Model(inputs, {"logits": logits, **outputs}, name="step")

    def __call__(self, tokens, index, last, row_offsets, state):
        """Returns logits (B, V) and the new state."""
        outputs = self.model(
            {
                "tokens": tokens,
                "index": index,
                "last": last,
                "row_offsets": row_offsets,
                **state,
            }
        )
        logits = outputs.pop("logits")
        return logits, {**state, **outputs}


class _ProjectedContext(keras.layers.Layer):
    """Keys and values (B * N_kv, S, H) of a block's cross-attention.

    A node of its own, since a block gives something else when it is called.
    """

    def __init__(self, block: keras.layers.Layer):
        super().__init__(dtype=block.dtype_policy, name=f"projected_{block.name}")
        self.block = block
        self.built = True

    def call(self, context):
        pair = self.block.project_context(context)
        return tuple(ops.reshape(x, (-1, *ops.shape(x)[2:])) for x in pair)


class DecoderStepper(GPTStepper):
    """Cached steps of the decoder of an encoder-decoder.

    To a GPT's state it adds `source_keys_i` and `source_values_i` (B * N_kv, S, H) for
    each block i and `source_mask`, bool (B, S): what `read_source` returns, once for
    each text.

    Attributes:
        encoder: functional model source (B, S) -> that part of the state.
    """

    def __init__(self, model: EncoderDecoder):
        super().__init__(model)
        self.encoder = self._build_encoder(model)

    def read_source(self, sources) -> dict:
        """The part of the state that int sources (B, S) make."""
        return self.encoder(sources)

    def _build_encoder(self, model: EncoderDecoder) -> keras.Model:
        layers, (context, real) = self._layers(model), model.context
        outputs = {"source_mask": real}
        for index in range(self.config.num_layers):
            keys, values = _ProjectedContext(layers[f"block_{index}"])(context)
            outputs |= {f"source_keys_{index}": keys, f"source_values_{index}": values}
        return keras.Model(model.inputs[0], outputs, name="read_source")

    def _layers(self, model):
        layers = super()._layers(model)
        return {name.removeprefix(DECODER): layer for name, layer in layers.items()}

    def _source_inputs(self):
        inputs = {"source_mask": keras.Input((None,), dtype="bool", name="source_mask")}
        for index in range(self.config.num_layers):
            for kind in ("source_keys", "source_values"):
                name = f"{kind}_{index}"
                inputs[name] = keras.Input(
                    (None, self.config.head_dim), dtype=self.dtype, name=name
                )
        return inputs

    def _context_of(self, inputs, index):
        pair = (inputs[f"source_keys_{index}"], inputs[f"source_values_{index}"])
        return {"context_cache": pair, "context_mask": inputs["source_mask"]}


class LSTMStepper:
    """Steps of an LSTM; the same interface, without a longest length.

    `index` is the number of tokens read before, padding included.
    """

    window = None

    def __init__(self, model: LSTM):
        self.config = model.config
        self.chunk, self.segment = CHUNK, SEGMENT
        self.dtype = model.compute_dtype
        self.model = model.with_state()

    def initial_state(self, batch_size: int) -> dict:
        """Zero states, by name."""
        state = {}
        shape = (batch_size, self.config.hidden_dim)
        for index in range(self.config.num_layers):
            state[f"h_{index}"] = ops.zeros(shape, self.dtype)
            state[f"c_{index}"] = ops.zeros(shape, self.dtype)
        return state

    def take_rows(self, state: dict, rows) -> dict:
        """The state of some rows, int (B,), of the batch."""
        return {name: ops.take(value, rows, axis=0) for name, value in state.items()}

    def __call__(self, tokens, index, last, row_offsets, state):
        """Returns logits (B, V) and the new state."""
        places = ops.arange(ops.shape(tokens)[1], dtype="int32")
        live = ops.expand_dims(places + index, 0) >= ops.expand_dims(row_offsets, 1)
        live = ops.logical_and(live, ops.expand_dims(places <= last, 0))  # (B, C)
        pairs = [
            (state[f"h_{layer}"], state[f"c_{layer}"])
            for layer in range(self.config.num_layers)
        ]
        logits, pairs = self.model([tokens, live, pairs])
        state = {}
        for layer, (hidden, cell) in enumerate(pairs):
            state[f"h_{layer}"], state[f"c_{layer}"] = hidden, cell
        return ops.take(logits, last, axis=1), state
