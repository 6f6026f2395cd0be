"""Writes a SavedModel from a bundle: python -m keras_tinygpt.export BUNDLE FOLDER.

`export_saved_model` starts this under the TensorFlow backend when it runs under another
one; FOLDER exists already. An error is one line.
"""

import sys
from pathlib import Path

from keras_tinygpt import bundle
from keras_tinygpt.export.saved_model import write_saved_model


def main(saved: str, folder: str) -> None:
    """Reads the bundle and writes the folder; exits with 1 and a line on failure."""
    try:
        loaded = bundle.load(saved)
        write_saved_model(loaded.model, loaded.tokenizer, Path(folder), loaded.metrics)
    except (ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main(*sys.argv[1:])
