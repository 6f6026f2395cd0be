"""Generates text with ONNX Runtime from a folder that `export_onnx` wrote.

python examples/generate_onnx.py FOLDER PROMPT (pip install numpy onnxruntime)
"""

import numpy as np
import onnxruntime
from text_loop import main


def load(folder, metadata):
    session = onnxruntime.InferenceSession(
        folder / metadata["graphs"]["decode"]["file"],
        providers=["CPUExecutionProvider"],
    )
    names = [output.name for output in session.get_outputs()]

    def step(tokens, index, last, state):
        inputs = {
            "tokens": tokens,
            "index": np.array(index, "int32"),
            "last": np.array(last, "int32"),
            "row_offsets": np.zeros(1, "int32"),
            **state,
        }
        outputs = dict(zip(names, session.run(names, inputs), strict=True))
        return outputs["logits"][0], {name: outputs[f"new_{name}"] for name in state}

    return step


if __name__ == "__main__":
    main(load, __doc__)
