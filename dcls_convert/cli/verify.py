"""`dcls-convert verify`: whether a checkpoint is whole."""

from rich.text import Text

from ..errors import CheckpointError, printable
from ..tables import counted
from . import console
from .arguments import Checkpoint, Json, TrustCode

MARKS = {True: ("ok", "green"), False: ("problem", "red"), None: ("skipped", "yellow")}


def verify(checkpoint: Checkpoint, trust_code: TrustCode = False, json_: Json = False) -> None:
    """Check a checkpoint: rebuild it in a fresh process, and compare names, shapes, hash and outputs."""
    with console.steps(checkpoint, "reading", lines=False) as notify:
        from ..checkpoints.verify import verify_folder

        verification = verify_folder(checkpoint, trust_code=trust_code, notify=notify)
    if json_:
        console.write(verification.to_json())
    else:
        width = max(len(check.name) for check in verification.checks)
        for check in verification.checks:
            mark, colour = MARKS[check.ok]
            console.show(
                Text.assemble(
                    (f"{mark:7}", colour), f"  {check.name:{width}}  {printable(check.detail)}"
                )
            )
    if not verification.ok:
        problems = sum(check.ok is False for check in verification.checks)
        raise CheckpointError(f"{checkpoint}: {counted(problems, 'problem')} found")
