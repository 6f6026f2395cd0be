"""What the page asks of a model, answered with what JSON can hold.

Every figure comes from `keras_tinygpt.inspection` and `keras_tinygpt.generation`; here
the questions are checked and the model is asked.
"""

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import ops

from keras_tinygpt.bundle import LanguageModel
from keras_tinygpt.checks import check_float, check_ids, check_int
from keras_tinygpt.explorer.views import (
    WEIGHT_UNIT,
    rounded,
    view_candidates,
    view_maps,
    view_metrics,
    view_stages,
)
from keras_tinygpt.generation import SamplingConfig, draw_uniforms, sample, stream
from keras_tinygpt.generation.sampling import log_probabilities
from keras_tinygpt.inspection.parts import evaluator, find_blocks, readable_keys
from keras_tinygpt.inspection.predictions import (
    SURPRISE_LEVELS,
    candidates,
    softmax,
)
from keras_tinygpt.inspection.trace import Trace, Tracer
from keras_tinygpt.models.gpt import GPT
from keras_tinygpt.models.lstm import LSTM

MOST_WEIGHTS = 1_000_000  # of all maps together: they travel as text
MOST_LSTM_TOKENS = 512
MOST_TEXT_TOKENS = 2_048  # of a text of which a model reads the last window
MOST_CHARACTERS = 20_000
MOST_NEW_TOKENS = 256
MOST_TEMPERATURE = 100.0
CANDIDATES = 12
GUESSES = 3
# Said twice, so that heads that look for what stood here before have work to do.
PROMPT = "ROMEO:\nO gentle moon, be kind to us this night,\nO gentle m"


class Explorer:
    """Answers about one model; threads are served one at a time.

    Args:
        language_model: a model from `build_gpt` or `build_lstm` with its tokenizer.
        name: what the page calls it.
        prompt: the text the page begins with; None means a short one of which
            characters that the model does not know are left out.
        sampling: settings the page begins with; None means those of `generate`.

    Raises:
        ValueError: for another model, one without a tokenizer, or a bad prompt.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        name: str,
        prompt: str | None = None,
        sampling: SamplingConfig | None = None,
    ):
        language_model.check_tokenizer()
        self.model, self.tokenizer = language_model.model, language_model.tokenizer
        if not isinstance(self.model, (GPT, LSTM)):
            kind = type(self.model).__name__
            raise ValueError(
                f"model must be made by build_gpt or build_lstm, got {kind}"
            )
        self.name = name
        self.sampling = sampling or SamplingConfig()
        self._lock = threading.RLock()
        self._tracer = None
        if isinstance(self.model, GPT):
            self._tracer = Tracer(self.model, calls="many")
        else:
            self._logits = evaluator(self.model.inputs, self.model.output, "many")
        self.length, self.crops = self._size()
        self._trace = functools.lru_cache(maxsize=8)(self._run)
        self.prompt = self._default_prompt() if prompt is None else prompt
        self._ids(self.prompt, None)

    def _size(self) -> tuple[int, bool]:
        """Most tokens shown, and whether longer texts are read from their last window.

        They are where that is what the model itself does.
        """
        if self._tracer is None:
            return MOST_LSTM_TOKENS, False
        window = self.model.config.max_sequence_length
        heads = int(np.prod(self._tracer.shape))
        length = min(window, max(1, int((2 * MOST_WEIGHTS / heads) ** 0.5)))
        return length, length == window

    def _default_prompt(self) -> str:
        known = self.tokenizer.encode(PROMPT, unknown="drop")[: self.length]
        return self.tokenizer.decode(known if len(known) else [0])

    def describe(self) -> dict[str, Any]:
        """The model, its limits, and what the page begins with."""
        config = self.model.config
        blocks, heads = self._tracer.shape if self._tracer else (0, 0)
        return {
            "name": self.name,
            "parameters": self.model.count_params(),
            "vocab_size": config.vocab_size,
            "tokenizer": self.tokenizer.kind,
            "layers": config.num_layers,
            "blocks": blocks,
            "heads": heads,
            "hidden_dim": config.hidden_dim,
            "positions": getattr(config, "positions", None),
            "attention_window": getattr(config, "attention_window", None),
            "length": self.length,
            "most_characters": MOST_CHARACTERS,
            "most_new_tokens": MOST_NEW_TOKENS,
            "surprise_levels": list(SURPRISE_LEVELS),
            "weight_unit": WEIGHT_UNIT,
            "prompt": self.prompt,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
        }

    def read(self, text=None, ids=None, without=()) -> dict[str, Any]:
        """A text as the model reads it: tokens, surprise, maps, head metrics.

        Args:
            text: the text; or
            ids: its token ids, of which the last window is read.
            without: pairs [block, head] of the heads that are switched off.
        """
        ids = self._ids(text, ids)
        without = self._without(without)
        shown = ids[-self.length :]
        with self._lock:
            trace = self._trace(tuple(shown.tolist()), without)
            nats = -np.asarray(
                ops.convert_to_numpy(log_probabilities(trace.logits[:-1], shown[1:]))
            )
        answer = {
            "ids": ids.tolist(),
            "start": len(ids) - len(shown),
            "text": self.tokenizer.decode(ids),
            "tokens": [self.tokenizer.decode([token]) for token in shown],
            "surprise": [None, *rounded(nats)],
            "without": [list(pair) for pair in without],
        }
        if self._tracer:
            blocks = find_blocks(self.model)
            readable = [readable_keys(block, len(shown)) for block in blocks]
            answer["weights"] = view_maps(trace.weights)
            answer["metrics"] = view_metrics(trace.weights, readable)
        return answer

    def position(
        self,
        ids,
        position,
        without=(),
        temperature=SamplingConfig.temperature,
        top_k=None,
        top_p=None,
    ) -> dict[str, Any]:
        """What may follow one token, and how the guess grew from block to block.

        Args:
            ids: token ids of the text.
            position: of the token among those shown, from 0 on.
            without: pairs [block, head] of the heads that are switched off.
            temperature: see `SamplingConfig`, like the next two.
            top_k: most tokens to choose from.
            top_p: share of the probability to choose from.
        """
        sampling = _sampling(temperature, top_k, top_p)
        shown = self._ids(None, ids)[-self.length :]
        check_int("position", position, 0, len(shown) - 1)
        without = self._without(without)
        key = tuple(shown.tolist())
        with self._lock:
            trace = self._trace(key, without)
            whole = softmax(self._trace(key, ()).logits[position].astype("float64"))
            found = candidates(
                trace.logits[position], shown[: position + 1], sampling, CANDIDATES
            )
            stages = self._stages(shown, trace, position)
        return {
            "position": position,
            "candidates": view_candidates(found, whole, self.tokenizer),
            "stages": stages,
        }

    def _stages(self, shown, trace: Trace, position: int) -> list[dict[str, Any]]:
        if self._tracer is None:
            return []
        hidden = trace.hidden[:, position].astype("float64")  # (S, D)
        logits = self._tracer.guesses(shown, trace, position)
        probabilities = softmax(logits.astype("float64"))
        return view_stages(hidden, probabilities, self.tokenizer, GUESSES)

    def write(
        self,
        ids,
        count=1,
        seed=0,
        without=(),
        temperature=SamplingConfig.temperature,
        top_k=None,
        top_p=None,
    ) -> Iterator[dict[str, Any]]:
        """Continues a text: pieces of new ids and their text, as they are drawn.

        The tokens are those of `keras_tinygpt.generate` with the same settings; with
        heads switched off, those of the plain loop on what is left of the model.
        """
        sampling = _sampling(temperature, top_k, top_p)
        ids = self._ids(None, ids)
        check_int("count", count, 1, MOST_NEW_TOKENS)
        check_int("seed", seed, 0, 2**53)
        without = self._without(without)
        room = self._most_tokens() - len(ids)
        if room < 1:
            raise ValueError(
                f"the text must stay below {self._most_tokens()} tokens to be "
                f"continued, got {len(ids)}"
            )
        count = min(count, room)
        if without:
            pieces = self._write_without(ids, count, seed, without, sampling)
        else:
            settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            pieces = stream(self.model, ids, count, seed=seed, **settings)
        return self._decoded(pieces)

    def _decoded(self, pieces: Iterator[np.ndarray]) -> Iterator[dict[str, Any]]:
        decoder = self.tokenizer.stream_decoder()
        while True:
            with self._lock:
                new = next(pieces, None)
            if new is None:
                return
            text = "".join(decoder.push(token) for token in new.tolist())
            yield {"ids": new.tolist(), "text": text}

    def _write_without(
        self, ids, count: int, seed: int, without, sampling: SamplingConfig
    ) -> Iterator[np.ndarray]:
        vocab_size = self.model.output_shape[-1]
        settings = sampling.tensors(vocab_size)
        unseen = ops.zeros((1, vocab_size), "bool")  # no repetition penalty here
        for uniform in draw_uniforms([seed], count)[0]:
            shown = tuple(ids[-self.length :].tolist())
            logits = self._trace(shown, without).logits[-1:]
            draw = ops.convert_to_tensor(uniform[None])
            token = sample(ops.convert_to_tensor(logits), unseen, draw, settings)
            token = ops.convert_to_numpy(token)
            ids = np.concatenate([ids, token])
            yield token

    def _run(self, ids: tuple[int, ...], without: tuple) -> Trace:
        """The model on one text; padded on the right, so that it compiles once."""
        count = len(ids)
        padded = np.zeros(self.length, "int32")
        padded[:count] = ids
        if self._tracer is None:
            logits = np.asarray(self._logits.predict_on_batch(padded[None]))[0, :count]
            return Trace(logits, np.zeros((0, 0, count, count)), np.zeros((0, count)))
        trace = self._tracer.trace(padded, without)
        return Trace(
            trace.logits[:count],
            trace.weights[..., :count, :count],
            trace.hidden[:, :count],
        )

    def _most_tokens(self) -> int:
        return max(self.length, MOST_TEXT_TOKENS) if self.crops else self.length

    def _ids(self, text, ids) -> np.ndarray:
        """Checked int32 ids of a text given in one of two ways."""
        if (text is None) == (ids is None):
            raise ValueError("a text must be given as one of text and ids")
        if text is not None:
            if isinstance(text, str) and len(text) > MOST_CHARACTERS:
                raise ValueError(
                    f"the prompt must have at most {MOST_CHARACTERS} characters, got "
                    f"{len(text)}"
                )
            ids = self.tokenizer.encode(text)
        elif not isinstance(ids, list):
            raise ValueError(f"ids must be a list, got {type(ids).__name__}")
        if not len(ids):
            raise ValueError("the prompt must not be empty")
        if len(ids) > self._most_tokens():
            raise ValueError(
                f"the prompt must have at most {self._most_tokens()} tokens, got "
                f"{len(ids)}"
            )
        return check_ids(ids, self.model.output_shape[-1]).astype("int32")

    def _without(self, pairs) -> tuple[tuple[int, int], ...]:
        """Checked pairs, each once and in order."""
        blocks, heads = self._tracer.shape if self._tracer else (0, 0)
        if not isinstance(pairs, (list, tuple)) or len(pairs) > blocks * heads:
            raise ValueError(
                f"without must be a list of at most {blocks * heads} heads, got "
                f"{pairs!r:.80}"
            )
        for pair in pairs:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError(
                    f"without must hold pairs [block, head], got {pair!r:.80}"
                )
            check_int("block", pair[0], 0, blocks - 1)
            check_int("head", pair[1], 0, heads - 1)
        return tuple(sorted({tuple(pair) for pair in pairs}))


def _sampling(temperature, top_k, top_p) -> SamplingConfig:
    check_float("temperature", temperature, 0.0, MOST_TEMPERATURE)
    return SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
