"""The cached engine: compiled loops over a stepper's explicit state.

Four functions are compiled, once per model and batch size: read a chunk of the
prompts, choose a token, run many cached steps, and, once the window is full under
`context="crop"`, run many whole-window steps. Lengths, seeds and all sampling
settings are tensors, so new ones compile nothing.

Rows of different lengths are padded on the left; `row_offsets` counts that padding.
"""

import weakref
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_tinygpt.generation.compiled import compile_function
from keras_tinygpt.generation.sampling import (
    allowed_rows,
    log_probabilities,
    sample,
)
from keras_tinygpt.generation.steppers import make_stepper

LOOP = 128  # tokens one call of a compiled loop can produce

_ENGINES: "weakref.WeakKeyDictionary[keras.Model, dict]" = weakref.WeakKeyDictionary()


def get_engine(model: keras.Model, logits_processor: Callable | None = None):
    """Returns the engine of `model`, made at the first call."""
    engines = _ENGINES.setdefault(model, {})
    if logits_processor not in engines:
        engines[logits_processor] = Engine(model, logits_processor)
    return engines[logits_processor]


def fit_window(tokens: list[int], window: int | None, context: str) -> list[int]:
    """A copy of what a model with this window reads: all or the last (half) window."""
    if window is None or len(tokens) <= window:
        return list(tokens)
    return tokens[-(max(1, window // 2) if context == "slide" else window) :]


def seen_tokens(texts: list[list[int]], vocab_size: int):
    """Bool tensor (B, V): the tokens that occur in each row."""
    seen = np.zeros((len(texts), vocab_size), "bool")
    for row, text in zip(seen, texts, strict=True):
        row[text] = True
    return ops.convert_to_tensor(seen)


class Engine:
    """Compiled generation for one model.

    Attributes:
        traces: how often each compiled function was traced, by name.
    """

    def __init__(self, model: keras.Model, logits_processor: Callable | None):
        self.stepper = make_stepper(model)
        self.vocab_size = model.output_shape[-1]
        self.logits_processor = logits_processor
        self.traces: dict[str, int] = {}
        variables = self.stepper.model.variables
        self._read_chunk = compile_function(self._trace_read, variables)
        self._choose = compile_function(self._trace_choose, variables)
        self._steps = compile_function(self._trace_steps, variables)
        self._crop_steps = compile_function(self._trace_crop, variables)

    def pieces(self, request, run: int):
        """Yields (tokens (B, k), log-probabilities (B, k)), k at most `run`."""
        total, window = max(request.limits), self.stepper.window
        stepwise = callable(request.sampling.allowed_tokens)
        run = min(run, LOOP)
        texts = [prompt.tolist() for prompt in request.prompts]
        views = [fit_window(text, window, request.context) for text in texts]
        settings = request.sampling.tensors(self.vocab_size)
        seen = seen_tokens(texts, self.vocab_size)
        done = 0
        while done < total:
            index, offsets, logits, state = self.read(views)
            while True:
                if stepwise:
                    settings["allowed"] = allowed_rows(
                        request.sampling, texts, self.vocab_size
                    )
                uniforms = ops.convert_to_tensor(request.uniforms[:, done])
                tokens, scores, seen = self._choose(logits, seen, uniforms, settings)
                yield self._emit(texts, views, tokens[:, None], scores[:, None])
                done += 1
                if done == total or not stepwise or index == window:
                    break
                logits, state = self.step(tokens, index, offsets, state)
                index += 1
            while done < total and not stepwise and index != window:
                count = min(run, total - done)
                count = count if window is None else min(count, window - index)
                tokens, scores, seen, state = self._steps(
                    tokens,
                    seen,
                    _int(index),
                    offsets,
                    state,
                    _columns(request.uniforms, done, count),
                    _int(count),
                    settings,
                )
                yield self._emit(texts, views, tokens, scores, count)
                tokens = ops.convert_to_tensor([view[-1] for view in views], "int32")
                index += count
                done += count
            if done < total and not stepwise and request.context != "slide":
                yield from self._crop(request, run, views, seen, settings, done)
                return
            views = [fit_window(view, window, request.context) for view in views]

    def _emit(self, texts, views, tokens, scores, count: int = 1):
        """Appends the first `count` new tokens to the rows; returns them as NumPy."""
        tokens = ops.convert_to_numpy(tokens)[:, :count]
        scores = ops.convert_to_numpy(scores)[:, :count]
        for text, view, new in zip(texts, views, tokens.tolist(), strict=True):
            view.extend(new)
            text.extend(new)
        return tokens, scores

    def read(self, views: list[list[int]]):
        """Feeds whole rows; returns (length, row_offsets, logits, state)."""
        chunk, length = self.stepper.chunk, max(map(len, views))
        offsets = [length - len(view) for view in views]
        padded = np.zeros((len(views), -(-length // chunk) * chunk), "int32")
        for row, view, offset in zip(padded, views, offsets, strict=True):
            row[offset:length] = view
        offsets = ops.convert_to_tensor(offsets, "int32")
        state = self.stepper.initial_state(len(views))
        for start in range(0, length, chunk):
            logits, state = self._read_chunk(
                ops.convert_to_tensor(padded[:, start : start + chunk]),
                _int(start),
                _int(min(chunk, length - start) - 1),
                offsets,
                state,
            )
        return length, offsets, logits, state

    def step(self, tokens, index: int, offsets, state):
        """Feeds one token (B,) to every row; returns (logits (B, V), state)."""
        return self._read_chunk(
            ops.expand_dims(tokens, 1), _int(index), _int(0), offsets, state
        )

    def _crop(self, request, run, views, seen, settings, done):
        """Every step on the last whole window."""
        total, window = max(request.limits), self.stepper.window
        views = [view[-window:] for view in views]
        tokens = np.zeros((len(views), window), "int32")
        for row, view in zip(tokens, views, strict=True):
            row[window - len(view) :] = view
        offsets = ops.convert_to_tensor([window - len(v) for v in views], "int32")
        tokens = ops.convert_to_tensor(tokens)
        while done < total:
            count = min(run, total - done)
            new, scores, tokens, seen, offsets = self._crop_steps(
                tokens,
                seen,
                offsets,
                _columns(request.uniforms, done, count),
                _int(count),
                settings,
            )
            done += count
            yield (
                ops.convert_to_numpy(new)[:, :count],
                ops.convert_to_numpy(scores)[:, :count],
            )

    def _count_trace(self, name: str) -> None:
        self.traces[name] = self.traces.get(name, 0) + 1

    def _trace_read(self, tokens, index, last, offsets, state):
        self._count_trace("read")
        return self.stepper(tokens, index, last, offsets, state)

    def _trace_choose(self, logits, seen, uniforms, settings):
        self._count_trace("choose")
        return self._next(logits, seen, uniforms, settings)

    def _next(self, logits, seen, uniforms, settings):
        """Processed, filtered and drawn: tokens (B,), scores (B,), seen (B, V)."""
        if self.logits_processor is not None:
            logits = self.logits_processor(logits)
        tokens = sample(logits, seen, uniforms, settings)
        ids = ops.arange(self.vocab_size, dtype="int32")
        seen = ops.logical_or(seen, ops.expand_dims(tokens, 1) == ids)
        return tokens, log_probabilities(logits, tokens), seen

    def _trace_steps(
        self, tokens, seen, index, offsets, state, uniforms, count, settings
    ):
        self._count_trace("steps")

        def step(done, tokens, seen, state, chosen, scores):
            logits, state = self.stepper(
                ops.expand_dims(tokens, 1), index + done, _int(0), offsets, state
            )
            uniform = ops.take(uniforms, done, axis=1)
            tokens, score, seen = self._next(logits, seen, uniform, settings)
            chosen = _put(chosen, done, tokens)
            return done + 1, tokens, seen, state, chosen, _put(scores, done, score)

        start = (_int(0), tokens, seen, state, *_buffers(uniforms))
        _, _, seen, state, chosen, scores = ops.while_loop(
            lambda done, *rest: done < count, step, start
        )
        return chosen, scores, seen, state

    def _trace_crop(self, window, seen, offsets, uniforms, count, settings):
        self._count_trace("crop")
        size = self.stepper.window
        state = self.stepper.initial_state(window.shape[0])

        def step(done, window, seen, offsets, chosen, scores):
            logits, _ = self.stepper(window, _int(0), _int(size - 1), offsets, state)
            uniform = ops.take(uniforms, done, axis=1)
            tokens, score, seen = self._next(logits, seen, uniform, settings)
            window = ops.concatenate(
                [window[:, 1:], ops.expand_dims(tokens, 1)], axis=1
            )
            offsets = ops.maximum(offsets - 1, 0)
            chosen = _put(chosen, done, tokens)
            return done + 1, window, seen, offsets, chosen, _put(scores, done, score)

        start = (_int(0), window, seen, offsets, *_buffers(uniforms))
        _, window, seen, offsets, chosen, scores = ops.while_loop(
            lambda done, *rest: done < count, step, start
        )
        return chosen, scores, window, seen, offsets


def _int(value: int):
    return ops.convert_to_tensor(value, "int32")


def _columns(uniforms: np.ndarray, start: int, count: int):
    """Columns start .. start + count, padded with zeros to one width."""
    columns = np.zeros((len(uniforms), LOOP), "float32")
    columns[:, :count] = uniforms[:, start : start + count]
    return ops.convert_to_tensor(columns)


def _buffers(uniforms):
    return ops.zeros_like(uniforms, dtype="int32"), ops.zeros_like(uniforms)


def _put(buffer, column, values):
    values = ops.cast(ops.expand_dims(values, 1), buffer.dtype)
    return ops.slice_update(buffer, (0, column), values)
