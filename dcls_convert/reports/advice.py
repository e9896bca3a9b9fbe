"""What a report advises its reader to do. Python's words are the default; the shell has its own."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Parts of sentences that tell the reader of a report what to do next."""

    # A command or a call, on a line of its own.
    cheaper_sizes: str = "dcls_convert.sweep(model), before converting"
    why_kept: str = "skipped says why"  # follows "3 convolutions kept; "
