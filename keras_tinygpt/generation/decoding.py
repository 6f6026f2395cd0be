"""Token ids in, token ids out, by one of two loops that give the same tokens.

The plain loop (`use_cache=False`) runs the whole model on the window of every row at
every step. The engine (`keras_tinygpt.generation.engine`) keeps keys and values, or
the recurrent state, and runs compiled loops. Both choose tokens with
`sampling.sample`.
"""

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_bool, check_choice, check_ids, check_int
from keras_tinygpt.generation.compiled import compile_function
from keras_tinygpt.generation.engine import fit_window, get_engine, seen_tokens
from keras_tinygpt.generation.sampling import (
    SamplingConfig,
    allowed_rows,
    draw_uniforms,
    log_probabilities,
    sample,
)
from keras_tinygpt.layers import LearnedPositions
from keras_tinygpt.models import EncoderDecoder
from keras_tinygpt.models.configured import check_predicts_next_tokens

CONTEXTS = ("crop", "slide", "stop")
GENERATE_RUN = 128  # most tokens between two looks at the stop rules
STREAM_RUN = 8
MAX_NEW_TOKENS = 10**8
ROWS_PER_WORKER = 8  # fewest rows a thread of its own is worth
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
PADDING = 64  # lengths of unlimited models are rounded up to it in the plain loop


@dataclasses.dataclass
class Request:
    """A checked call of `generate` or `stream`."""

    prompts: list[np.ndarray]
    single: bool  # one prompt was given, not a batch
    limits: list[int]  # most new tokens of each row
    sampling: SamplingConfig
    stops: list[list[int]]
    uniforms: np.ndarray  # (B, max of the limits)
    window: int | None
    context: str
    use_cache: bool
    logits_processor: Callable | None
    sources: np.ndarray | None  # (B, S), what an encoder-decoder reads

    def take_rows(self, rows: np.ndarray) -> "Request":
        """The same request for some of its rows."""
        return dataclasses.replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            limits=[self.limits[row] for row in rows],
            uniforms=self.uniforms[rows],
            sources=None if self.sources is None else self.sources[rows],
        )


def generate(
    model: keras.Model,
    prompt_ids: Any,
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    allowed_tokens: Sequence[int] | Callable | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    seed: int | Sequence[int] = 0,
    use_cache: bool = True,
    context: str = "crop",
    logits_processor: Callable | None = None,
    source_ids: Any = None,
    return_log_probabilities: bool = False,
) -> Any:
    """Continues one prompt or a batch of prompts of any lengths.

    Args:
        model: from `build_gpt`, `build_lstm` or `build_encoder_decoder`; with
            `use_cache=False` any Keras model int (B, T) -> logits (B, T, V) in which no
            position reads a later one.
        prompt_ids: int sequence (n,), n >= 1; or a list of such, or an array (B, n).
        max_new_tokens: most tokens to add to each prompt.
        temperature: see `SamplingConfig`, like the next five.
        top_k: most tokens to choose from.
        top_p: share of the probability to choose from.
        min_p: least probability relative to the largest.
        repetition_penalty: divisor for the logits of tokens seen before.
        allowed_tokens: ids that may be chosen, or a function of the tokens so far.
        stop: token sequences; a row ends before the first one it would contain.
        seed: of the draws. Row r of a batch draws from `seed + r`, so it equals that
            prompt alone with that seed; or give one seed per row.
        use_cache: False runs the plain loop; the tokens are the same.
        context: what happens once a GPT's window is full. "crop" reads the last window
            of tokens at every step; "slide" drops to the last half window each time it
            is full (fast); "stop" ends the row. An LSTM has no window.
        logits_processor: a function of the logits (B, V) that returns logits (B, V),
            made of keras.ops, applied before the filters.
        source_ids: what an encoder-decoder reads: an int sequence, or one for each
            prompt; `prompt_ids` then begins the target. One prompt serves many sources.
        return_log_probabilities: whether log-probabilities of the new tokens, under
            the model's plain logits, are returned too.

    Returns:
        int32 array (n + new,): the prompt and its continuation; for a batch a list of
        such arrays. With `return_log_probabilities` a pair: the tokens, and float32
        arrays (new,) in the same form.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, bad settings.
    """
    request = _make_request(
        model,
        prompt_ids,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        allowed_tokens=allowed_tokens,
        stop=stop,
        seed=seed,
        use_cache=use_cache,
        context=context,
        logits_processor=logits_processor,
        source_ids=source_ids,
    )
    rows = _run_in_parallel(model, request)
    results = [
        np.concatenate([prompt, np.asarray(row.tokens, "int32")])
        for prompt, row in zip(request.prompts, rows, strict=True)
    ]
    scores = [np.asarray(row.scores, "float32") for row in rows]
    if request.single:
        results, scores = results[0], scores[0]
    return (results, scores) if return_log_probabilities else results


def _run_in_parallel(model, request: Request) -> "list[_Row]":
    """Rows are independent: on a CPU each core takes a group of them."""
    count = len(request.prompts)
    size = -(-count // worker_count(request))
    groups = [
        np.minimum(np.arange(start, start + size), count - 1)  # the last one is padded
        for start in range(0, count, size)
    ]
    stopped = threading.Event()
    if len(groups) == 1:
        return _run(model, request, stopped)
    with ThreadPoolExecutor(len(groups)) as pool:
        parts = [request.take_rows(group) for group in groups]
        futures = [pool.submit(_run, model, part, stopped) for part in parts]
        try:
            rows = [row for future in futures for row in future.result()]
        finally:
            stopped.set()
    return rows[:count]


def worker_count(request: Request) -> int:
    """How many threads share the rows of a request."""
    workers = min(CORES, len(request.prompts) // ROWS_PER_WORKER)
    if workers < 2 or not request.use_cache:
        return 1
    if callable(request.sampling.allowed_tokens):
        return 1
    if keras.backend.backend() == "torch":  # eager: threads would wait for each other
        return 1
    if not all(name.startswith("cpu") for name in keras.distribution.list_devices()):
        return 1
    return workers


def _run(model, request: Request, stopped: threading.Event) -> "list[_Row]":
    rows = [_Row(request.stops, limit) for limit in request.limits]
    for tokens, scores in _pieces(model, request, GENERATE_RUN, GENERATE_RUN):
        for row, new, score in zip(rows, tokens, scores, strict=True):
            row.extend(new, score)
        if stopped.is_set() or all(row.done for row in rows):
            break
    return rows


def stream(
    model: keras.Model, prompt_ids: Any, max_new_tokens: int, **settings: Any
) -> Iterator[np.ndarray]:
    """Yields the new tokens of one prompt as soon as they are decided.

    Takes the settings of `generate`, log-probabilities excepted. The pieces together
    are the tokens `generate` adds. Tokens that may begin a stop sequence are held back
    until that is settled. The iterator can be dropped at any time.

    Yields:
        int32 arrays (k,), k >= 1.
    """
    request = _make_request(model, prompt_ids, max_new_tokens, **settings)
    if not request.single:
        raise ValueError(
            f"stream takes one prompt, got a batch of {len(request.prompts)}"
        )
    return _stream(model, request)


def _stream(model, request: Request) -> Iterator[np.ndarray]:
    row = _Row(request.stops, request.limits[0])
    for tokens, scores in _pieces(model, request, 1, STREAM_RUN):
        row.extend(tokens[0], scores[0])
        ready = row.take()
        if ready.size:
            yield ready
        if row.done:
            break


def _window(model) -> int | None:
    """Most tokens the model reads; None if there is no limit."""
    if hasattr(model, "config"):
        has_window = hasattr(model.config, "positions")
        return model.config.max_sequence_length if has_window else None
    # Put together by hand: a fixed length, or the rows of a table of positions.
    layers = model._flatten_layers(include_self=False)
    tables = [x.max_sequence_length for x in layers if isinstance(x, LearnedPositions)]
    if isinstance(model.input_shape, tuple):
        tables += filter(None, model.input_shape[1:])
    return min(tables, default=None)


def _make_request(
    model,
    prompt_ids,
    max_new_tokens,
    *,
    stop=None,
    seed=0,
    use_cache=True,
    context="crop",
    logits_processor=None,
    source_ids=None,
    **sampling,
) -> Request:
    vocab_size = model.output_shape[-1]
    prompts, single = _check_prompts(prompt_ids, vocab_size)
    sources, single_source = check_sources(model, source_ids)
    if single and not single_source:
        prompts, single = prompts * len(sources), False
    if sources is not None and len(sources) != len(prompts):
        raise ValueError(
            f"source_ids must be one for each of the {len(prompts)} prompts, "
            f"got {len(sources)}"
        )
    check_int("max_new_tokens", max_new_tokens, 0, MAX_NEW_TOKENS)
    check_choice("context", context, CONTEXTS)
    check_bool("use_cache", use_cache)
    config = SamplingConfig(**sampling)
    config.arrays(vocab_size)  # checks allowed_tokens against the vocabulary
    window = _window(model)
    limits = [max_new_tokens] * len(prompts)
    if context == "stop" and window is not None:
        longest = max(map(len, prompts))
        if longest > window:
            raise ValueError(
                f"prompt_ids must have at most max_sequence_length={window} tokens "
                f'with context="stop", got {longest}'
            )
        limits = [min(max_new_tokens, window - len(p) + 1) for p in prompts]
    return Request(
        prompts=prompts,
        single=single,
        limits=limits,
        sampling=config,
        stops=_check_stops(stop, vocab_size),
        uniforms=draw_uniforms(_row_seeds(seed, len(prompts)), max(limits)),
        window=window,
        context=context,
        use_cache=use_cache,
        logits_processor=logits_processor,
        sources=sources,
    )


def _check_prompts(prompt_ids, vocab_size: int) -> tuple[list[np.ndarray], bool]:
    """A list of int32 prompts, and whether there was one only."""
    single = len(prompt_ids) == 0 or np.ndim(prompt_ids[0]) == 0
    return _check_rows(prompt_ids, vocab_size, "prompt_ids", single), single


def _check_rows(rows, vocab_size: int, name: str, single: bool) -> list[np.ndarray]:
    return [
        check_ids(row, vocab_size, name, least=1).astype("int32")
        for row in ([rows] if single else rows)
    ]


def check_sources(model, source_ids) -> tuple[np.ndarray | None, bool]:
    """What an encoder-decoder reads as int32 (B, S), and whether it is one source.

    Raises:
        ValueError: for a model that cannot continue texts, sources that are missing or
            not read, too long or outside the vocabulary.
    """
    if not isinstance(model, EncoderDecoder):
        check_predicts_next_tokens(model)
        if source_ids is not None:
            raise ValueError(
                "source_ids needs a model from build_encoder_decoder, "
                f"got {type(model).__name__}"
            )
        return None, True
    if source_ids is None:
        raise ValueError("source_ids must be given for an EncoderDecoder, got None")
    config = model.config
    single = len(source_ids) == 0 or np.ndim(source_ids[0]) == 0
    rows = _check_rows(source_ids, config.vocab_size, "source_ids", single)
    longest = max(map(len, rows))
    if longest > config.max_source_length:
        raise ValueError(
            f"source_ids must have at most max_source_length={config.max_source_length}"
            f" tokens, got {longest}"
        )
    shape = (len(rows), config.max_source_length)
    sources = np.full(shape, config.pad_token_id, "int32")
    for filled, row in zip(sources, rows, strict=True):
        filled[: len(row)] = row
    return sources, single


def _check_stops(stop, vocab_size: int) -> list[list[int]]:
    return [
        check_ids(tokens, vocab_size, "stop", least=1).tolist() for tokens in stop or ()
    ]


def _row_seeds(seed, count: int) -> list[int]:
    if not isinstance(seed, (list, tuple, np.ndarray)):
        check_int("seed", seed, 0, 2**64 - 1)
        return [(int(seed) + row) % 2**64 for row in range(count)]
    if len(seed) != count:
        raise ValueError(
            f"seed must be one integer or one per prompt ({count}), got {len(seed)}"
        )
    return [check_int("seed", value, 0, 2**64 - 1) for value in seed]


class _Row:
    """The new tokens of one row, cut at its limit and before its stop sequences."""

    def __init__(self, stops: list[list[int]], limit: int):
        self.stops, self.limit = stops, limit
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self.taken = 0
        self.done = limit == 0

    def extend(self, tokens: np.ndarray, scores: np.ndarray) -> None:
        for token, score in zip(tokens.tolist(), scores.tolist(), strict=True):
            if self.done:
                return
            self.tokens.append(token)
            self.scores.append(score)
            for stop in self.stops:
                if self.tokens[-len(stop) :] == stop:
                    del self.tokens[-len(stop) :], self.scores[-len(stop) :]
                    self.done = True
                    return
            self.done = len(self.tokens) == self.limit

    def take(self) -> np.ndarray:
        """Tokens not handed out yet, less those that may begin a stop sequence."""
        held = 0
        for stop in () if self.done else self.stops:
            for size in range(min(len(stop) - 1, len(self.tokens)), held, -1):
                if self.tokens[-size:] == stop[:size]:
                    held = size
                    break
        end = len(self.tokens) - held
        ready = self.tokens[self.taken : end]
        self.taken = max(self.taken, end)
        return np.asarray(ready, "int32")


def _pieces(model, request: Request, first: int, run: int):
    """Yields (tokens (B, k), log-probabilities (B, k)) up to the largest limit."""
    if max(request.limits) == 0:
        return iter(())
    if request.use_cache:
        engine = get_engine(model, request.logits_processor)
        return engine.pieces(request, first, run)
    return _plain_loop(model, request)


def _plain_loop(model, request: Request):
    """The whole model on the window of every row at every step."""
    vocab_size = model.output_shape[-1]
    settings = request.sampling.arrays(vocab_size)
    rows = range(len(request.prompts))
    texts = [prompt.tolist() for prompt in request.prompts]
    views = [fit_window(text, request.window, request.context) for text in texts]
    for step in range(max(request.limits)):
        longest = max(map(len, views))
        length = request.window or -(-longest // PADDING) * PADDING
        tokens = np.zeros((len(views), length), "int32")
        for row in rows:  # the padding on the right is never read
            tokens[row, : len(views[row])] = views[row]
        inputs = tokens if request.sources is None else [request.sources, tokens]
        outputs = model.predict_on_batch(inputs)
        last = [len(view) - 1 for view in views]
        logits = outputs[rows, last]
        if request.logits_processor is not None:
            logits = request.logits_processor(ops.convert_to_tensor(logits))
        if callable(request.sampling.allowed_tokens):
            settings["allowed"] = allowed_rows(request.sampling, texts, vocab_size)
        uniforms = np.ascontiguousarray(request.uniforms[:, step])
        seen = seen_tokens(texts, vocab_size)
        chosen, scores = _compiled_choice()(logits, seen, uniforms, settings)
        chosen, scores = ops.convert_to_numpy(chosen), ops.convert_to_numpy(scores)
        yield chosen[:, None], scores[:, None]
        for row in rows:
            texts[row].append(int(chosen[row]))
            view = [*views[row], int(chosen[row])]
            views[row] = fit_window(view, request.window, request.context)


@functools.cache
def _compiled_choice() -> Callable:
    """Compiled `_choose`: run one by one, its operations cost more than a model."""
    return compile_function(_choose, [])


def _choose(logits, seen, uniforms, settings):
    tokens = sample(logits, seen, uniforms, settings)
    return tokens, log_probabilities(logits, tokens)
