"""Low-rank adapters: Keras' own `enable_lora` on the Dense layers of a GPT."""

import keras
import numpy as np
import pytest
from helpers import fit_some_steps, to_numpy, token_ids

import keras_tinygpt as tg
from keras_tinygpt.export.source import float32_copy
from keras_tinygpt.pretrained.writing import export_safetensors

V, T, RANK = 11, 7, 2


def adapted(quantized=False):
    """A GPT whose blocks carry adapters, the only weights that train."""
    tokenizer = tg.CharTokenizer("abcdefghijk")
    model = tg.build_gpt(tg.GPTConfig(V, T, 2, 2, hidden_dim=12), seed=1)
    if quantized:
        model.quantize("int8")
    dense = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Dense) and layer.name != "head"
    ]
    for layer in dense:
        layer.enable_lora(RANK)
    for weight in model.weights:
        weight.trainable = "lora" in weight.path
    assert len(dense) == 8
    return model, tokenizer


@pytest.mark.backend
@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_train_alone(quantized):
    ids = token_ids(5, T + 1, vocab_size=V)
    model, _ = adapted(quantized)
    plain = tg.build_gpt(model.config, seed=1)
    if not quantized:  # an adapter starts as a change of zero
        difference = to_numpy(model(ids[:, :-1])) - to_numpy(plain(ids[:, :-1]))
        assert np.abs(difference).max() < 1e-6
    assert len(model.trainable_weights) == 16
    assert {tuple(w.shape)[-1] for w in model.trainable_weights[::2]} == {RANK}
    before = {w.path: to_numpy(w) for w in model.weights}
    losses = fit_some_steps(model, ids, steps=9)
    assert losses[-1] < losses[0]
    for weight in model.weights:
        changed = np.any(to_numpy(weight) != before[weight.path])
        assert changed == ("lora" in weight.path), weight.path


@pytest.mark.backend
def test_a_bundle_holds_the_sum_of_kernel_and_adapter(tmp_path):
    ids = token_ids(5, T + 1, vocab_size=V)
    model, tokenizer = adapted()
    fit_some_steps(model, ids, steps=2)
    expected = to_numpy(model(ids[:, :-1]))
    copy = tg.load(tg.save(tmp_path / "run", model, tokenizer)).model
    assert not any("lora" in weight.path for weight in copy.weights)
    np.testing.assert_allclose(to_numpy(copy(ids[:, :-1])), expected, atol=1e-5)
    exported = float32_copy(model)  # what the other formats start from
    np.testing.assert_allclose(to_numpy(exported(ids[:, :-1])), expected, atol=1e-5)
    pytest.importorskip("safetensors", reason="needs the extra [gpt2]")
    folder = export_safetensors(model, tokenizer, tmp_path / "folder")
    copy = tg.from_pretrained(folder).model
    np.testing.assert_allclose(to_numpy(copy(ids[:, :-1])), expected, atol=1e-5)
