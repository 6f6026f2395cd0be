"""A process that turns shards of a text into ids: python -m keras_tinygpt.text FOLDER.

Each line of standard input is a shard as JSON; each line of output answers one, with
null or with what is wrong. `keras_tinygpt.text.preparing` starts it.
"""

import json
import sys
from pathlib import Path

from keras_tinygpt.text.prepared import TOKENIZER
from keras_tinygpt.text.preparing import Shard, encode_shard
from keras_tinygpt.text.tokenizers import load_tokenizer


def main() -> None:
    """Answers until the input ends."""
    folder = Path(sys.argv[1])
    tokenizer = load_tokenizer(folder / TOKENIZER)
    for line in sys.stdin:
        error = None
        try:
            encode_shard(Shard(**json.loads(line)), tokenizer, folder)
        except (ValueError, OSError) as problem:
            error = str(problem)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
