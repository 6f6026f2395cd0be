"""The translation of `translate_dates.py` by a GPT that reads the source first.

Usage: python examples/translate_by_prefix.py [STEPS]
"""

import sys

import keras_tinygpt as tg
from keras_tinygpt.studies.translation import (
    make_model,
    measure,
    train_on_dates,
    translate,
)

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
model, source = make_model("GPT"), "Thursday, March 11, 2021"
print(f"{model.count_params():,} parameters, an encoder-decoder has", end=" ")
print(f"{make_model('encoder-decoder').count_params():,}")

train_on_dates(model, tg.TrainConfig(steps=steps, learning_rate=2e-3))
for name, share in measure(model, count=100).items():
    print(f"{name}: {share:.1%}")
print(f"{source} -> {translate(model, [source])[0]}")
