"""What the generate_*.py scripts share: text in, tokens one by one, text out.

A script brings `load(folder, metadata)`, which returns a function
(tokens int32 (1, C), index, last, state) -> (logits (V,), state). Once the window is
full, its last half is read again (`context="slide"` in keras_tinygpt). At the same
seed the text is the one that `LanguageModel.generate` gives, unless rounding decides
between two tokens.
"""

import argparse
import json
from pathlib import Path

import numpy as np


def main(load, description, argv=None):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    metadata = json.loads((args.folder / "metadata.json").read_text("utf-8"))
    tokenizer = json.loads((args.folder / "tokenizer.json").read_text("utf-8"))
    step = load(args.folder, metadata)
    try:
        tokens = encode(tokenizer, args.prompt)
    except KeyError as error:
        parser.error(f"PROMPT must use the model's characters, got {error}")
    if not tokens:
        parser.error("PROMPT must hold at least one character")
    new = generate(
        step, metadata, tokens, args.max_new_tokens, args.temperature, args.seed
    )
    print(decode(tokenizer, tokens + list(new)))


def encode(tokenizer, text):
    if tokenizer["type"] == "byte":
        return list(text.encode("utf-8"))
    ids = {character: id for id, character in enumerate(tokenizer["vocabulary"])}
    return [ids[character] for character in text]


def decode(tokenizer, tokens):
    if tokenizer["type"] == "byte":
        return bytes(tokens).decode("utf-8", "replace")
    return "".join(tokenizer["vocabulary"][token] for token in tokens)


def generate(step, metadata, tokens, max_new_tokens, temperature, seed):
    """Yields new token ids."""
    window, tokens = metadata["window"], list(tokens)
    generator = np.random.Generator(np.random.Philox(key=seed))
    uniforms = generator.random(max_new_tokens, dtype="float32")
    used = window  # cache slots; the prompt is read like a window that is full
    for number, uniform in enumerate(uniforms):
        if number == 0 or used == window:
            fits = window is None or len(tokens) <= window
            view = tokens if fits else tokens[-max(1, window // 2) :]
            logits, state = read(step, metadata, view)
            used = len(view)
        else:
            last_token = np.array([tokens[-1:]], "int32")
            logits, state = step(last_token, used, 0, state)
            used += 1
        tokens.append(draw(logits, temperature, uniform))
        yield tokens[-1]


def read(step, metadata, tokens):
    """Reads tokens in padded chunks; returns the last logits and the state."""
    chunk = metadata["chunk"]
    state = {
        name: np.zeros(shape, "float32") for name, shape in metadata["state"].items()
    }
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        padded = np.array([piece + [0] * (chunk - len(piece))], "int32")
        logits, state = step(padded, start, len(piece) - 1, state)
    return logits, state


def draw(logits, temperature, uniform):
    """The token at `uniform` in the cumulative distribution; argmax at 0."""
    if temperature == 0:
        return int(np.argmax(logits))
    cdf = np.cumsum(np.exp((logits - logits.max()) / np.float32(temperature)))
    return min(int(np.sum(cdf <= uniform * cdf[-1])), len(cdf) - 1)
