"""A folded checkpoint in other formats: stock timm, ONNX, pt2.

What is written has first given the outputs of the model that it was made from.
"""
