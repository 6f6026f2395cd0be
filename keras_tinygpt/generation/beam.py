"""Beam search: the most probable continuation, approximately.

Keeps the `num_beams` most probable prefixes at every step, on the cached engine. There
is no end token here: all beams have the same length, so no length penalty is needed.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_ids, check_int
from keras_tinygpt.generation.engine import fit_window, get_engine, seen_tokens
from keras_tinygpt.generation.sampling import SamplingConfig


def beam_search(
    model: keras.Model, prompt_ids: Any, max_new_tokens: int, *, num_beams: int = 4
) -> tuple[np.ndarray, float]:
    """Continues one prompt by the best continuation that beam search finds.

    Args:
        model: from `build_gpt` or `build_lstm`.
        prompt_ids: int sequence (n,), n >= 1.
        max_new_tokens: tokens to add.
        num_beams: prefixes kept; 1 is greedy decoding. A GPT whose window is full
            reads the last window at every step.

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
    engine = get_engine(model)
    window = engine.stepper.window
    greedy = SamplingConfig(temperature=0.0).arrays(vocab_size)
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
            offsets, (logits, *_, state) = engine.read(views, seen, unused, greedy)
        else:
            logits, state = engine.step(tokens, index, offsets, state)
            index += 1
        steps = ops.convert_to_numpy(ops.log_softmax(ops.cast(logits, "float32")))
        totals = (scores[:, None] + steps.astype("float64")).ravel()
        best = np.argsort(-totals, kind="stable")[:num_beams]
        scores, parents = totals[best], best // vocab_size
        beams = [
            [*beams[parent], int(token)]
            for parent, token in zip(parents, best % vocab_size, strict=True)
        ]
        tokens = (best % vocab_size).astype("int32")
        state = engine.stepper.take_rows(state, parents.astype("int32"))
    return np.asarray(beams[0], "int32"), float(scores[0])
