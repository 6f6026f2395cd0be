"""Train a small GPT with plain Keras calls, then continue a prompt.

Usage: python examples/train_gpt.py [TEXT_FILE] [STEPS]
"""

import sys

import keras

import keras_tinygpt as tg

corpus = tg.load_corpus(sys.argv[1] if len(sys.argv) > 1 else "five-nights")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1000

tokenizer = tg.CharTokenizer.from_text(corpus)
ids = tg.encode_corpus(corpus, tokenizer)
train_ids, valid_ids = tg.split_ids(ids, fractions=(0.9, 0.1))

config = tg.GPTConfig.preset("book", vocab_size=tokenizer.vocab_size)
model = tg.build_gpt(config, seed=0)
window = config.max_sequence_length
starts = tg.window_schedule(len(train_ids), window, steps, batch_size=64, seed=0)

model.compile(
    optimizer=keras.optimizers.AdamW(0.002, global_clipnorm=1.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    jit_compile=keras.backend.backend() != "torch",
)
model.fit(tg.WindowDataset(train_ids, starts, window), shuffle=False)

print(tg.evaluate(model, valid_ids))
prompt = tokenizer.encode("MARGET:\n", unknown="drop")
print(tokenizer.decode(tg.generate(model, prompt, 200, temperature=0.8, seed=0)))
