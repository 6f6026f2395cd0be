"""Batches for a masked language model: tokens hidden, to be told from both sides.

Of the chosen tokens most are masked, some replaced and some left as they are, so that
a model cannot tell by looking which tokens it may trust.
"""

import numpy as np

from keras_tinygpt.checks import check_float, check_int
from keras_tinygpt.text.windows import WindowDataset

MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens; the rest stay


def hide_tokens(
    tokens: np.ndarray,
    vocab_size: int,
    mask_token_id: int,
    random: np.random.Generator,
    mask_rate: float = 0.15,
) -> tuple[np.ndarray, np.ndarray]:
    """Hides tokens, each with the same probability.

    Args:
        tokens: int array of any shape, without masks.
        vocab_size: number of ids, the mask's included.
        mask_token_id: the id that stands for a hidden token.
        random: where the draws come from.
        mask_rate: share of the tokens that are chosen.

    Returns:
        int32 tokens and float32 weights of the same shape: 1 where a token was chosen,
        whatever became of it.

    Reference: Devlin et al., 2019, section 3.1.
    """
    chosen = random.random(tokens.shape) < mask_rate
    fate = random.random(tokens.shape)
    others = random.integers(0, vocab_size - 1, tokens.shape)
    others += others >= mask_token_id  # any id but the mask's
    hidden = np.where(fate < MASKED + REPLACED, others, tokens)
    hidden = np.where(fate < MASKED, mask_token_id, hidden)
    inputs = np.where(chosen, hidden, tokens).astype("int32")
    return inputs, chosen.astype("float32")


class MaskedWindowDataset(WindowDataset):
    """The windows of a schedule with some of their tokens hidden.

    Item i is `(inputs, targets, weights)`, each (B, T): the windows with hidden tokens,
    the windows, and 1 where the loss counts. The draws of an item depend on `seed` and
    its step alone. Pass `shuffle=False` to `fit`.

    Args:
        ids: integer array (n,) of any width; may be memory-mapped.
        starts: integer array (steps, B) of start indices into `ids`.
        sequence_length: tokens per window, T.
        vocab_size: number of ids, the mask's included.
        mask_token_id: the id that stands for a hidden token.
        mask_rate: share of the tokens that are chosen.
        seed: of the draws, from 0 to 2**32 - 1.
        start_step: the row of `starts` that item 0 is made of.

    Raises:
        ValueError: an argument is not as above.
    """

    def __init__(
        self,
        ids: np.ndarray,
        starts: np.ndarray,
        sequence_length: int,
        vocab_size: int,
        mask_token_id: int,
        mask_rate: float = 0.15,
        seed: int = 0,
        start_step: int = 0,
    ):
        super().__init__(ids, starts, sequence_length, start_step)
        self.vocab_size = check_int("vocab_size", vocab_size, 2)
        self.mask_token_id = check_int(
            "mask_token_id", mask_token_id, 0, vocab_size - 1
        )
        self.mask_rate = check_float("mask_rate", mask_rate, 0.0, 1.0, low_open=True)
        self.seed = check_int("seed", seed, 0, 2**32 - 1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        windows, _ = super().__getitem__(index)
        step = self.start_step + index
        random = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        inputs, weights = hide_tokens(
            windows, self.vocab_size, self.mask_token_id, random, self.mask_rate
        )
        return inputs, windows, weights
