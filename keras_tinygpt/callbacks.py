"""Keras callbacks that need a tokenizer."""

from typing import Any

import keras

from keras_tinygpt.bundle import LanguageModel


class SampleText(keras.callbacks.Callback):
    """Prints a continuation of one prompt after every epoch of `fit`.

    In `keras_tinygpt.train` an epoch is the stretch between two validations.

    Args:
        tokenizer: of the model that is trained.
        prompt: text to continue; unknown characters raise ValueError at once.
        max_new_tokens: length of the continuation.
        **settings: see `keras_tinygpt.generate` (temperature, top_k, seed, ...).
    """

    def __init__(
        self, tokenizer: Any, prompt: str, max_new_tokens: int = 100, **settings: Any
    ):
        super().__init__()
        tokenizer.encode(prompt)
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.settings = settings

    def on_epoch_end(self, epoch, logs=None):
        """Prints the sample."""
        language_model = LanguageModel(self.model, self.tokenizer)
        text = language_model.generate(
            self.prompt, self.max_new_tokens, **self.settings
        )
        print(f"--- sample\n{text}\n---", flush=True)
