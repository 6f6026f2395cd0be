"""Train a small GPT on byte pairs instead of characters, and score it per character.

Usage: python examples/train_bpe.py [TEXT_FILE] [STEPS]
"""

import sys

import keras_tinygpt as tg

corpus = tg.load_corpus(sys.argv[1] if len(sys.argv) > 1 else "five-nights")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 600

# The text is cut first: byte pairs are learned on the training part alone.
cut = len(corpus.text) * 9 // 10
train_text, valid_text = corpus.text[:cut], corpus.text[cut:]
tokenizer = tg.BPETokenizer.from_text(train_text, vocab_size=512)
train_ids, valid_ids = tokenizer.encode(train_text), tokenizer.encode(valid_text)
print(f"{tokenizer}: {len(train_text) / len(train_ids):.2f} characters a token")

config = tg.GPTConfig.preset("book", vocab_size=tokenizer.vocab_size)
model = tg.build_gpt(config, seed=0)
tg.train(model, train_ids, valid_ids, tg.TrainConfig(steps=steps, seed=0))

scores = tg.evaluate(model, valid_ids)
print(scores)
by_character = scores.bits_per_token * len(valid_ids) / len(valid_text)
print(f"{by_character:.4f} bits per character, whatever the tokenizer")

lm = tg.LanguageModel(model, tokenizer)
print(lm.generate("MARGET:\n", 60, temperature=0.8, seed=0))
