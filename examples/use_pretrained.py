"""Continue a prompt with GPT-2 or Llama from a transformers folder, and write one back.

Usage: python examples/use_pretrained.py FOLDER ["PROMPT"] [OUT]

FOLDER holds config.json, model.safetensors and a tokenizer, as `save_pretrained` of
transformers or `tinygpt export BUNDLE --format safetensors` leaves it.
"""

import sys

import numpy as np

import keras_tinygpt as tg
from keras_tinygpt.pretrained.writing import export_safetensors

lm = tg.from_pretrained(sys.argv[1])
prompt = sys.argv[2] if len(sys.argv) > 2 else "The bell"
print(f"{lm.metrics['source']['model_type']}, {lm.model.count_params():,} parameters")
print(lm.model.config)

# Text in, text out, with the cached engine.
for piece in lm.stream(prompt, 20, temperature=0.8, seed=0):
    print(piece, end="", flush=True)

# It is a Keras model like any other: logits of the prompt's tokens, or model.fit.
tokens = lm.tokenizer.encode(prompt)[None]
print("\n", np.shape(lm.model(tokens)))

# And back: transformers gives the same logits from this folder.
if len(sys.argv) > 3:
    print(export_safetensors(lm.model, lm.tokenizer, sys.argv[3], overwrite=True))
