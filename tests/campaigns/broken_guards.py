"""Break each guard of the package on purpose, one at a time: which campaign notices, and after how many tries.

`python -m tests.campaigns.broken_guards [--seconds 60] [--seed 7] [WORD ...]` copies package and tests to a temporary
folder for each guard (of those whose names hold a word), breaks it there, and runs the campaign that must notice, in a
limit of memory: without its guard the program may take all there is. A guard that nothing notices is printed so, and
the exit code is 1. `test_guards.py` checks that the text of each guard still stands in the package.

To add a guard: its name, the campaign (`test_CAMPAIGN`, a test or a file of tests), and file, text and what breaks it.
"""

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_MEMORY = 3 << 30  # bytes of the process's own; one input may take two thirds of it
MOST_CAMPAIGNS = 2  # of a name
SECONDS_TO_END = 150  # for imports, and for one input that takes too long


@dataclass(frozen=True)
class Guard:
    name: str
    campaign: str
    breaks: tuple[tuple[str, str, str], ...]  # file in the package, text that is there once, and what replaces it


def guard(name: str, campaign: str, *breaks: tuple[str, str, str]) -> Guard:
    return Guard(name, campaign, breaks)


YAML, PATTERN, RULES = (f"planning/{name}.py" for name in ("strict_yaml", "stage_pattern", "rules"))
WEIGHTS, SOURCE = "networks/weights.py", "networks/source.py"
FOLDER, LOAD, STAMP, TIMM = (f"checkpoints/{name}.py" for name in ("folder", "load", "stamp", "timm_model"))
VERIFY, OUTPUT, CONSOLE = "checkpoints/verify.py", "checkpoints/output.py", "cli/console.py"
PLAN, IMAGES, TRACKER, HISTORY = "planning/plan.py", "fitting/images.py", "tuning/tracker.py", "pictures/history.py"
CHECK_FILE = "if not path.is_file():\n            missing"

GUARDS = [
    # Rule files. The depth of a YAML text is not here: beyond it, PyYAML's RecursionError is refused in a line too.
    guard("size of a YAML text", "rules", (YAML, "if len(text) > MOST_CHARACTERS:", "if False:")),
    guard("values of a YAML text", "rules", (YAML, "if nodes > MOST_NODES:", "if False:")),
    guard("aliases written out", "rules", (YAML, "nodes += sizes.get(str(event.anchor), 0)", "nodes += 1")),
    guard("digits of an integer", "rules", (YAML, "len(node.value) > MOST_DIGITS", "False")),
    guard("half a surrogate pair", "rules", (YAML, 'if any("\\ud800" <= character', 'if any("" > character')),
    guard("a key twice", "rules", (YAML, "if key_node.value in seen:", "if False:")),
    guard(
        "whatever PyYAML raises",
        "rules",
        (RULES, "except Exception as error:  # PyYAML", "except ValueError as error:  #"),
    ),
    guard("UTF-8 in rule files", "rules", (RULES, "except UnicodeDecodeError as error:", "except EOFError as error:")),
    guard(
        "patterns in linear time",
        "rules",
        (PATTERN, "import re2", "import re as re2"),
        (PATTERN, "options = re2.Options()", "options: Any = type('', (), {})()"),
        (PATTERN, "re2.compile(pattern, options)", "re2.compile(pattern)"),
    ),
    guard(
        "windows of rules",
        "rules",
        (RULES, "Field(ge=1, le=MOST_SIDE)", "Field(ge=1)"),
        ("layers/geometry.py", "if cells > MOST_CELLS:", "if False:"),
    ),
    guard("escapes in messages", "command_lines", ("errors.py", "if text.isprintable():", "if True:")),
    guard(
        "length of what messages show",
        "rules",
        (
            "errors.py",
            "if len(text) <= limit and cell_len(escaped := printable(text)) <= limit:",
            "if escaped := printable(text):",
        ),
    ),
    # Files.
    guard("only regular files", "folders", ("files.py", "if not stat.S_ISREG(found.st_mode):", "if False:")),
    guard("size of a text file", "folders", ("files.py", "if found.st_size > most:", "if False:")),
    guard(
        "weights that are no file",
        "folders",
        ("files.py", CHECK_FILE, CHECK_FILE.replace("not path", "False and path")),
    ),
    guard(
        "a checkpoint that is no file",
        "weights_files",
        ("files.py", CHECK_FILE, CHECK_FILE.replace("not path", "False and path")),
    ),
    # Weights files.
    guard(
        "weights_only",
        "weights_files",
        (WEIGHTS, 'map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False'),
    ),
    guard("header of a weights file", "weights_files", (WEIGHTS, "if length > MOST_HEADER:", "if False:")),
    guard(
        "a weights file that unpacks to much more",
        "weights_files",
        (WEIGHTS, "if unpacked > MOST_GROWTH * path.stat().st_size:", "if False:"),
    ),
    guard("keys that are no texts", "weights_files", (WEIGHTS, "if odd := {", "if odd := set() and {")),
    guard(
        "wrappers inside each other",
        "weights_files",
        (WEIGHTS, "isinstance(content, Mapping) and depth <= MOST_WRAPPERS", "isinstance(content, Mapping)"),
        (WEIGHTS, "or depth > MOST_WRAPPERS", ""),
    ),
    guard(
        "tensors that are not dense",
        "weights_files",
        (WEIGHTS, "if value.layout != torch.strided or value.is_meta or value.is_quantized:", "if False:"),
    ),
    guard("entries that are no tensors", "weights_files", (WEIGHTS, "if not isinstance(value, Tensor):", "if False:")),
    guard("NaN in weights", "weights_files", (WEIGHTS, "problems = list(filter(None, found))", "problems = []")),
    guard("shapes of weights", "weights_files", (WEIGHTS, "if tensor.shape != wanted.shape:", "if False:")),
    guard(
        "kinds of numbers",
        "weights_files",
        (WEIGHTS, "if tensor.is_complex() != wanted.is_complex() or", "if False and"),
    ),
    guard("names of weights", "weights_files", (WEIGHTS, "if missing or unexpected:", "if False:")),
    guard("a name with and without its prefix", "weights_files", (WEIGHTS, "if stripped in state:", "if False:")),
    guard(
        "whatever unpickling raises",
        "weights_files",
        (WEIGHTS, "except Exception as error:  # damaged", "except pickle.UnpicklingError as error:  #"),
    ),
    # Folders. The characters of paths in arguments are not here: all arguments of timm and torchvision that take a path
    # are refused by their names. Nor are weights that a config names elsewhere: tests/test_hub.py.
    guard(
        "code that a folder names",
        "folders",
        (LOAD, "if not trust_code:\n        check_source(source)", "if False:\n        check_source(source)"),
    ),
    guard(
        "code that a folder names, through timm",
        "folders",
        (TIMM, "    _check_stored(base, stored)\n", ""),
    ),
    guard(
        "arguments that name files",
        "folders",
        (SOURCE, "REFUSED_WORDS & set(name.lower().split", "set() & set(name.lower().split"),
    ),
    guard("a network without end", "folders", (SOURCE, "if next(count) > MOST_MODULES:", "if False:")),
    guard(
        "sizes before they cost",
        "folders",
        (VERIFY, 'twin = build_model(source, device="meta"', 'twin = build_model(source, device="cpu"'),
    ),
    guard("hash of the tensors", "folders", (LOAD, "stamp.tensors != tensors_hash(state.items())", "False")),
    guard("hash of the plan", "folders", (FOLDER, "stamp.plan != config.plan.hash", "False")),
    guard(
        "weights of another folder", "folders", (FOLDER, "if config.tensors not in (None, stamp.tensors):", "if False:")
    ),
    guard("weights without metadata", "folders", (FOLDER, "if config.tensors is not None:", "if False:")),
    guard("hash of the texts", "folders", (VERIFY, "written not in (None, text_hash(text))", "False")),
    guard("plans that contradict themselves", "folders", (PLAN, "            check_plan(plan)", "            pass")),
    guard("windows of a plan", "folders", ("layers/geometry.py", "if cells > MOST_CELLS:", "if False:")),
    guard(
        "pixels of an image",
        "folders",
        ("checkpoints/fingerprint.py", "if math.prod(input_size[1:]) > MOST_PIXELS:", "if False:"),
    ),
    guard("depth of JSON", "folders", ("checkpoints/records.py", "(ValueError, RecursionError)", "ValueError")),
    # Command lines.
    guard(
        "control characters on stderr",
        "command_lines",
        (CONSOLE, "shown(word[0], LONGEST_WORD), printable(text))", "word[0], text)"),
    ),
    guard(
        "names that are too long", "command_lines", (OUTPUT, "if len(os.fsencode(path.name)) > MOST_NAME:", "if False:")
    ),
    guard("what --force may replace", "command_lines", (OUTPUT, "if reason := foreign(path):", "if reason := None:")),
    guard(
        "an output that is there",
        "command_lines",
        (
            OUTPUT,
            "if not force:\n                raise OutputExistsError(path)",
            "if False:\n                raise OutputExistsError(path)",
        ),
    ),
    guard(
        "what a library raises",
        "command_lines",
        ("cli/app.py", "except OSError as error:  # the disk", "except EOFError as error:  #"),
    ),
    # Kills. A second signal is not here: it could disturb microseconds, in which tests/cli/test_output.py sends one.
    guard(
        "what killed runs left",
        "kills",
        (OUTPUT, "    clean_up(output)\n    check_output(output, force", "    check_output(output, force"),
    ),
    guard("lock of an unfinished output", "kills", (OUTPUT, "fcntl.flock(descriptor, fcntl.LOCK_EX", "(fcntl.LOCK_EX")),
    guard(
        "exchange of names",
        "kills",
        (
            OUTPUT,
            "elif not _rename(new, ",
            "elif replaces and not shutil.rmtree(output):\n"
            "            new.rename(output)\n"
            "        elif not _rename(new, ",
        ),
    ),
    guard(
        "signals at the end",
        "kills",
        ("cli/app.py", "for number in filter(None, (*SIGNALS, LATER)):", "for number in SIGNALS[:0]:"),
    ),
    guard("keys of many parts", "defaults", ("cli/defaults.py", "> MOST_DOTS for", "> 10**9 for")),
    guard("integers of TOML", "defaults", ("cli/defaults.py", "        _check_integers(table)\n", "")),
    guard("depth of TOML", "defaults", ("cli/defaults.py", "except (ValueError, RecursionError)", "except ValueError")),
    # Images.
    guard("formats of images", "images", (IMAGES, ", formats=FORMATS)", ")")),
    guard("what Pillow says", "images", (IMAGES, "with quietly(), ", "with ")),
    guard("whatever Pillow raises", "images", (IMAGES, "except (OSError, ValueError, ", "except (EOFError, ")),
    guard("images that unpack to much more", "images", (IMAGES, ", Image.DecompressionBombError)", ")")),
    # Records of positions.
    guard("lengths without end", "histories", (TRACKER, "Field(ge=-1e40, le=1e40)", "Field()")),
    guard("tensors of all steps", "histories", (HISTORY, "if _form(record) != form:", "if False:")),
    # Places.
    guard("a closed stdout", "places", (CONSOLE, "if sys.stdout is None:", "if False:")),
    guard(
        "a full stdout",
        "places",
        (
            CONSOLE,
            'raise OutputError(f"the results cannot be printed: {error.strerror}") from error',
            "error.errno = 0",
        ),
    ),
    guard("memory that ran out", "places", ("errors.py", 'return "out of memory"', "return None")),
    guard(
        "removal of an unfinished output",
        "places",
        (OUTPUT, "if os.path.lexists(folder) or parents:", "if parents and False:"),
    ),
    guard(
        "no more threads",
        "places",
        (OUTPUT, "except (RuntimeError, MemoryError):  # the system", "except EOFError:  #"),
    ),
    guard(
        "a full disk, where a folder's texts are written",
        "places",
        (
            "checkpoints/save.py",
            '(folder / name).write_text(text, encoding="utf-8", newline="")',
            "with __import__('contextlib').suppress(OSError):\n            (folder / name).write_text(text)",
        ),
    ),
    guard(
        "descriptors and memory for the cleaning",
        "places",
        (OUTPUT, "            _keep_spare(cleaning, lock)\n", ""),
    ),
]


def broken(guard: Guard, folder: Path) -> None:
    """Copy the project to a folder and break the guard there."""
    for name in ("dcls_convert", "rules", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, text, instead in guard.breaks:
        path = folder / "dcls_convert" / name
        content = path.read_text(encoding="utf-8")
        if content.count(text) != 1:
            raise SystemExit(f"{guard.name}: {name} has {content.count(text)} times {text!r}")
        path.write_text(content.replace(text, instead), encoding="utf-8")


def tried(guard: Guard, seconds: float, seed: int) -> tuple[bool, str]:
    """Whether the campaign noticed, and how soon."""
    with tempfile.TemporaryDirectory(prefix="broken-guard-") as base:
        folder, temp = Path(base, "project"), Path(base, "temp")  # side by side: below a pyproject.toml are defaults
        folder.mkdir()
        temp.mkdir()
        broken(guard, folder)
        arguments = "-m campaign -n 0 -s -p no:cacheprovider --first".split()
        arguments += ["--basetemp", f"{temp}/pytest", "--seconds", str(seconds), "--seed", str(seed)]
        command = [sys.executable, "-m", "pytest", *arguments, "tests/campaigns", "-k", f"test_{guard.campaign}"]
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(temp)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY)),
        )
        limit = MOST_CAMPAIGNS * seconds + SECONDS_TO_END
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return True, f"hung: killed after {limit:g} s"
        took = time.monotonic() - start
    return outcome(output, process.returncode, took)


def outcome(output: str, code: int, took: float) -> tuple[bool, str]:
    lines = re.findall(r": ([\d,]+) tried, .* (\d+) findings", output)  # of the campaigns in the file
    if not lines:
        return code != 0, f"the campaign itself ended with {code}: {output.strip()[-300:]!r}"
    tries = [count for count, findings in lines if findings != "0"]
    if not tries:
        return False, f"not noticed in {took:.0f} s, {', '.join(count for count, _ in lines)} tries"
    why = re.search(r"Finding: .*?: \d+ findings in \S+: \[(.{0,150})", output)
    return True, f"noticed after {tries[0]} tries, {took:.0f} s: {why[1] if why else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the guards' names or campaigns; all without them")
    parser.add_argument("--seconds", type=float, default=60, help="of each campaign")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    missed = 0
    for each in GUARDS:
        if options.words and not any(word in (each.campaign, each.name) for word in options.words):
            continue
        noticed, how = tried(each, options.seconds, options.seed)
        missed += not noticed
        print(f"| {each.name} | {each.campaign} | {how} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
