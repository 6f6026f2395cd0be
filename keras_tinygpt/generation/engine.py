"""The cached engine: compiled loops over a stepper's explicit state.

Compiled functions, once per model and batch size: read the prompts and choose the
first token (a stream) or run many cached steps after it (`generate`); run many more
cached steps; and, once the window is full under `context="crop"`, run many
whole-window steps. Lengths, seeds and all sampling settings are inputs, so new ones
compile nothing.

Rows of different lengths are padded on the left; `row_offsets` counts that padding.
"""

import functools
import threading
import weakref
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_tinygpt.generation.compiled import compile_function
from keras_tinygpt.generation.recorded import record_operations
from keras_tinygpt.generation.sampling import (
    BRANCHLESS_VOCAB,
    allowed_rows,
    log_probabilities,
    sample,
)
from keras_tinygpt.generation.steppers import DecoderStepper, make_stepper

LOOP = 128  # tokens one call of a compiled loop can produce

_ENGINES: "weakref.WeakKeyDictionary[keras.Model, tuple]" = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def get_engine(model: keras.Model, logits_processor: Callable | None = None):
    """Returns the engine of `model`, made at the first call.

    It is made anew once the layers compute something else: with adapters, quantized.
    """
    state = [
        (getattr(layer, "lora_enabled", False), getattr(layer, "quantization_mode", ""))
        for layer in model._flatten_layers(include_self=False)
    ]
    with _MAKING:
        known, engines = _ENGINES.get(model, (None, {}))
        if known != state:
            engines = {}
            _ENGINES[model] = (state, engines)
        if logits_processor not in engines:
            engines[logits_processor] = Engine(model, logits_processor)
        return engines[logits_processor]


def fit_window(tokens: list[int], window: int | None, context: str) -> list[int]:
    """A copy of what a model with this window reads: all or the last (half) window."""
    if window is None or len(tokens) <= window:
        return list(tokens)
    return tokens[-(max(1, window // 2) if context == "slide" else window) :]


def seen_tokens(texts: list[list[int]], vocab_size: int):
    """Bool array (B, V): the tokens that occur in each row."""
    seen = np.zeros((len(texts), vocab_size), "bool")
    for row, text in zip(seen, texts, strict=True):
        row[text] = True
    return seen


class Engine:
    """Compiled generation for one model.

    Attributes:
        traces: how often each compiled function was traced, by name.
        read_and_run, run_steps, crop_steps, one_step: compiled functions; the arguments
            are those of `_open`, `_trace_steps`, `_trace_crop` and `_trace_one_step`.
    """

    def __init__(self, model: keras.Model, logits_processor: Callable | None):
        self.stepper = make_stepper(model)
        self._step = record_operations(self.stepper)
        self.vocab_size = model.output_shape[-1]
        self.logits_processor = logits_processor
        # A loop's caches are its own: reading the prompt has copied those of `start`.
        whole = logits_processor is None and self.vocab_size <= BRANCHLESS_VOCAB
        step = self.stepper if whole else record_operations(self.stepper, True)
        advance = functools.partial(self._step_and_choose, step)
        self._advance = record_operations(advance, True) if whole else advance
        self.traces: dict[str, int] = {}
        variables = self.stepper.model.variables
        self._read = compile_function(self._trace_read, variables)
        self.read_and_run = compile_function(self._trace_read_and_run, variables)
        self.run_steps = compile_function(self._trace_steps, variables)
        self.crop_steps = compile_function(self._trace_crop, variables)
        self.one_step = compile_function(self._trace_one_step, variables)
        self._empty: tuple[int, dict] = (0, {})
        if isinstance(self.stepper, DecoderStepper):
            self._read_source = compile_function(
                self.stepper.read_source, self.stepper.encoder.variables
            )

    def pieces(self, request, first: int, run: int):
        """Yields (tokens (B, k), log-probabilities (B, k)).

        k is at most `first` to begin with, then at most `run`. With `first=1` reading
        the prompt is compiled by itself, so that the first token comes soon.
        """
        total, window = max(request.limits), self.stepper.window
        texts = [prompt.tolist() for prompt in request.prompts]
        views = [fit_window(text, window, request.context) for text in texts]
        choice = _Choice(request, texts, self.vocab_size)
        if choice.stepwise:
            first = run = 1
        first, run = min(first, LOOP), min(run, LOOP)
        seen = seen_tokens(texts, self.vocab_size)
        start = self.start(len(texts), request.sources)
        done = 0
        while done < total:
            index = max(map(len, views))
            count = _most(first, total - done, window, index - 1)
            uniforms = _columns(request.uniforms, done, count)
            offsets, outputs = self.read(
                start, views, seen, uniforms, choice.settings(), count, first > 1
            )
            _, chosen, scores, seen, state = outputs
            yield _emit(texts, views, chosen, scores, count)
            index, done = index + count - 1, done + count
            while done < total and index != window:
                count = _most(run, total - done, window, index)
                chosen, scores, seen, state = self.run_steps(
                    np.asarray([view[-1] for view in views], "int32"),
                    seen,
                    np.int32(index),
                    offsets,
                    state,
                    _columns(request.uniforms, done, count),
                    np.int32(count),
                    choice.settings(),
                )
                yield _emit(texts, views, chosen, scores, count)
                index, done = index + count, done + count
            if done < total and request.context != "slide":
                yield from self._crop(
                    request, run, start, texts, views, seen, choice, done
                )
                return
            views = [fit_window(view, window, request.context) for view in views]

    def start(self, batch_size: int, sources=None) -> dict:
        """The state before the first token.

        Args:
            batch_size: number of rows B.
            sources: int array (B, S) that an encoder-decoder reads, here and only here.
        """
        kept, state = self._empty
        if kept != batch_size:
            state = self.stepper.initial_state(batch_size)
            self._empty = (batch_size, state)
        return state if sources is None else {**state, **self._read_source(sources)}

    def read(self, state, views, seen, uniforms, settings, count=1, and_run=False):
        """Feeds whole rows to the state of `start` and chooses `count` tokens for each.

        Returns:
            row_offsets and (logits, tokens, scores, seen, state).
        """
        length, segment = max(map(len, views)), self.stepper.segment
        offsets = np.asarray([length - len(view) for view in views], "int32")
        padded = np.zeros((len(views), -(-length // segment) * segment), "int32")
        for row, view, offset in zip(padded, views, offsets, strict=True):
            row[offset:length] = view
        for start in range(0, length, segment):
            is_last = start + segment >= length
            read = self.read_and_run if and_run and is_last else self._read
            outputs = read(
                np.ascontiguousarray(padded[:, start : start + segment]),
                np.int32(start),
                np.int32(min(segment, length - start)),
                offsets,
                state,
                seen,
                uniforms,
                np.int32(count),
                settings,
            )
            state = outputs[-1]
        return offsets, outputs

    def step(self, tokens, index: int, offsets, state):
        """Feeds one token (B,) to every row; returns (logits (B, V), state)."""
        return self.one_step(tokens, np.int32(index), offsets, state)

    def _crop(self, request, run, start, texts, views, seen, choice, done):
        """Every step on the last whole window."""
        total, window = max(request.limits), self.stepper.window
        views = [view[-window:] for view in views]
        tokens = np.zeros((len(views), window), "int32")
        for row, view in zip(tokens, views, strict=True):
            row[window - len(view) :] = view
        offsets = np.asarray([window - len(view) for view in views], "int32")
        while done < total:
            count = min(run, total - done)
            chosen, scores, tokens, seen, offsets = self.crop_steps(
                tokens,
                seen,
                offsets,
                start,
                _columns(request.uniforms, done, count),
                np.int32(count),
                choice.settings(),
            )
            done += count
            yield _emit(texts, views, chosen, scores, count)

    def _count_trace(self, name: str) -> None:
        self.traces[name] = self.traces.get(name, 0) + 1

    def _trace_read(self, *arguments):
        self._count_trace("read")
        return self._open(*arguments, and_run=False)

    def _trace_read_and_run(self, *arguments):
        self._count_trace("read_and_run")
        return self._open(*arguments, and_run=True)

    def feed(self, tokens, index, length, offsets, state):
        """Reads `length` columns of `tokens` chunk by chunk; traced by its callers.

        Returns:
            The logits (B, V) of the last of them, and the new state.
        """
        batch, chunk = ops.shape(tokens)[0], self.stepper.chunk

        def read_chunk(start, logits, state):
            columns = ops.slice(tokens, (0, start), (batch, chunk))
            last = ops.minimum(length - start, chunk) - 1
            logits, state = self._step(columns, index + start, last, offsets, state)
            return start + chunk, logits, state

        logits = ops.zeros((batch, self.vocab_size), "float32")
        _, logits, state = ops.while_loop(
            lambda start, *rest: start < length, read_chunk, (_int(0), logits, state)
        )
        return logits, state

    def _open(
        self,
        tokens,
        index,
        length,
        offsets,
        state,
        seen,
        uniforms,
        count,
        settings,
        and_run,
    ):
        """Reads `length` columns of `tokens` chunk by chunk, then chooses."""
        logits, state = self.feed(tokens, index, length, offsets, state)
        tokens, scores, seen = self._next(logits, seen, uniforms[:, 0], settings)
        chosen, all_scores = _buffers(uniforms)
        chosen = _put(chosen, _int(0), tokens)
        all_scores = _put(all_scores, _int(0), scores)
        if and_run:
            carried = (_int(1), tokens, seen, state, chosen, all_scores)
            chosen, all_scores, seen, state = self._run(
                carried, index + length - 1, offsets, uniforms, count, settings
            )
        return logits, chosen, all_scores, seen, state

    def _trace_one_step(self, tokens, index, offsets, state):
        self._count_trace("one_step")
        tokens = ops.expand_dims(tokens, 1)
        return self._step(tokens, index, _int(0), offsets, state)

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
        carried = (_int(0), tokens, seen, state, *_buffers(uniforms))
        return self._run(carried, index, offsets, uniforms, count, settings)

    def _run(self, carried, index, offsets, uniforms, count, settings):
        """Cached steps until `count` tokens are chosen; step n reads at index + n."""
        _, _, seen, state, chosen, scores = ops.while_loop(
            lambda done, *rest: done < count,
            lambda *carried: self._advance(carried, index, offsets, uniforms, settings),
            carried,
        )
        return chosen, scores, seen, state

    def _step_and_choose(self, step, carried, index, offsets, uniforms, settings):
        """The next of what `_run` carries; `step` is the stepper, recorded or not."""
        done, tokens, seen, state, chosen, scores = carried
        logits, state = step(
            ops.expand_dims(tokens, 1), index + done, _int(0), offsets, state
        )
        uniform = ops.take(uniforms, done, axis=1)
        tokens, score, seen = self._next(logits, seen, uniform, settings)
        chosen = _put(chosen, done, tokens)
        return done + 1, tokens, seen, state, chosen, _put(scores, done, score)

    def _trace_crop(self, window, seen, offsets, state, uniforms, count, settings):
        self._count_trace("crop")
        size = self.stepper.window

        def step(done, window, seen, offsets, chosen, scores):
            logits, _ = self._step(window, _int(0), _int(size - 1), offsets, state)
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


class _Choice:
    """The sampling settings of the next step."""

    def __init__(self, request, texts: list[list[int]], vocab_size: int):
        self.sampling, self.texts = request.sampling, texts
        self.vocab_size = vocab_size
        self.stepwise = callable(request.sampling.allowed_tokens)
        self._arrays = request.sampling.arrays(vocab_size)

    def settings(self) -> dict:
        """The arrays; `allowed` follows the texts where it is a function of them."""
        if not self.stepwise:
            return self._arrays
        allowed = allowed_rows(self.sampling, self.texts, self.vocab_size)
        return {**self._arrays, "allowed": allowed}


def _emit(texts, views, tokens, scores, count: int):
    """Appends the first `count` new tokens to the rows; returns them as NumPy."""
    tokens = ops.convert_to_numpy(tokens)[:, :count]
    scores = ops.convert_to_numpy(scores)[:, :count]
    for text, view, new in zip(texts, views, tokens.tolist(), strict=True):
        view.extend(new)
        text.extend(new)
    return tokens, scores


def _most(run: int, left: int, window: int | None, used: int) -> int:
    """How many tokens a call may choose: `used` slots of the window are taken."""
    return min(run, left) if window is None else min(run, left, window - used)


def _int(value: int):
    return ops.convert_to_tensor(value, "int32")


def _columns(uniforms: np.ndarray, start: int, count: int):
    """Columns start .. start + count, padded with zeros to one width."""
    columns = np.zeros((len(uniforms), LOOP), "float32")
    columns[:, :count] = uniforms[:, start : start + count]
    return columns


def _buffers(uniforms):
    return ops.zeros_like(uniforms, dtype="int32"), ops.zeros_like(uniforms)


def _put(buffer, column, values):
    values = ops.cast(ops.expand_dims(values, 1), buffer.dtype)
    return ops.slice_update(buffer, (0, column), values)
