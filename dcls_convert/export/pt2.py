"""Write a folded model as a torch.export program."""

import io
from pathlib import Path

import torch

from ..networks.inputs import Arguments
from ..records import write_json
from .export_file import export_file
from .folded_model import (
    FOLDING_BOUND,
    ExportReport,
    FoldedModel,
    ModelFunction,
    any_batch_shapes,
    metadata,
)

METADATA = "metadata.json"  # name of the metadata among the file's `extra_files`
LOAD_PT2 = 'import torch\n\nmodel = torch.export.load("{folder}").module()\n'


def write_pt2(folded: FoldedModel) -> ExportReport:
    """Write the .pt2 file."""

    def export(path: Path, arguments: Arguments, any_batch: bool) -> ModelFunction:
        shapes = None
        if any_batch:
            shapes = any_batch_shapes(folded.model, arguments, torch.export.Dim.DYNAMIC)
        program = torch.export.export(
            folded.model, arguments.args, arguments.kwargs, dynamic_shapes=shapes
        )
        _remove_stack_traces_(program)
        names = [str(name) for name in program.graph_signature.user_inputs]
        facts = write_json(metadata(folded, names))
        # Save to memory first: if the disk is full, torch's own file writer ends the process.
        file = io.BytesIO()
        torch.export.save(program, file, extra_files={METADATA: facts})
        path.write_bytes(file.getbuffer())
        return torch.export.load(path).module()

    return export_file(folded, FOLDING_BOUND, export, LOAD_PT2)


def _remove_stack_traces_(program: torch.export.ExportedProgram) -> None:
    """Remove the stack traces, which name this machine's source files."""
    for graph in program.graph_module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            for node in graph.graph.nodes:
                node.meta.pop("stack_trace", None)
