"""Train on all GPUs of this machine with TensorFlow's MirroredStrategy.

Usage: python examples/train_mirrored.py STEPS FOLDER [CPU_DEVICES]

A run that was stopped goes on from FOLDER. CPU_DEVICES rehearses it on as many parts of
the CPU.
"""

import os
import sys

import tensorflow as tf

import keras_tinygpt as tg

steps, folder, parts = int(sys.argv[1]), sys.argv[2], int((sys.argv[3:] or [0])[0])
if parts:
    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * parts)
names = [f"CPU:{index}" for index in range(parts)]
strategy = tf.distribute.MirroredStrategy(names or None)
print(f"{strategy.num_replicas_in_sync} replicas")

corpus = tg.load_corpus("five-nights")
train_ids, valid_ids = tg.split_ids(tg.encode_corpus(corpus, tg.ByteTokenizer()))
with strategy.scope():
    model = tg.build_gpt(tg.GPTConfig.preset("book", vocab_size=256))
config = tg.TrainConfig(steps, 8, 32, validate_every=1, validation_windows=24)
started = os.path.exists(os.path.join(folder, "checkpoints", "state.json"))
result = tg.train(model, train_ids, valid_ids, config, directory=folder, resume=started)
for row in result.history:
    print(f"loss {row['loss']:.6f} {row['valid_loss']:.6f}")
