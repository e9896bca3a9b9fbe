"""What a report tells its reader to do, on the command line or in Python."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What a report tells its reader to do."""

    cheaper_sizes: str  # a clause after "1.6 times the MACs; "
    why_kept: str  # a clause after "3 convolutions kept; "
    calibrate: str  # the subject of "would keep the outputs closer"


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
OF_A_PLAN = replace(IN_PYTHON, why_kept="plan.skipped says why")
