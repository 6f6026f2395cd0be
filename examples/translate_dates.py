"""Train an encoder-decoder to put dates as ISO 8601; look at what it reads.

Usage: python examples/translate_dates.py [STEPS] [PICTURE.png]
"""

import sys

import keras_tinygpt as tg
from keras_tinygpt.inspection.figures import plot_attention
from keras_tinygpt.studies.dates import START, make_tokenizer
from keras_tinygpt.studies.translation import (
    make_model,
    measure,
    train_on_dates,
    translate,
)

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
model, source = make_model("encoder-decoder"), "Thursday, March 11, 2021"
print("untrained, held to dates:", *translate(model, [source], only_dates=True))

train_on_dates(model, tg.TrainConfig(steps=steps, learning_rate=2e-3))
for name, share in measure(model, count=100).items():
    print(f"{name}: {share:.1%}")

(written,) = translate(model, [source])
print(f"{source} -> {written}")
if len(sys.argv) > 2:
    encode = make_tokenizer().encode
    maps = tg.inspection.attention_maps(
        model, encode(START + written[:-1]), encode(source)
    )
    plot_attention(maps.cross_weights, written, sys.argv[2], key_labels=source)
