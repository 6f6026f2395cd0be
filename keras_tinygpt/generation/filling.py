"""Filling in masked tokens, what an encoder does instead of continuing a text."""

from typing import Any

import numpy as np

from keras_tinygpt.checks import check_ids, check_int
from keras_tinygpt.models import Encoder


def fill_masks(model: Encoder, ids: Any, mask_token_id: int) -> np.ndarray:
    """Puts the most probable token in the place of each mask, all masks at once.

    Args:
        model: from `build_encoder`, with a head over the tokens.
        ids: int array (n,), at most the model's window.
        mask_token_id: the id to be replaced; it is never put in.

    Returns:
        int32 array (n,).

    Raises:
        ValueError: for another model, too long a text, ids outside the vocabulary.
    """
    if not isinstance(model, Encoder) or model.config.num_classes is not None:
        raise ValueError(
            "model must be an encoder with a head over the tokens (build_encoder, "
            f"num_classes=None), got {type(model).__name__}"
        )
    vocab_size, window = model.config.vocab_size, model.config.max_sequence_length
    ids = check_ids(ids, vocab_size, least=1).astype("int32")
    check_int("mask_token_id", mask_token_id, 0, vocab_size - 1)
    if len(ids) > window:
        raise ValueError(
            f"ids must have at most max_sequence_length={window} tokens, got {len(ids)}"
        )
    logits = np.asarray(model.predict_on_batch(ids[None]))[0]  # (n, V)
    logits[:, mask_token_id] = -np.inf
    return np.where(ids == mask_token_id, logits.argmax(axis=-1), ids).astype("int32")
