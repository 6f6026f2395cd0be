"""Continue a prompt with an exported model; needs TensorFlow alone.

Usage: tinygpt export saved_models/five-nights-book
       python examples/use_saved_model.py saved_models/five-nights-book/saved_model
           ["MARGET:"]
"""

import json
import sys

import keras
import tensorflow as tf

folder = sys.argv[1]
prompt = sys.argv[2] if len(sys.argv) > 2 else "MARGET:"
model = tf.saved_model.load(folder)

metadata = json.loads(model.metadata().numpy())
print(metadata["architecture"], metadata["config"])

# Text in, text out: two prompts, 200 new characters, seed, temperature, top_k, top_p
# (0 and 1.0 keep every token) and no string to stop at.
texts = model.generate_text([prompt, prompt], 200, 0, 0.8, 0, 1.0, "")
for text in texts.numpy():
    print("---", text.decode("utf-8"), sep="\n")

# Token ids in, logits out. Signatures have named inputs and outputs.
tokens = tf.constant([[0, 1, 2], [2, 1, 0]])
print(model.serve(tokens).shape)
print(model.signatures["serving_default"](tokens=tokens)["logits"].shape)

# The same as a layer of a Keras model.
inputs = keras.Input((None,), dtype="int32")
layer = keras.layers.TFSMLayer(folder, call_endpoint="serve")
classifier = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(layer(inputs)))
print(classifier(tokens).shape)
