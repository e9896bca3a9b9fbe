"""A folded checkpoint in other formats, one module for each: stock timm, ONNX, pt2.

Every file or folder has given the outputs of the checkpoint's model before it takes its name.
"""
