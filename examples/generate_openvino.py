"""Generates text with OpenVINO from a folder that `export_openvino` wrote.

python examples/generate_openvino.py FOLDER PROMPT (pip install numpy openvino)
"""

import numpy as np
import openvino
from text_loop import main


def load(folder, metadata):
    model = openvino.Core().compile_model(
        folder / metadata["graphs"]["decode"]["file"],
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32"},  # else bfloat16 where the CPU has it
    )
    request = model.create_infer_request()

    def step(tokens, index, last, state):
        outputs = request.infer(
            {
                "tokens": tokens,
                "index": np.array(index, "int32"),
                "last": np.array(last, "int32"),
                "row_offsets": np.zeros(1, "int32"),
                **state,
            }
        )
        return outputs["logits"][0], {name: outputs[f"new_{name}"] for name in state}

    return step


if __name__ == "__main__":
    main(load, __doc__)
