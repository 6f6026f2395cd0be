"""One text on its way through the blocks, with or without some of the heads.

What stands in the stream at each depth can be read with the model's own last norm and
head: the guess it would make if the rest of the blocks were not there.

Reference: nostalgebraist, 2020, "interpreting GPT: the logit lens".
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_int
from keras_tinygpt.inspection.parts import (
    after_attention,
    after_feed_forward,
    block_input,
    block_output,
    evaluator,
    find_stack,
    head_values,
    project_heads,
    text_ids,
)
from keras_tinygpt.layers import TransformerBlock


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What a model computes for one text.

    Args:
        logits: float32 array (T, V).
        weights: float32 array (L, N, T, T), also of heads that are switched off.
        hidden: float32 array (S, T, D), the stream: the input of the first block, then,
            for each block, after its attention and after its feed-forward layer
            (S = 2 L + 1), or after the block if it is an attention layer (S = L + 1).
    """

    logits: np.ndarray
    weights: np.ndarray
    hidden: np.ndarray


class _TracedBlock(keras.layers.Layer):
    """A block that also gives its weights and the stream after its attention."""

    def __init__(self, block: keras.Layer, is_last: bool):
        super().__init__(dtype=block.dtype_policy, name=f"traced_{block.name}")
        self.block = block
        self.is_last = is_last
        self.supports_masking = True
        self.built = True

    def call(self, inputs, kept, mask=None):
        def edit(attention, hidden, weights):
            return _lost(attention, hidden, weights, kept)

        middle, weights = after_attention(self.block, inputs, mask=mask, edit=edit)
        if not isinstance(self.block, TransformerBlock):
            return middle, weights, middle
        return after_feed_forward(self.block, middle), weights, middle

    def compute_output_spec(self, inputs, kept, mask=None):
        dtype = self.block.compute_dtype
        batch, length = inputs.shape[:2]
        maps = (batch, self.block.num_heads, length, length)
        return (
            keras.KerasTensor(inputs.shape, dtype=dtype),
            keras.KerasTensor(maps, dtype="float32"),
            keras.KerasTensor(inputs.shape, dtype=dtype),
        )

    def compute_mask(self, inputs, mask=None):
        if self.is_last:  # the layers above make it from the tokens
            return [None, None, None]
        return [mask[0] if isinstance(mask, (list, tuple)) else mask, None, None]


def _lost(attention, hidden, weights, kept):
    """What taking heads away adds to the output of attention, (B, T, D).

    Args:
        attention: a `CausalMultiHeadAttention`.
        hidden: its inputs (B, T, D).
        weights: (B, N, T, T).
        kept: float tensor (B, N), 1 for a head that stays and 0 for one that does not.
    """
    values = head_values(attention, hidden)  # (B, N, T, H)
    outputs = ops.einsum("bnts,bnsh,bn->btnh", weights, values, kept - 1.0)
    return project_heads(attention, outputs)


class Tracer:
    """Traces texts through one model; its parts are put together once.

    Args:
        model: functional model whose blocks follow one another.
        calls: "few" or "many", as in `parts.evaluator`.

    Raises:
        ValueError: for a model without our blocks, or in another arrangement.

    Example:
    >>> import keras_tinygpt as tg
    >>> model = tg.build_gpt(tg.GPTConfig(11, 16, 2, 2, hidden_dim=12))
    >>> trace = tg.inspection.Tracer(model).trace([3, 1, 4, 1, 5], without=[(0, 1)])
    >>> trace.hidden.shape, trace.logits.shape
    ((5, 5, 12), (5, 11))
    """

    def __init__(self, model: keras.Model, calls: str = "few"):
        blocks = find_stack(model)
        self.shape = (len(blocks), blocks[0].num_heads)  # (L, N)
        self._model = model
        kept = keras.Input(self.shape, name="kept")
        x = block_input(blocks[0])
        hidden, weights = [x], []
        for index, block in enumerate(blocks):
            traced = _TracedBlock(block, is_last=block is blocks[-1])
            x, maps, middle = traced(x, kept[:, index])
            hidden += [middle, x] if isinstance(block, TransformerBlock) else [x]
            weights.append(maps)
        tokens = model.inputs[0]
        above = keras.Model([tokens, block_output(blocks[-1])], model.output)
        outputs = {"logits": above([tokens, x]), "weights": weights, "hidden": hidden}
        self._traced = evaluator([tokens, kept], outputs, calls)
        self._above = evaluator(above.inputs, above.outputs[0], calls)

    def trace(self, ids: Any, without: Sequence[tuple[int, int]] = ()) -> Trace:
        """Runs the model on one text.

        Args:
            ids: int array (T,).
            without: pairs (block, head) of the heads that add nothing to the stream.
        """
        ids = text_ids(self._model, ids)
        kept = np.ones((1, *self.shape), "float32")
        for block, head in without:
            check_int("block", block, 0, self.shape[0] - 1)
            check_int("head", head, 0, self.shape[1] - 1)
            kept[0, block, head] = 0.0
        outputs = self._traced.predict_on_batch([ids[None], kept])
        weights, hidden = (
            np.stack([np.asarray(x[0], "float32") for x in outputs[name]])
            for name in ("weights", "hidden")
        )
        return Trace(np.asarray(outputs["logits"][0], "float32"), weights, hidden)

    def guesses(self, ids: Any, trace: Trace, position: int) -> np.ndarray:
        """Logits (S, V) read from the stream of one token at each depth.

        Args:
            ids: the ids that were traced.
            trace: what `trace` returned for them.
            position: of the token, from 0 on.
        """
        ids = text_ids(self._model, ids)
        check_int("position", position, 0, len(ids) - 1)
        hidden = trace.hidden[:, position, None]  # (S, 1, D)
        tokens = np.full((len(hidden), 1), ids[position], "int32")
        return np.asarray(self._above.predict_on_batch([tokens, hidden]))[:, 0]
