"""The blocks of a model, and one block run with parts taken out or changed."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tinygpt.checks import check_ids
from keras_tinygpt.layers import CausalMultiHeadAttention, TransformerBlock
from keras_tinygpt.layers.attention import causal_mask
from keras_tinygpt.models.configured import count_tokens
from keras_tinygpt.training import model_window


def find_blocks(model: keras.Model) -> list[keras.Layer]:
    """Returns the `TransformerBlock` and bare attention layers, first to last.

    Raises:
        ValueError: if the model is not functional or has none, if a layer is used more
            than once, if the layers differ in their number of heads, or if some have
            cross-attention.
    """
    blocks = _all_blocks(model)
    if any(map(_reads_context, blocks)):
        raise ValueError(
            "a model with cross-attention is read by attention_maps with source_ids, "
            f"got {type(model).__name__}"
        )
    return blocks


def find_stacks(model: keras.Model) -> tuple[list[keras.Layer], list[keras.Layer]]:
    """Returns the blocks of an encoder and those of the decoder that reads it.

    Raises:
        ValueError: as `find_blocks`, but if no block has cross-attention.
    """
    blocks = _all_blocks(model)
    decoder = [block for block in blocks if _reads_context(block)]
    if not decoder:
        raise ValueError(
            f"source_ids needs a model with cross-attention, got {type(model).__name__}"
        )
    return [block for block in blocks if block not in decoder], decoder


def _reads_context(block: keras.Layer) -> bool:
    return getattr(block, "cross_attention", False)


def _all_blocks(model: keras.Model) -> list[keras.Layer]:
    blocks = [
        layer
        for layer in getattr(model, "layers", [])
        if isinstance(layer, (TransformerBlock, CausalMultiHeadAttention))
    ]
    if not blocks or not getattr(model, "inputs", None):
        raise ValueError(
            "attention can be read in a functional model that holds TransformerBlock "
            f"or CausalMultiHeadAttention layers, got {type(model).__name__}"
        )
    nodes = getattr(model, "_nodes_by_depth", {}).values()
    used = [node.operation for row in nodes for node in row]
    for block in blocks:
        if sum(operation is block for operation in used) > 1:
            raise ValueError(f"each block must be used once, got {block.name} twice")
    if len({block.num_heads for block in blocks}) > 1:
        raise ValueError(
            "blocks must have equally many heads, got "
            f"{[block.num_heads for block in blocks]}"
        )
    return blocks


def block_input(block: keras.Layer):
    """The symbolic tensor (B, T, D) that a block reads in its model."""
    tensors = block.input
    return tensors[0] if isinstance(tensors, (list, tuple)) else tensors


def block_output(block: keras.Layer):
    """The symbolic tensor (B, T, D) that a block gives in its model."""
    tensors = block.output
    return tensors[0] if isinstance(tensors, (list, tuple)) else tensors


def find_stack(model: keras.Model) -> list[keras.Layer]:
    """`find_blocks`, and ValueError unless each block reads the one before."""
    blocks = find_blocks(model)
    for lower, upper in zip(blocks, blocks[1:], strict=False):
        if block_input(upper) is not block_output(lower):
            raise ValueError(
                f"blocks must follow one another, got {upper.name} not reading "
                f"{lower.name}"
            )
    return blocks


def call_masks(block: keras.Layer) -> dict[str, Any]:
    """The symbolic masks and context a block is called with by name in its model."""
    given = block._inbound_nodes[0].arguments.kwargs
    names = ("attention_mask", "context", "context_mask")
    return {name: given[name] for name in names if given.get(name) is not None}


def attention_of(block: keras.Layer) -> CausalMultiHeadAttention:
    """The attention layer of a block; a bare one is its own."""
    return block._attention if isinstance(block, TransformerBlock) else block


def real_tokens(model: keras.Model, ids: np.ndarray) -> np.ndarray:
    """Bool array like `ids`: which of them are no padding of the model."""
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    return np.ones(ids.shape, "bool") if pad is None else ids != pad


def check_unpadded(model: keras.Model, ids: np.ndarray) -> None:
    """Raises ValueError if there is padding, for what runs blocks without masks."""
    if not real_tokens(model, ids).all():
        pad = model.config.pad_token_id
        raise ValueError(f"ids must hold no padding here, got pad_token_id={pad}")


def readable_keys(block: keras.Layer, length: int) -> np.ndarray:
    """Bool array (T, T): whether query i may read key j, were there no padding."""
    attention = attention_of(block)
    if not attention.causal:
        return np.ones((length, length), "bool")
    places = np.arange(length, dtype="int32")
    mask = causal_mask(places, places, attention.attention_window)
    return ops.convert_to_numpy(mask)


def text_ids(model: keras.Model, ids: Any, least: int = 1) -> np.ndarray:
    """Checked int32 ids (T,) of one text that fits the model's window."""
    ids = check_ids(ids, count_tokens(model), least=least)
    if hasattr(model, "config"):
        model_window(model, len(ids))
    return ids.astype("int32")


def evaluator(inputs, outputs, calls: str = "few") -> keras.Model:
    """Returns a functional model to be used through `predict_on_batch`.

    Args:
        inputs: symbolic tensors.
        outputs: symbolic tensors.
        calls: "few" runs it eagerly on TensorFlow, where tracing takes longer than a
            call; "many" compiles it on every backend that does.
    """
    if isinstance(inputs, list) and len(inputs) == 1:
        inputs = inputs[0]  # Keras warns when a list is declared and a tensor passed
    model = keras.Model(inputs, outputs)
    model.run_eagerly = calls == "few" and keras.backend.backend() == "tensorflow"
    return model


def attend_in(block: keras.Layer, inputs, mask=None, attention_mask=None):
    """Runs a block as far as its attention, without dropout.

    Returns:
        What attention reads (B, T, D), its output (B, T, D) and its weights
        (B, N, T, T).
    """
    hidden = inputs
    if isinstance(block, TransformerBlock) and block.norm_position == "pre":
        hidden = block._attention_norm(inputs)
    update, weights = attention_of(block)(
        hidden,
        attention_mask=attention_mask,
        mask=mask,
        return_attention_scores=True,
        training=False,
    )
    return hidden, update, weights


def after_attention(
    block: keras.Layer,
    inputs,
    *,
    mask=None,
    residuals: bool = True,
    edit: Callable | None = None,
):
    """The first half of `run_block`.

    Returns:
        The stream after attention (B, T, D) and the attention weights (B, N, T, T).
    """
    hidden, update, weights = attend_in(block, inputs, mask)
    if edit is not None:
        update = update + edit(attention_of(block), hidden, weights)
    if not isinstance(block, TransformerBlock):
        return update, weights
    hidden = inputs + update if residuals else update
    if block.norm_position == "post":
        hidden = block._attention_norm(hidden)
    return hidden, weights


def after_feed_forward(block: TransformerBlock, hidden, *, residuals: bool = True):
    """The second half of `run_block`: what follows the stream after attention."""
    pre_norm = block.norm_position == "pre"
    update = block._feed_forward_norm(hidden) if pre_norm else hidden
    update = block._feed_forward(update)
    hidden = hidden + update if residuals else update
    return hidden if pre_norm else block._feed_forward_norm(hidden)


def run_block(
    block: keras.Layer,
    inputs,
    *,
    mask=None,
    residuals: bool = True,
    feed_forward: bool = True,
    edit: Callable | None = None,
):
    """Runs a block without dropout; with the defaults it computes what the block does.

    Args:
        block: a `TransformerBlock`, or an attention layer, which has no residuals.
        inputs: float tensor (B, T, D).
        mask: optional bool tensor (B, T), the Keras padding mask.
        residuals: False drops both additions: each sublayer's output replaces its
            input.
        feed_forward: False leaves the stream as it is after attention.
        edit: function (attention layer, its inputs, weights (B, N, T, S)) -> tensor
            (B, T, D) added to the output of attention.

    Returns:
        Tensor (B, T, D).
    """
    hidden, _ = after_attention(
        block, inputs, mask=mask, residuals=residuals, edit=edit
    )
    if not isinstance(block, TransformerBlock) or not feed_forward:
        return hidden
    return after_feed_forward(block, hidden, residuals=residuals)


def head_values(attention: CausalMultiHeadAttention, hidden):
    """The value vectors float32 (B, N, T, H) that the heads read, one a query head."""
    values = ops.cast(attention._project(hidden, 0)[2], "float32")  # (B, N_kv, T, H)
    return ops.repeat(values, attention.num_heads // values.shape[1], axis=1)


def project_heads(attention: CausalMultiHeadAttention, heads):
    """What vectors of the heads (B, T, N, H) add to the output of attention (B, T, D).

    The layer is called, and its bias taken off, because the kernel of a quantized one
    is not to be multiplied with.
    """
    shape = (-1, ops.shape(heads)[1], heads.shape[2] * heads.shape[3])
    heads = ops.cast(ops.reshape(heads, shape), attention.compute_dtype)
    return attention._output(heads) - attention._output(ops.zeros_like(heads))
