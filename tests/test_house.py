"""The structure of the package: imports go one way and are declared, the command line answers
without torch, and an option that is written out in several places is the same in all of them.
"""

import ast
import graphlib
import importlib.metadata
import inspect
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dcls_convert
from dcls_convert import options
from dcls_convert.cli.convert import convert
from dcls_convert.cli.models import models
from dcls_convert.layers import interpolation
from dcls_convert.planning.plan_options import PlanOptions

from .command_line import imported_by

PACKAGE = Path(dcls_convert.__file__).parent
# A folder (or a file beside the folders) imports only from those before it, in functions too. Every
# folder may also import `__version__` from the package.
ORDER = (
    *("text", "errors", "geometry", "options", "file_checks", "records", "output"),
    *("tables", "progress"),
    *(
        "depthwise",
        "layers",
        "running",
        "networks",
        "weights",
        "planning",
        "reports",
        "placing",
        "starts",
    ),
    *("conversion", "checkpoints", "export", "tuning", "choosing", "views", "cli"),
    *("timm_plugin", "__init__", "__main__"),
)


def imported_names(path):
    """Return the full name of everything that a file imports, in functions too."""
    package = ["dcls_convert", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [node.module] if node.module else []
            if node.level:
                parts = package[: len(package) - node.level + 1] + parts
            names.update(".".join([*parts, alias.name]) for alias in node.names)
    return names


IMPORTS = {}
for path in PACKAGE.rglob("*.py"):
    module = ".".join(["dcls_convert", *path.relative_to(PACKAGE).with_suffix("").parts])
    IMPORTS[module] = imported_names(path)


def test_a_folder_imports_only_from_those_before_it():
    rank = {f"dcls_convert.{name}": index for index, name in enumerate(ORDER)}

    def folder_of(name):
        return ".".join(name.split(".")[:2])

    assert {folder_of(module) for module in IMPORTS} == set(rank)
    for module, names in IMPORTS.items():
        later = [name for name in names if rank.get(folder_of(name), -1) > rank[folder_of(module)]]
        assert later == [], module


def test_no_modules_import_each_other():
    graph = {}
    for module, names in IMPORTS.items():
        modules = names | {name.rpartition(".")[0] for name in names}
        graph[module] = modules & IMPORTS.keys() - {module}
    assert set(graphlib.TopologicalSorter(graph).static_order()) == set(IMPORTS)


def test_every_dependency_is_imported_and_every_import_is_declared():
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]

    def packages(requirements):
        return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}

    imported = set()
    distributions = importlib.metadata.packages_distributions()
    for name in set().union(*IMPORTS.values()):
        imported.update(map(canonicalize_name, distributions.get(name.partition(".")[0], ())))
    required = packages(project["dependencies"])
    optional = project["optional-dependencies"]
    allowed = required | packages(optional["export"] + optional["plot"] + optional["train"])
    # Others require these: pydantic, and torch's builds for GPUs.
    allowed |= {"dcls-convert", "pydantic-core", "triton"}
    assert imported <= allowed
    assert required <= imported


@pytest.mark.parametrize(
    ("line", "code", "printed"),
    [
        ("--version", 0, f"dcls-convert {dcls_convert.__version__}"),
        ("convert --help", 0, "--dilated-size"),
        ("rules list", 0, "depthwise"),
        ("fold nowhere", 2, "nowhere: is not a folder"),
    ],
)
def test_the_command_line_answers_without_torch(line, code, printed):
    done, modules = imported_by("-m", "dcls_convert", *line.split())
    assert "dcls_convert.cli.app" in modules
    slow = {"numpy", "yaml"} if "help" in line or "version" in line else set()
    assert modules & {"torch", "timm", "torchvision", *slow} == set()
    assert done.returncode == code
    assert printed in (done.stdout if code == 0 else done.stderr)


def test_plans_rules_and_reports_are_read_without_torch():
    modules = ["planning.plan", "planning.planner", "planning.rule_files", "reports.report"]
    imports = "; ".join(f"import dcls_convert.{module}" for module in modules)
    golden = Path(__file__).parent / "golden" / "fit"
    program = ("-m", "dcls_convert")
    for arguments, code, printed in [
        (("-c", imports), 0, ""),
        ((*program, "rules", "check", "depthwise"), 0, "valid, "),
        ((*program, "inspect", str(golden), "--plan"), 0, '"kernel_count": '),
        ((*program, "inspect", str(PACKAGE), "--plan"), 2, "is not a folder of dcls-convert"),
    ]:
        done, imported = imported_by(*arguments)
        assert imported & {"torch", "timm", "torchvision", "numpy"} == set(), arguments
        assert done.returncode == code
        assert printed in (done.stdout if code == 0 else done.stderr)


@pytest.mark.parametrize("function", [dcls_convert.convert_, convert, models])
def test_options_that_are_written_out_are_those_of_their_record(function):
    """Editors, type checkers and --help need them written out."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters
    for option in fields(PlanOptions):
        if (function, option.name) != (models, "scope"):
            assert parameters[option.name].default == option.default
    assert options.INTERPOLATION_NAMES == tuple(interpolation.INTERPOLATIONS)


def test_texts_that_repeat_the_limits_of_auto_state_the_present_ones():
    page = (PACKAGE.parent / "docs/convert.md").read_text(encoding="utf-8")
    page = " ".join(page.split())
    docstring = " ".join(dcls_convert.convert_.__doc__.split())
    percent = f"adds at most {options.MAX_ADDED_COST_PERCENT:g} % to the"
    window = options.MAX_WINDOW
    assert f"{percent} network's MACs" in page
    assert f"makes no window larger than {window}x{window}" in page
    assert f"{percent} model's MACs, with windows of at most {window}," in docstring


def test_every_module_and_every_file_of_tests_has_the_other_of_its_name_or_is_in_the_table():
    """A module `a/b.py` is tested in `a/test_b.py`, or where tests/README.md says."""
    tests = Path(__file__).parent
    table = (tests / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", table, flags=re.MULTILINE)
    named_files = {name for names, _ in rows for name in re.findall("`(.+?)`", names)}
    named_modules = {name for _, text in rows for name in re.findall(r"`([\w/]+\.py)`", text)}
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("[!_]*.py")}
    files = {path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    file_of = {module: re.sub(r"(\w+\.py)$", r"test_\1", module) for module in modules}
    assert {module for module in modules if file_of[module] not in files} <= named_modules
    assert files - set(file_of.values()) <= named_files
    assert named_modules <= modules
    assert named_files <= files


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/develop.md"])
def test_the_pages_for_developers_name_files_and_code_that_exist(page):
    root = PACKAGE.parent
    files = [path for path in root.rglob("*") if not {"build", ".venv-test"} & set(path.parts)]
    paths = [path.as_posix() for path in files]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files if path.suffix == ".py")
    words = set(re.findall(r"\w+", code))
    for text in re.findall("`([^`\n]+)`", (root / page).read_text(encoding="utf-8")):
        if re.fullmatch(r"[\w./]+\.(py|md|toml|yml)", text):
            assert any(path.endswith(f"/{text}") for path in paths), text
        elif re.fullmatch(r"\w+_\w*|([A-Z][a-z]+){2,}", text):
            assert text in words, text
