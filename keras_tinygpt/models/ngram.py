"""Add-k n-gram counts: the baseline a neural language model has to beat.

Lidstone smoothing of one order; no back-off and no interpolation between orders.
"""

from collections.abc import Sequence

import numpy as np

from keras_tinygpt.checks import check_float, check_ids, check_int

_LARGEST_CODE = np.iinfo(np.int64).max
_CHUNK_TOKENS = 1 << 20


class NGram:
    """An n-gram model with add-k smoothing.

    `p(token | context) = (count(context, token) + k) / (count(context) + k V)`, where
    the context is the `order - 1` tokens before. A context counts where a token
    follows it.

    Args:
        order: n, in tokens; 3 is a trigram, 1 ignores the context.
        k: what is added to each count, above 0.
        vocab_size: V.

    Raises:
        ValueError: an argument is out of range.

    Example:
    >>> model = NGram(order=2, k=1.0, vocab_size=2).fit([0, 1, 0, 1, 1])
    >>> round(float(np.exp(-model.nats([0, 1]))), 6)  # (2 + 1) / (2 + 1 * 2)
    0.75
    """

    def __init__(self, order: int, k: float, vocab_size: int):
        self.order = check_int("order", order)
        self.k = check_float("k", k, low_open=True)
        self.vocab_size = check_int("vocab_size", vocab_size)
        self._prefixes: list[np.ndarray] = []
        self._grams: np.ndarray | None = None

    def fit(self, ids: Sequence[int] | np.ndarray) -> "NGram":
        """Counts the n-grams of ids (n,), which replace any counted before."""
        ids = self._check(ids)
        self._prefixes = []
        codes = self._encode(ids, fitting=True)
        self._grams, self._gram_counts = np.unique(codes, return_counts=True)
        # Grams are sorted, so those of one context lie side by side.
        self._contexts, first = np.unique(
            self._grams // self.vocab_size, return_index=True
        )
        self._context_counts = np.add.reduceat(self._gram_counts, first)
        return self

    def nats(self, ids: Sequence[int] | np.ndarray) -> float:
        """Returns the mean of -log p over the tokens of ids (n,).

        The first `order - 1` tokens have no whole context: they serve as context only
        and are not scored. Put the `order - 1` tokens that precede a part in front of
        it to score all of it.

        Raises:
            RuntimeError: `fit` was not called.
            ValueError: the ids are fewer than `order`, or outside the vocabulary.
        """
        if self._grams is None:
            raise RuntimeError("fit must be called before nats")
        ids = self._check(ids)
        scored, total = len(ids) - self.order + 1, 0.0
        for start in range(0, scored, _CHUNK_TOKENS):
            codes = self._encode(ids[start : start + _CHUNK_TOKENS + self.order - 1])
            joint = _count(self._grams, self._gram_counts, codes)
            context = _count(
                self._contexts, self._context_counts, codes // self.vocab_size
            )
            rows = (joint + self.k) / (context + self.k * self.vocab_size)
            total -= float(np.log(rows).sum())
        return total / scored

    def _check(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = check_ids(ids, self.vocab_size)
        if len(ids) < self.order:
            raise ValueError(
                f"ids has {len(ids)} tokens, at least {self.order} are needed "
                f"for order={self.order}"
            )
        return ids

    def _encode(self, ids: np.ndarray, fitting: bool = False) -> np.ndarray:
        """Packs each n-gram into one int64, `code(context) * V + token`.

        Where one more token could overflow, the codes so far are first replaced by
        their index among those met in `fit`; one never met gets the index past them.
        """
        count = len(ids) - self.order + 1
        codes, bound, level = np.zeros(count, np.int64), 1, 0
        for offset in range(self.order):
            if bound > _LARGEST_CODE // self.vocab_size:
                if fitting:
                    self._prefixes.append(np.unique(codes))
                codes = _find(self._prefixes[level], codes)
                bound = len(self._prefixes[level]) + 1
                level += 1
            codes *= self.vocab_size
            codes += ids[offset : offset + count].astype(np.int64)
            bound *= self.vocab_size
        return codes


def _find(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Returns each code's index in the sorted table, or the table's length."""
    places = np.searchsorted(table, codes)
    found = table[np.minimum(places, len(table) - 1)] == codes
    return np.where(found, places, len(table))


def _count(table: np.ndarray, counts: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return np.append(counts, 0)[_find(table, codes)]
