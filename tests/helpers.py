"""What several test files share: one check for every layer, one NumPy reference."""

import inspect
import json
import math
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_tinygpt import cli

ROOT = Path(__file__).resolve().parents[1]

# XLA takes seconds to compile what runs for none; JAX without it takes longer still.
JIT = keras.backend.backend() == "jax"


def tiny_shakespeare() -> Path:
    """A copy of tiny Shakespeare beside the repository; skips the test without one."""
    path = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
    if not path.exists():
        pytest.skip(f"no {path}")
    return path


def to_numpy(tensor) -> np.ndarray:
    """The values of a tensor of any backend, bfloat16 included, as float64."""
    return np.asarray(keras.ops.convert_to_numpy(tensor)).astype("float64")


def normal(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def randomize(layer, seed=0):
    """Gives every weight, biases and scales included, a random value."""
    rng = np.random.default_rng(seed)
    for weight in layer.weights:
        weight.assign(0.4 * rng.standard_normal(tuple(weight.shape)))
    return layer


def check_layer(make_layer, *input_shapes, num_parameters, path):
    """Runs the checks that every layer has to pass.

    Args:
        make_layer: function of layer keyword arguments (such as dtype) to a layer
            whose output has the shape of its first input.
        input_shapes: a shape (B, T, ...) for each input.
        num_parameters: the expected number of weights.
        path: a folder for the saved model.
    """
    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate(input_shapes)]
    layer = make_layer()
    outputs = to_numpy(layer(*inputs))
    assert outputs.shape == input_shapes[0]
    assert np.isfinite(outputs).all()
    assert layer.count_params() == num_parameters
    _check_config(layer)
    _check_symbolic_shapes(layer, input_shapes)
    _check_policies(make_layer, layer, inputs, outputs)
    _check_model(make_layer, inputs, path)


def _check_config(layer):
    config = keras.saving.serialize_keras_object(layer)
    config = json.loads(json.dumps(config))
    assert config["registered_name"] == f"keras_tinygpt>{type(layer).__name__}"
    copy = keras.saving.deserialize_keras_object(config)
    assert type(copy) is type(layer)
    assert copy.get_config() == layer.get_config()
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert layer.get_config()[name] == getattr(layer, name), name


def _check_symbolic_shapes(layer, input_shapes):
    for shapes in (
        input_shapes,
        [(None, *shape[1:]) for shape in input_shapes],
        [(None, None, *shape[2:]) for shape in input_shapes],
    ):
        tensors = [keras.KerasTensor(shape, dtype="float32") for shape in shapes]
        for outputs in (layer(*tensors), layer.compute_output_spec(*tensors)):
            assert outputs.shape == tuple(shapes[0])
            assert outputs.dtype == "float32"


def _check_policies(make_layer, layer, inputs, expected):
    for policy in ("mixed_bfloat16", "mixed_float16"):
        low = make_layer(dtype=policy)
        symbolic = low(*[keras.KerasTensor(x.shape, dtype="float32") for x in inputs])
        low.set_weights(layer.get_weights())
        outputs = low(*inputs)
        dtypes = {symbolic.dtype, keras.backend.standardize_dtype(outputs.dtype)}
        assert dtypes == {low.compute_dtype} == {policy.removeprefix("mixed_")}
        assert {weight.dtype for weight in low.weights} <= {"float32"}
        np.testing.assert_allclose(to_numpy(outputs), expected, atol=0.1)


def _check_model(make_layer, inputs, path):
    """A fit step trains what lies below the layer; the reloaded model is equal."""
    tensors = [keras.Input((None, *x.shape[2:])) for x in inputs]
    hidden = [
        keras.layers.Dense(x.shape[-1], name=f"below_{i}")(tensors[i])
        for i, x in enumerate(inputs)
    ]
    model = keras.Model(tensors, make_layer(name="checked")(*hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=JIT)
    before = [
        model.get_layer(f"below_{i}").get_weights()[0] for i in range(len(inputs))
    ]
    history = model.fit(inputs, inputs[0] + 1, epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    for i, kernel in enumerate(before):
        after = model.get_layer(f"below_{i}").get_weights()[0]
        assert np.isfinite(after).all() and np.any(after != kernel)

    model.save(path / "checked.keras")
    copy = keras.models.load_model(path / "checked.keras")
    shorter = [x[:, : x.shape[1] - 1] for x in inputs]
    for x in (inputs, shorter):
        np.testing.assert_array_equal(to_numpy(copy(x)), to_numpy(model(x)))


def reference_rotation(inputs, start=0) -> np.ndarray:
    """Rotary positions of (B, T, N, H) as products of complex numbers."""
    length, half = inputs.shape[1], inputs.shape[3] // 2
    angles = np.outer(start + np.arange(length), 10000.0 ** (-np.arange(half) / half))
    numbers = inputs[..., :half] + 1j * inputs[..., half:]
    numbers = numbers * np.exp(1j * angles)[:, None]
    return np.concatenate([numbers.real, numbers.imag], -1)


def reference_slopes(num_heads: int) -> list[float]:
    """ALiBi slopes by the recursion of the paper's own code."""
    power = 2 ** int(math.log2(num_heads))
    if power == num_heads:
        return [2.0 ** (-8 * (n + 1) / num_heads) for n in range(num_heads)]
    extra = reference_slopes(2 * power)[0::2]
    return reference_slopes(power) + extra[: num_heads - power]


def reference_attention(layer, inputs, padding=None) -> np.ndarray:
    """`CausalMultiHeadAttention` in float64, written a row at a time.

    Args:
        layer: a built layer.
        inputs: array (B, T, D).
        padding: optional bool array (B, T), False is not read.

    Returns:
        Outputs (B, T, D) and weights (B, N, T, T).
    """
    weights = {
        "/".join(weight.path.split("/")[-2:]): to_numpy(weight)
        for weight in layer.weights
    } | {weight.name: to_numpy(weight) for weight in layer.weights}
    num_heads, kv_heads = layer.num_heads, layer.num_kv_heads or layer.num_heads
    head_dim = weights["output/kernel"].shape[0] // num_heads
    sizes = {"query": num_heads, "key": kv_heads, "value": kv_heads}
    if layer.fused_projections:
        stops = head_dim * np.cumsum(list(sizes.values()))[:-1]
        for kind in ("kernel", "bias"):
            fused = weights.get(f"query_key_value/{kind}")
            if fused is not None:
                parts = np.split(fused, stops, axis=-1)
                weights |= {
                    f"{name}/{kind}": x for name, x in zip(sizes, parts, strict=True)
                }
    heads = {}
    batch, length, _ = inputs.shape
    for name, count in sizes.items():
        x = inputs @ weights[f"{name}/kernel"] + weights.get(f"{name}/bias", 0.0)
        x = x.reshape(batch, length, count, head_dim)
        if layer.qk_norm and name != "value":
            x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)
            x = x * weights[f"{name}_norm/scale"]
        if layer.positions == "rotary" and name != "value":
            x = reference_rotation(x)
        heads[name] = x
    rows = np.zeros((batch, length, num_heads, head_dim))
    attention = np.zeros((batch, num_heads, length, length))
    for b, n, i in np.ndindex(batch, num_heads, length):
        kv = n // (num_heads // kv_heads)
        window = layer.attention_window or length
        allowed = [j for j in range(length) if not layer.causal or i - window < j <= i]
        allowed = [j for j in allowed if padding is None or padding[b, j]]
        scores = heads["key"][b, allowed, kv] @ heads["query"][b, i, n]
        scores = scores / math.sqrt(head_dim)
        if layer.positions == "alibi":
            distances = i - np.array(allowed)
            scores = scores - reference_slopes(num_heads)[n] * distances
        if allowed:
            exponentials = np.exp(scores - scores.max())
            attention[b, n, i, allowed] = exponentials / exponentials.sum()
            rows[b, i, n] = attention[b, n, i, allowed] @ heads["value"][b, allowed, kv]
    outputs = rows.reshape(batch, length, -1) @ weights["output/kernel"]
    return outputs + weights.get("output/bias", 0.0), attention


def token_ids(*shape, vocab_size, seed=0) -> np.ndarray:
    """Ids with the uneven frequencies of a text: the k-th id is drawn 1 / k times."""
    frequencies = 1.0 / np.arange(1, vocab_size + 1)
    frequencies /= frequencies.sum()
    ids = np.random.default_rng(seed).choice(vocab_size, shape, p=frequencies)
    return ids.astype("int32")


def mean_loss(model, ids) -> float:
    """Nats per token of `ids[:, 1:]` given what stands before, in float64."""
    logits = to_numpy(model(ids[:, :-1]))
    chosen = np.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - chosen))


def largest_leak(model, ids, vocab_size) -> float:
    """The most that any earlier logit moves when a later token changes."""
    logits = to_numpy(model(ids))
    leak = 0.0
    for changed in range(ids.shape[1]):
        other = ids.copy()
        other[:, changed] = (other[:, changed] + 1) % vocab_size
        moved = np.abs(to_numpy(model(other)) - logits)
        assert moved[:, changed].max() > 0
        leak = max(leak, moved[:, :changed].max(initial=0.0))
    return leak


def fit_some_steps(model, ids, steps=3, jit_compile=None) -> list[float]:
    """Trains in place on next-token prediction; returns the loss of each step."""
    model.compile(
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=JIT if jit_compile is None else jit_compile,
    )
    history = model.fit(ids[:, :-1], ids[:, 1:], epochs=steps, verbose=0)
    return history.history["loss"]


def check_saved_model(model, ids, path):
    """Saves and reloads without custom objects: equal class, config and logits."""
    model.save(path / "model.keras")
    copy = keras.models.load_model(path / "model.keras")
    assert type(copy) is type(model) and copy.get_config() == model.get_config()
    assert json.loads(json.dumps(model.get_config())) == model.get_config()
    np.testing.assert_array_equal(to_numpy(copy(ids)), to_numpy(model(ids)))
    return copy


def check_one_line_error(capsys, *argv) -> str:
    """Runs a `tinygpt` command that must exit with 2; returns its one line of error."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in argv])
    error = capsys.readouterr().err
    assert stopped.value.code == 2, error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1, error
    assert error.startswith("tinygpt: error: ")
    return error


def copy_to_torch(block):
    """The PyTorch layer that computes what a block does, with the block's weights.

    A `TransformerEncoderLayer`, or a `TransformerDecoderLayer` if the block has
    cross-attention; the block has biases and LayerNorm everywhere.
    """
    import torch

    attention = block._attention
    width = attention._output.kernel.shape[0]
    activation = {
        "relu": torch.nn.functional.relu,
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }[block.activation]
    kinds = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    layer = kinds[block.cross_attention](
        width,
        block.num_heads,
        block.intermediate_dim or 4 * width,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=block.norm_position == "pre",
    )
    norms = [block._attention_norm, block._feed_forward_norm]
    matrices = {
        "linear1": [block._feed_forward._intermediate],
        "linear2": [block._feed_forward._output],
        "self_attn.in_proj_": [attention._qkv],
        "self_attn.out_proj": [attention._output],
    }
    if block.cross_attention:
        cross = block._cross_attention
        norms.insert(1, block._cross_attention_norm)
        matrices["multihead_attn.in_proj_"] = [cross._query, cross._key, cross._value]
        matrices["multihead_attn.out_proj"] = [cross._output]
    tensors = {}
    for index, norm in enumerate(norms):
        tensors[f"norm{index + 1}.weight"] = to_numpy(norm.gamma)
        tensors[f"norm{index + 1}.bias"] = to_numpy(norm.beta)
    for name, layers in matrices.items():
        dot = "" if name.endswith("_") else "."
        kernels = [to_numpy(layer.kernel) for layer in layers]
        tensors[f"{name}{dot}weight"] = np.concatenate(kernels, axis=1).T
        biases = [to_numpy(layer.bias) for layer in layers]
        tensors[f"{name}{dot}bias"] = np.concatenate(biases)
    state = {name: torch.tensor(x, dtype=torch.float32) for name, x in tensors.items()}
    layer.load_state_dict(state)
    return layer
