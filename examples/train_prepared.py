"""Train on texts larger than memory, with as little memory as there is.

Usage: python examples/train_prepared.py [TEXTS] [STEPS] [FOLDER]

TEXTS is a file, a folder or a quoted pattern; their ids go to FOLDER. One that is there
already is read instead: name another, or remove it, to train on other texts.
"""

import sys
from pathlib import Path

import keras_tinygpt as tg
from keras_tinygpt.models.gpt import remat_scope

default = ["five-nights", "300", "prepared"]
source, steps, folder = [*sys.argv[1:], *default[len(sys.argv) - 1 :]]

if Path(folder).exists():
    prepared = tg.load_prepared(folder)
    print(f"{folder} is there already: {prepared.name} is read, not {source}")
else:
    prepared = tg.prepare(source, folder, "byte", split=(0.9, 0.1))
print({name: f"{len(ids):,} tokens" for name, ids in prepared.parts.items()})

config = tg.GPTConfig.preset("book", prepared.tokenizer.vocab_size)
with remat_scope(config):  # blocks are computed again for the backward pass
    model = tg.build_gpt(config)
training = tg.TrainConfig(int(steps), gradient_accumulation_steps=4)
tg.train(model, prepared.parts["train"], prepared.parts["valid"], training)
print(tg.evaluate(model, prepared.parts["valid"]))
