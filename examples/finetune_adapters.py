"""Fine-tune the model in the package on another text, and keep the adapters alone.

Usage: python examples/finetune_adapters.py [TEXT_FILE] [STEPS] [ADAPTERS.npz]
"""

import math
import sys
from pathlib import Path

import keras_tinygpt as tg
from keras_tinygpt.finetuning import add_adapters, load_adapters, save_adapters

default = ["five-nights", "200", "adapters.npz"]
source, steps, path = [*sys.argv[1:], *default[len(sys.argv) - 1 :]]
lm = tg.load("tiny-shakespeare")
# extend_vocabulary gives a model that knows the other characters too.
ids = tg.encode_corpus(tg.load_corpus(source), lm.tokenizer, unknown="drop")
train_ids, valid_ids = tg.split_ids(ids)
print("before:", tg.evaluate(lm.model, valid_ids))

add_adapters(lm.model, rank=8)
trained = sum(math.prod(weight.shape) for weight in lm.model.trainable_weights)
print(f"{trained:,} of {lm.model.count_params():,} weights train")
config = tg.TrainConfig(int(steps), batch_size=16, weight_decay=0.0)
tg.train(lm.model, train_ids, valid_ids, config)
print("after:", tg.evaluate(lm.model, valid_ids))
save_adapters(path, lm.model)
print(f"{Path(path).stat().st_size:,} bytes in {path}")

lm = tg.load("tiny-shakespeare")
load_adapters(path, lm.model)
print(lm.generate("The bell", 200, temperature=0.6))
