"""The endpoints of an exported model: their inputs, their checks, their graphs."""

from typing import Any

import keras
import tensorflow as tf

from keras_tinygpt.export.draws import draw_uniforms
from keras_tinygpt.export.graph_engine import GraphEngine, before_stop, check
from keras_tinygpt.export.text_graph import make_text_graph, pad_left

OUTPUTS = {  # prefill and decode name theirs themselves
    "serve": "logits",
    "generate": "tokens",
    "generate_text": "texts",
    "metadata": "metadata",
}


def make_module(model: keras.Model, tokenizer: Any, metadata: str):
    """Returns a `tf.Module` with the endpoints, and the signatures to save it with.

    Args:
        model: a float32 GPT or LSTM.
        tokenizer: its tokenizer.
        metadata: path of the file that the endpoint of that name reads.
    """
    module, signatures = tf.Module(name="tinygpt"), {}
    module.model_weights = [weight.value for weight in model.weights]
    module.metadata_file = tf.saved_model.Asset(metadata)  # saving copies it
    endpoints = Endpoints(model, tokenizer, module.metadata_file)
    for name, specs in endpoints.inputs().items():
        function = tf.function(getattr(endpoints, name), autograph=False)
        specs = {spec.name: spec for spec in specs}
        function = function.get_concrete_function(**specs)
        setattr(module, name, function)
        signatures[name] = _signature(function, OUTPUTS.get(name), specs)
    return module, {"serving_default": signatures["serve"], **signatures}


def _signature(function, output: str | None, specs: dict[str, tf.TensorSpec]):
    """`function` with keyword inputs and, as signatures must have, named outputs."""

    def named(**inputs):
        outputs = function(**inputs)
        return outputs if output is None else {output: outputs}

    return tf.function(named, autograph=False).get_concrete_function(**specs)


class Endpoints:
    """Each method named in `inputs` is an endpoint; see `export_saved_model`."""

    def __init__(
        self, model: keras.Model, tokenizer: Any, metadata: tf.saved_model.Asset
    ):
        self._model, self._metadata = model, metadata
        self._text = make_text_graph(tokenizer)
        self._engine = GraphEngine(model)
        self._window, self._vocab_size = self._engine.window, self._engine.vocab_size

    def inputs(self) -> dict[str, list[tf.TensorSpec]]:
        """What each endpoint takes."""
        tokens = _spec("tokens", tf.int32, None, None)
        row_offsets = _spec("row_offsets", tf.int32, None)
        sampling = [
            _spec("temperature", tf.float32),
            _spec("top_k", tf.int32),
            _spec("top_p", tf.float32),
        ]
        state = self._engine.stepper.initial_state(1)
        return {
            "serve": [tokens],
            "prefill": [tokens, row_offsets],
            "decode": [
                _spec("tokens", tf.int32, None),
                _spec("index", tf.int32),
                row_offsets,
                *(
                    _spec(name, value.dtype, None, *value.shape[1:])
                    for name, value in state.items()
                ),
            ],
            "generate": [
                tokens,
                row_offsets,
                _spec("uniforms", tf.float32, None, None),
                *sampling,
                _spec("min_p", tf.float32),
                _spec("repetition_penalty", tf.float32),
                _spec("allowed", tf.bool, self._vocab_size),
            ],
            "generate_text": [
                _spec("prompts", tf.string, None),
                _spec("max_new_tokens", tf.int32),
                _spec("seed", tf.int64),
                *sampling,
                _spec("stop", tf.string),
            ],
            "metadata": [],
        }

    def serve(self, tokens):
        return self._model(self._checked(tokens, limited=True), training=False)

    def prefill(self, tokens, row_offsets):
        tokens = self._checked(tokens, row_offsets, limited=True)
        logits, state = self._engine.read(tokens, row_offsets)
        return {"logits": logits, **state}

    def decode(self, tokens, index, row_offsets, **state):
        checks = [check(index >= 0, "index must not be negative, got", index)]
        if self._window is not None:
            rule = f"index must be below max_sequence_length={self._window}, got"
            checks.append(check(index < self._window, rule, index))
        with tf.control_dependencies(checks):
            tokens = self._checked(tokens)
        logits, state = self._engine.step(tokens, index, row_offsets, state)
        return {"logits": logits, **state}

    def generate(
        self,
        tokens,
        row_offsets,
        uniforms,
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        allowed,
    ):
        tokens = self._checked(tokens, row_offsets)
        settings = self._settings(
            temperature, top_k, top_p, min_p, repetition_penalty, allowed
        )
        no_stop = tf.zeros([0], tf.int32)
        return self._engine.extend(tokens, row_offsets, uniforms, settings, no_stop)

    def generate_text(
        self, prompts, max_new_tokens, seed, temperature, top_k, top_p, stop
    ):
        rows = self._text.encode(prompts)
        checks = [
            check(rows.nrows() > 0, "prompts must hold at least 1 string"),
            check(rows.row_lengths() > 0, "prompts must hold at least 1 character"),
            check(
                max_new_tokens >= 0,
                "max_new_tokens must not be negative, got",
                max_new_tokens,
            ),
        ]
        with tf.control_dependencies(checks):
            tokens, row_offsets = pad_left(rows)
        everything = tf.ones([self._vocab_size], tf.bool)
        settings = self._settings(
            temperature, top_k, top_p, tf.constant(0.0), tf.constant(1.0), everything
        )
        uniforms = draw_uniforms(seed, tf.shape(tokens)[0], max_new_tokens)
        stop = self._text.encode(stop[None]).flat_values
        chosen = self._engine.extend(tokens, row_offsets, uniforms, settings, stop)
        chosen = tf.RaggedTensor.from_tensor(chosen, before_stop(chosen, stop))
        return self._text.decode(prompts, chosen)

    def metadata(self):
        return tf.io.read_file(self._metadata.asset_path)

    def _checked(self, tokens, row_offsets=None, limited=False):
        """`tokens` once their range, and their number if `limited`, are checked."""
        inside = (tokens >= 0) & (tokens < self._vocab_size)
        rule = f"tokens must lie between 0 and {self._vocab_size - 1}"
        checks = [check(inside, f"{rule} (vocab_size={self._vocab_size})")]
        if tokens.shape.rank == 2:
            shape = tf.shape(tokens)
            rule = "tokens must have at least 1 row and 1 column, got shape"
            checks.append(check(shape > 0, rule, shape))
        if limited and self._window is not None:
            most = f"at most max_sequence_length={self._window}"
            rule = f"tokens must have {most} columns, got"
            checks.append(check(shape[1] <= self._window, rule, shape[1]))
        if row_offsets is not None:
            rule = "row_offsets must hold one number per row of tokens, got"
            count = tf.size(row_offsets)
            checks.append(check(count == shape[0], rule, count))
            inside = (row_offsets >= 0) & (row_offsets < shape[1])
            rule = "row_offsets must lie between 0 and the columns of tokens less 1"
            checks.append(check(inside, rule))
        with tf.control_dependencies(checks):
            return tf.identity(tokens)

    def _settings(self, temperature, top_k, top_p, min_p, penalty, allowed):
        """The checked tensors that `sampling.sample` takes."""
        checks = [
            check(kept, rule)
            for kept, rule in (
                (tf.math.is_finite(temperature), "temperature must be finite"),
                (temperature >= 0.0, "temperature must be at least 0"),
                (top_k >= 0, "top_k must be at least 0 (0 means all)"),
                ((top_p > 0.0) & (top_p <= 1.0), "top_p must lie in (0, 1]"),
                ((min_p >= 0.0) & (min_p <= 1.0), "min_p must lie in [0, 1]"),
                (penalty >= 1.0, "repetition_penalty must be at least 1"),
                (tf.reduce_any(allowed), "allowed must hold at least 1 True"),
            )
        ]
        with tf.control_dependencies(checks):
            top_k = tf.where(top_k == 0, self._vocab_size, top_k)
        return {
            "allowed": allowed,
            "repetition_penalty": penalty,
            "temperature": temperature,
            "top_k": tf.minimum(top_k, self._vocab_size),
            "top_p": top_p,
            "min_p": min_p,
        }


def _spec(name: str, dtype, *shape) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype, name)
