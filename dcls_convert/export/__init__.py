"""A folded checkpoint in other formats: stock timm, ONNX, pt2. What is written has given the checkpoint's outputs."""
