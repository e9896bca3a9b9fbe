"""A folded model as a program of torch.export."""

import io
from pathlib import Path

import torch
from torch import Tensor

from ..records import write_json
from .folded_model import (
    FOLDING_BOUND,
    Exported,
    ExportFormat,
    Folded,
    Folding,
    export_file,
    metadata,
)

METADATA = "metadata.json"  # name among the file's `extra_files`
LOADING = 'import torch\n\nmodel = torch.export.load("{folder}").module()\n'


def write(folding: Folding) -> Folded:
    def export(path: Path, images: Tensor, dynamic: bool) -> Exported:
        shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
        program = torch.export.export(folding.model, (images,), dynamic_shapes=shapes)
        _remove_stack_traces_(program)
        (input_name,) = program.graph_signature.user_inputs
        facts = write_json(metadata(folding, str(input_name)))
        file = io.BytesIO()  # where the disk is full, torch's own writer of files ends the process
        torch.export.save(program, file, extra_files={METADATA: facts})
        path.write_bytes(file.getbuffer())
        return torch.export.load(path).module()

    return export_file(folding, FOLDING_BOUND, export, LOADING)


def _remove_stack_traces_(program: torch.export.ExportedProgram) -> None:
    """They state where the source files are on this machine."""
    for graph in program.graph_module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            for node in graph.graph.nodes:
                node.meta.pop("stack_trace", None)


FORMAT = ExportFormat(suffix=".pt2", noun="program of torch.export", write=write)
