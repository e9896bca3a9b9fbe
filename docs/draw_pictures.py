"""Draw the program's own output, as a terminal of 80 columns shows it.

    python docs/draw_pictures.py [FOLDER]

Draw positions.png, after a training of a few minutes (extras plot, train and test):

    python docs/draw_pictures.py --positions
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 80
# Name of the picture -> command line; they run in this order in one folder.
PICTURES = {
    "report": "dcls-convert convnext_tiny --dilated-size 17",
    "models": "dcls-convert models 'timm:convnext_[tsbl]*'",
    "inspect": "dcls-convert inspect convnext_tiny-dcls17",
    "sweep": "dcls-convert sweep convnext_tiny",
    "help": "dcls-convert --help",
}
# The last command draws positions.png.
TRAINING = (
    "python -c 'from pathlib import Path; from tests.digits import write_digits; "
    'write_digits(Path("digits"), classes=10, images=180)\'',
    "dcls-convert test_convnext --dilated-size 9 --init random --output small",
    "python examples/finetune.py small --data digits --input-size 3 32 32 --batch-size 16 "
    "--epochs 30 --lr 1e-3",
    "dcls-convert inspect runs/small/best --history runs/small/positions.jsonl "
    "--picture positions.png",
)
PROGRAMS = {"python": [], "dcls-convert": ["-m", "dcls_convert"]}
# `inspect` ends with how the checkpoint was made, which names versions and weights of this machine.
RECORD = " Conversion:"
_ROOT = Path(__file__).resolve().parent.parent
_PICTURES = Path(__file__).with_name("pictures")
_TERMINAL = {
    "COLUMNS": str(COLUMNS),
    "FORCE_COLOR": "1",
    "TERM": "xterm-256color",
    "PYTHONPATH": str(_ROOT),
}


def output_of(command: str, folder: str) -> str:
    """What the command line writes to stdout, with its colours."""
    program, *arguments = shlex.split(command.replace("examples/", f"{_ROOT}/examples/"))
    environment = {
        name: value for name, value in os.environ.items() if name != "NO_COLOR"
    } | _TERMINAL
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
    return done.stdout


def draw_positions(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for command in TRAINING:
            print(output_of(command, folder))
        shutil.copy(Path(folder) / "positions.png", target)


def main(target: str = str(_PICTURES)) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, command in PICTURES.items():
            console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
            lines: list[str] = []
            for line in output_of(command, folder).rstrip().split("\n"):
                if RECORD in line:
                    lines.pop()  # the empty line before it
                    break
                lines.append(line)
            console.print(Text.from_ansi("\n".join(line.rstrip() for line in lines)))
            svg = console.export_svg(title=command, unique_id=name)
            # Rich names fonts on a server; the page's own monospace font does.
            (Path(target) / f"{name}.svg").write_text(
                re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
            )


if __name__ == "__main__":
    if "--positions" in sys.argv:
        draw_positions(_PICTURES / "positions.png")
    else:
        main(*sys.argv[1:])
