"""Makes the folders beside this file with transformers, and is run by hand.

Each holds a model with random weights as `save_pretrained` writes it, a tokenizer, the
ids that the tokenizer of transformers gives for TEXT, and the model's logits for them.
"""

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

FOLDER = Path(__file__).resolve().parent
TEXT = "the bell — é"
CORPUS = "the bell rang; no one came to the bell. " * 3
SHAPES = {
    "gpt2": {
        "n_positions": 29,
        "n_embd": 12,
        "n_layer": 2,
        "n_head": 3,
        "n_inner": 17,
        "layer_norm_epsilon": 1e-2,
    },
    "llama": {
        "max_position_embeddings": 29,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 17,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 501.0},
    },
}


def make(kind: str) -> None:
    """Writes one folder."""
    folder = FOLDER / kind
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([CORPUS], 263, show_progress=False)
    vocab_size = tokenizer.get_vocab_size()
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=None,
        **SHAPES[kind],
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    if kind == "gpt2":
        tokenizer.save_model(str(folder))
        theirs = transformers.GPT2Tokenizer.from_pretrained(folder)
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
    ids = theirs.encode(TEXT, add_special_tokens=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    np.save(folder / "logits.npy", logits.astype("float32"))
    expected = {
        "text": TEXT,
        "ids": ids,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", "utf-8")
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for kind in SHAPES:
        make(kind)
