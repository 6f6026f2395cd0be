"""Train an encoder to tell hidden characters from both sides, then fill a text.

Usage: python examples/fill_characters.py [TEXT_FILE] [STEPS]
"""

import sys

import keras_tinygpt as tg
from keras_tinygpt.studies.filling import (
    MASK,
    fill_text,
    mask_tokenizer,
    share_told,
    train_on_windows,
)

corpus = tg.load_corpus(sys.argv[1] if len(sys.argv) > 1 else "five-nights")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1000

tokenizer = mask_tokenizer(corpus)
train_ids, valid_ids = tg.split_ids(tg.encode_corpus(corpus, tokenizer))

config = tg.EncoderConfig.preset("tiny", vocab_size=tokenizer.vocab_size)
model = tg.build_encoder(config, seed=0)
recipe = tg.TrainConfig(steps=steps, batch_size=32, learning_rate=3e-3)
train_on_windows(model, train_ids, recipe)

print(f"{share_told(model, valid_ids):.1%} of the hidden characters are told")
text = tokenizer.decode(valid_ids[:60])
holes = "".join(MASK if i % 7 == 3 else text[i] for i in range(len(text)))
print(holes, fill_text(model, tokenizer, holes), text, sep="\n---\n")
