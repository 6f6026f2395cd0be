"""Generates text with LiteRT from a folder that `export_litert` wrote.

python examples/generate_litert.py FOLDER PROMPT (pip install numpy ai-edge-litert)
"""

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from text_loop import main


def load(folder, metadata):
    file = metadata["graphs"]["decode"]["file"]
    interpreter = Interpreter(str(folder / file))
    runners = {
        metadata["graphs"][name]["inputs"]["tokens"]["shape"][1]: (
            interpreter.get_signature_runner(name)
        )
        for name in ("prefill", "decode")
    }  # by the number of tokens they read

    def step(tokens, index, last, state):
        outputs = runners[tokens.shape[1]](
            tokens=tokens,
            index=np.array(index, "int32"),
            last=np.array(last, "int32"),
            row_offsets=np.zeros(1, "int32"),
            **state,
        )
        return outputs["logits"][0], {name: outputs[f"new_{name}"] for name in state}

    return step


if __name__ == "__main__":
    main(load, __doc__)
