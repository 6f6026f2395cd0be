"""Parity with transformers, which is not needed otherwise (the extra [peers])."""

import keras
import numpy as np
import pytest
from helpers import to_numpy

import keras_tinygpt as tg
from keras_tinygpt.pretrained.writing import export_safetensors

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs the extra [peers]")

V, T, D = 23, 13, 12
IDS = np.random.default_rng(0).integers(0, V, (2, T)).astype("int32")
SIZES = {
    "gpt2": {"n_positions": T, "n_embd": D, "n_layer": 2, "n_head": 3},
    "llama": {
        "max_position_embeddings": T,
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 17,
    },
}
SIZES |= {"mistral": SIZES["llama"], "qwen2": SIZES["llama"]}
THETA = {"rope_type": "default", "rope_theta": 501.0}
READ = {
    "plain gpt2": ("gpt2", {}),
    "untied": ("gpt2", {"tie_word_embeddings": False}),
    "middle": ("gpt2", {"n_inner": 17, "activation_function": "gelu_pytorch_tanh"}),
    "epsilon": ("gpt2", {"layer_norm_epsilon": 0.1, "activation_function": "relu"}),
    "relu2": ("gpt2", {"activation_function": "relu2", "n_head": 2}),
    "plain llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "one key": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.1}),
    "base": ("llama", {"rope_parameters": THETA}),
    "attention bias": ("llama", {"attention_bias": True}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mlp bias": ("llama", {"mlp_bias": True}),
    "window": ("mistral", {"sliding_window": 4}),
    "no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "tied qwen2": ("qwen2", {"tie_word_embeddings": True}),
}
NORMS = {"positions": "rotary", "normalization": "rms", "activation": "swiglu"}
WRITTEN = {
    "plain": {},
    "tied": {"tie_embeddings": True, "qkv_bias": True, "norm_epsilon": 0.01},
    "sinusoidal": {"positions": "sinusoidal", "activation": "relu"},
    "scaled": {"scale_embeddings": True, "intermediate_dim": 17},
    "no bias": {"use_bias": False, "activation": "relu2"},
    "llama": {**NORMS, "use_bias": False, "max_wavelength": 501.0},
    "tied llama": {**NORMS, "use_bias": False, "tie_embeddings": True},
    "grouped": {**NORMS, "num_kv_heads": 1, "use_bias": False, "norm_epsilon": 0.01},
    "biases": {**NORMS, "tie_embeddings": True},
    "all biases": {**NORMS, "qkv_bias": True, "tie_embeddings": True},
    "qwen2": {**NORMS, "qkv_bias": True, "use_bias": False, "intermediate_dim": 17},
    "mistral": {**NORMS, "use_bias": False, "attention_window": 4},
}


def their_model(kind, changes):
    """Random weights everywhere, biases and scales too."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = transformers.AutoConfig.for_model(
        kind, **{**SIZES[kind], "vocab_size": V, **changes}
    )
    model = getattr(transformers, names[kind])(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = 0.4 * torch.randn(weight.shape, generator=generator)
            weight.copy_(noise + 1.0 * (weight.ndim == 1 and name.endswith("weight")))
    return model


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(IDS.astype("int64"))).logits.numpy()


@pytest.mark.parametrize("name", READ)
def test_folders_of_transformers_give_the_same_logits(tmp_path, name, record_property):
    theirs = their_model(*READ[name])
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="2KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    for folder in ("whole", "parts"):
        ours = to_numpy(tg.from_pretrained(tmp_path / folder).model(IDS))
        difference = np.abs(ours - their_logits(theirs)).max()
        print(f"reading {name}: {difference:.1e}")
        assert difference < 1e-4


def test_half_precision_files_are_read(tmp_path):
    theirs = their_model("llama", {}).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours = to_numpy(tg.from_pretrained(tmp_path).model(IDS))
    expected = their_logits(theirs.to(torch.float32))
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_gives_our_logits(tmp_path, name):
    config = tg.GPTConfig(V, T, 2, 3, hidden_dim=36, dropout=0.1, **WRITTEN[name])
    model = tg.build_gpt(config, seed=1)
    rng = np.random.default_rng(2)
    for weight in model.trainable_weights:
        noise = 0.3 * rng.standard_normal(tuple(weight.shape))
        if not (weight.path == "head/bias" and config.normalization == "rms"):
            weight.assign(keras.ops.convert_to_numpy(weight) + noise)
    tokenizer = tg.CharTokenizer("abcdefghijklmnopqrstuv\n")
    folder = export_safetensors(model, tokenizer, tmp_path / "folder")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    ours = to_numpy(model(IDS))
    difference = np.abs(ours - their_logits(theirs.eval())).max()
    print(f"writing {name}: {difference:.1e} of {np.abs(ours).max():.1f}")
    assert difference < 1e-4
    back = tg.from_pretrained(folder)
    difference = np.abs(ours - to_numpy(back.model(IDS))).max()
    print(f"round trip {name}: {difference:.1e}")
    assert difference < 1e-4 and back.tokenizer == tokenizer


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_their_tokenizer_gives_our_ids(tmp_path, kind):
    text = "to be,\r\n\n or — not \U0001f642  to be" * 9
    tokenizer = {
        "char": tg.CharTokenizer.from_text(text),
        "byte": tg.ByteTokenizer(),
        "bpe": tg.BPETokenizer.from_text(text, 264),
    }[kind]
    model = tg.build_gpt(tg.GPTConfig(tokenizer.vocab_size, 9, 1, 2, hidden_dim=44))
    folder = export_safetensors(model, tokenizer, tmp_path / "folder")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json")
    )
    ids = theirs.encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text).tolist()
    assert theirs.decode(ids) == text
    back = tg.from_pretrained(folder).tokenizer
    assert back.encode(text).tolist() == ids and back.decode(ids) == text
