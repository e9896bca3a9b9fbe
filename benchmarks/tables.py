"""Write the tables of benchmarks/results.md from the stored results.

    python benchmarks/tables.py [--check]

A section between the comments `from SCRIPT.py` and `to here` has the command, date, versions and
machine of the run, and then what `SCRIPT.py --table` prints. With --check nothing is written; the
exit code is 1 if the file would change.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

from measuring import RESULTS, machine_of, script_parser, stored

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER / "results.md"
SECTION = re.compile(r"(<!-- from (\w+)\.py -->\n).*?(<!-- to here -->)", re.DOTALL)


def section(name: str) -> str:
    """Return the Markdown of one script's stored results."""
    result = stored(RESULTS / f"{name}.jsonl")
    printed = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--table"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    run = f"`{result['command']}`, {result['date']}; {versions}; {machine_of(result)}."
    return f"\n{run}\n\n{printed}\n\n"


def fill_sections(text: str) -> str:
    """Return the document with its sections made again from the stored results."""
    names = [name for _, name, _ in SECTION.findall(text)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        sections = dict(zip(names, pool.map(section, names), strict=True))
    return SECTION.sub(lambda match: match[1] + sections[match[2]] + match[3], text)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only check that the tables show the stored results"
    )
    check = parser.parse_args().check
    text = DOCUMENT.read_text(encoding="utf-8")
    new = fill_sections(text)
    if check and new != text:
        sys.exit(
            f"{DOCUMENT.name} is not what the stored results give; run python benchmarks/tables.py"
        )
    if not check:
        DOCUMENT.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
