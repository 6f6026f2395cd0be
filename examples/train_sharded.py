"""Train on all devices of this machine with JAX: batches in parts, matrices too.

Usage: KERAS_BACKEND=jax python examples/train_sharded.py STEPS FOLDER [MODEL_SHARDS]

Goes on from FOLDER. MODEL_SHARDS devices share each matrix. To rehearse on parts of
the CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

import os
import sys

import keras

import keras_tinygpt as tg
from keras_tinygpt.distribution import make_distribution

steps, folder, shards = int(sys.argv[1]), sys.argv[2], int((sys.argv[3:] or [1])[0])
shape = tg.GPTConfig.preset("book", vocab_size=256)
keras.distribution.set_distribution(make_distribution(shape, shards))
print(keras.distribution.distribution())

corpus = tg.load_corpus("five-nights")
train_ids, valid_ids = tg.split_ids(tg.encode_corpus(corpus, tg.ByteTokenizer()))
model = tg.build_gpt(shape)
for weight in model.get_layer("block_0").weights[:4]:
    print(weight.path, weight.shape, getattr(weight.value.sharding, "spec", "whole"))
config = tg.TrainConfig(steps, 8, 32, validate_every=1, validation_windows=24)
started = os.path.exists(os.path.join(folder, "checkpoints", "state.json"))
result = tg.train(model, train_ids, valid_ids, config, directory=folder, resume=started)
for row in result.history:
    print(f"loss {row['loss']:.6f} {row['valid_loss']:.6f}")
