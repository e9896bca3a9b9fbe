"""A hash of the tensors of a state dict."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor


def tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, in any order.

    Tensors are taken one after another, so they need not be in memory together.
    """
    digests = []
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # torch cannot view a tensor without axes as bytes.
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
        digests.append((name, digest.hexdigest()))
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()
