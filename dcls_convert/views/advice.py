"""What a report advises its reader to do, on the command line or in Python."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Parts of sentences that tell the reader of a report what to do next."""

    cheaper_sizes: str  # follows "1.6 times the MACs; "
    why_kept: str  # follows "3 convolutions kept; "
    calibrate: str  # precedes " would keep the outputs closer."


ON_COMMAND_LINE = Advice(
    cheaper_sizes="cheaper sizes: dcls-convert sweep",
    why_kept="-v says why",
    calibrate="--calibrate FOLDER, with some images,",
)
IN_PYTHON = Advice(
    cheaper_sizes="cheaper sizes: dcls_convert.sweep, before converting",
    why_kept="report.skipped says why",
    calibrate="calibration=images",
)
FOR_PLAN = replace(IN_PYTHON, why_kept="plan.skipped says why")
