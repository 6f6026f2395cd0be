"""Train under MultiWorkerMirroredStrategy, where Keras' own fit does not run.

Usage: TF_CONFIG=... python examples/train_cluster.py STEPS PATH, another PATH for each
"""

import sys

import tensorflow as tf

import keras_tinygpt as tg
from keras_tinygpt.training import compile_model

steps, path, rows, length = int(sys.argv[1]), sys.argv[2], 8, 32
strategy = tf.distribute.MultiWorkerMirroredStrategy()
if rows % strategy.num_replicas_in_sync:
    sys.exit(f"replicas must divide {rows}, got {strategy.num_replicas_in_sync}")
ids = tg.encode_corpus(tg.load_corpus("five-nights"), tg.ByteTokenizer())
starts = tg.window_schedule(len(ids), length, steps, rows)
with strategy.scope():
    model = tg.build_gpt(tg.GPTConfig.preset("book", vocab_size=256))
    compile_model(model, tg.TrainConfig(schedule="constant"))
saved = tf.train.Checkpoint(model=model)
if tf.io.gfile.exists(f"{path}.index"):
    saved.read(path)


@tf.function
def step(inputs, targets):  # a replica's part of a batch
    with tf.GradientTape() as tape:  # Keras divides the loss by the replicas
        loss = model.compute_loss(y=targets, y_pred=model(inputs))
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)  # and sums over them
    return loss


batches = tg.WindowDataset(ids, starts[model.optimizer.iterations.numpy() :], length)
for batch in strategy.experimental_distribute_dataset(batches.as_tf_data()):
    print(f"loss {strategy.reduce('SUM', strategy.run(step, batch), None):.6f}")
saved.write(path)
