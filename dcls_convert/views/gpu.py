"""The GPU check: a line for each measurement."""

from ..compare.gpu_report import GpuRow


def measurement_line(row: GpuRow) -> str:
    """Return a line with what was measured, and the result or the problem."""
    text = f"{row.part:7} {row.what:34} {row.way or '':6} {row.work or '':9} "
    text += f"batch {row.batch:<3}"
    if row.ms is not None:
        text += f"{row.ms:9.2f} ms {row.images_per_second:8,.1f} images/s"
    if row.peak_mib is not None:
        text += f"{row.peak_mib:7,.0f} MiB"
    if row.error is not None:
        text += f"error {row.error:.1e}"
    if row.problem is not None:
        text += row.problem
    return text
