"""A folded model as a program of torch.export."""

import io
from pathlib import Path

import torch
from torch import Tensor

from .folding import FOLDING_BOUND, Exported, ExportFormat, Folded, Folding, export_file

LOADING = 'import torch\n\nmodel = torch.export.load("{folder}").module()\n'


def write(folding: Folding) -> Folded:
    def export(path: Path, images: Tensor, dynamic: bool) -> Exported:
        shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
        program = io.BytesIO()  # where the disk is full, torch's own writer of files ends the process
        torch.export.save(torch.export.export(folding.model, (images,), dynamic_shapes=shapes), program)
        path.write_bytes(program.getbuffer())
        return torch.export.load(path).module()

    return export_file(folding, FOLDING_BOUND, export, LOADING)


FORMAT = ExportFormat(suffix=".pt2", noun="program of torch.export", write=write)
