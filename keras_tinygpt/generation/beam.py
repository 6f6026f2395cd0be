"""Beam search: the most probable continuation, approximately.

Keeps the `num_beams` most probable prefixes at every step, on the cached engine. There
is no end token here: all beams have the same length, so no length penalty is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_ids, check_int
from keras_tinygpt.generation.decoding import check_sources
from keras_tinygpt.generation.engine import fit_window, get_engine, seen_tokens
from keras_tinygpt.generation.sampling import SamplingConfig, allowed_rows


def beam_search(
    model: keras.Model,
    prompt_ids: Any,
    max_new_tokens: int,
    *,
    num_beams: int = 4,
    allowed_tokens: Sequence[int] | Callable | None = None,
    source_ids: Any = None,
) -> tuple[np.ndarray, float]:
    """Continues one prompt by the best continuation that beam search finds.

    Args:
        model: from `build_gpt`, `build_lstm` or `build_encoder_decoder`.
        prompt_ids: int sequence (n,), n >= 1.
        max_new_tokens: tokens to add.
        num_beams: prefixes kept; 1 is greedy decoding. A GPT whose window is full
            reads the last window at every step.
        allowed_tokens: ids that may be chosen, or a function of the tokens so far.
        source_ids: int sequence, what an encoder-decoder reads.

    Returns:
        int32 array (n + max_new_tokens,) and the log-probability of the continuation
        in nats.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, counts below 1.

    Reference: Graves, 2012, "Sequence Transduction with Recurrent Neural Networks".
    """
    check_int("num_beams", num_beams)
    check_int("max_new_tokens", max_new_tokens)
    vocab_size = model.output_shape[-1]
    prompt = check_ids(prompt_ids, vocab_size, "prompt_ids", least=1).tolist()
    sampling = SamplingConfig(allowed_tokens=allowed_tokens, temperature=0.0)
    settings = sampling.arrays(vocab_size)
    engine, start = _start(model, source_ids, num_beams)
    window = engine.stepper.window
    beams = [prompt] * num_beams
    # All beams start equal, so that only the first may branch.
    scores = np.full(num_beams, -np.inf)
    scores[0] = 0.0
    index, state, tokens, offsets = None, None, None, None
    for _ in range(max_new_tokens):
        if index is None or index == window:
            views = [fit_window(beam, window, "crop") for beam in beams]
            index = max(map(len, views))
            seen = seen_tokens(beams, vocab_size)
            unused = np.zeros((num_beams, 1), "float32")
            offsets, (logits, *_, state) = engine.read(
                start, views, seen, unused, settings
            )
        else:
            logits, state = engine.step(tokens, index, offsets, state)
            index += 1
        allowed = settings["allowed"]
        if callable(allowed_tokens):
            allowed = allowed_rows(sampling, beams, vocab_size)
        scores, parents, tokens = _best(scores, logits, allowed)
        beams = [
            [*beams[parent], token]
            for parent, token in zip(parents, tokens.tolist(), strict=True)
        ]
        state = engine.stepper.take_rows(state, parents)
    return np.asarray(beams[0], "int32"), float(scores[0])


def _start(model, source_ids, num_beams: int):
    """The engine and the state before the first token."""
    sources, single = check_sources(model, source_ids)
    if not single:
        raise ValueError(
            f"source_ids must be one sequence here, got {len(sources)} in a batch"
        )
    if sources is not None:
        sources = np.repeat(sources, num_beams, axis=0)
    engine = get_engine(model)
    return engine, engine.start(num_beams, sources)


def _best(scores, logits, allowed):
    """Scores, parents and tokens of the most probable prefixes, one token longer.

    Args:
        scores: array (beams,), log-probabilities.
        logits: tensor (beams, V).
        allowed: bool array, (V,) or (beams, V).
    """
    steps = ops.convert_to_numpy(ops.log_softmax(ops.cast(logits, "float32")))
    totals = scores[:, None] + steps.astype("float64")
    totals = np.where(allowed, totals, -np.inf).ravel()
    best = np.argsort(-totals, kind="stable")[: len(scores)]
    found = totals[best]
    # Where fewer go on than there are beams, dead copies of the first fill the rest.
    best = np.where(np.isfinite(found), best, best[0]).astype("int32")
    return found, best // steps.shape[1], best % steps.shape[1]
