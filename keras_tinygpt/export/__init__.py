"""Models for other programs: TensorFlow alone, ONNX, LiteRT, OpenVINO."""
