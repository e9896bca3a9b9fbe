"""A hash of the tensors of a state dict."""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor


def can_be_hashed(value: object) -> bool:
    """Return True if `tensors_hash` can hash this entry of a state dict.

    It cannot hash meta, fake, sharded, sparse and quantized tensors, nor extra state.
    """
    if type(value) is not Tensor or value.is_meta or value.is_quantized:
        return False
    return value.layout == torch.strided


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
