"""Writes a bundle in another format: python -m keras_tinygpt.export KIND BUNDLE FOLDER.

`source.write_elsewhere` starts this under the TensorFlow backend; FOLDER exists
already. An error is one line.
"""

import sys
from pathlib import Path

from keras_tinygpt import bundle
from keras_tinygpt.export import formats, saved_model


def main(kind: str, saved: str, folder: str) -> None:
    """Reads the bundle and fills the folder; exits with 1 and a line on failure."""
    try:
        loaded = bundle.load(saved)
        model, tokenizer = loaded.model, loaded.tokenizer
        if kind == "saved_model":
            saved_model.write_saved_model(
                model, tokenizer, Path(folder), loaded.metrics
            )
        else:
            formats.write_format(kind, model, tokenizer, Path(folder))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main(*sys.argv[1:])
