"""The package's structure, read from its import statements: one direction, and nothing heavy before it is needed."""

import ast
import graphlib
import importlib
import importlib.metadata
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import dcls_convert
from dcls_convert import cli, interpolation, options

PACKAGE = Path(dcls_convert.__file__).parent

# What a module may import of the package, deferred imports and those for type checkers included. Modules without a row
# put the parts together; they are only held to having no cycles.
ALLOWED = {
    "errors": set(),
    "options": {"errors"},
    "arguments": {"errors", "options"},
    "geometry": {"errors"},
    "bilinear": set(),
    "interpolation": {"bilinear", "errors"},
    "budget": {"errors"},
    "models": {"errors"},
    "weights": {"errors"},
    "workers": {"errors"},
    "convs": {"geometry"},
    "timm_convs": {"convs"},
    "quiet": set(),
    "comparison": {"errors"},
    "rules": {"errors", "geometry", "options", "sites"},
    "fitting": set(),
    "boxes": {"geometry", "interpolation"},
    "calibration": {"boxes", "errors", "plan_data"},
    "warmstart": {"boxes", "fitting", "geometry", "interpolation"},
    "ties": set(),
    "depthwise": {"geometry"},
    "layers": {"depthwise", "errors", "geometry", "convs", "interpolation", "ties", "timm_convs", "warmstart"},
    "tracing": {"errors", "layers"},
    "stages": set(),
    "sites": {"errors", "geometry", "budget", "convs", "layers", "stages", "tracing"},
    "plan_data": {"errors", "options", "geometry", "interpolation", "budget", "sites"},
    "plan_groups": {"errors", "options", "geometry", "budget", "sites", "plan_data"},
    "plan": {
        *("errors", "options", "geometry", "interpolation", "budget", "sites", "stages", "rules", "plan_data"),
        "plan_groups",
    },
    "authors": {"convs", "errors", "options", "geometry", "interpolation", "plan_data", "surgery", "weights"},
    "shared_parameters": {"layers", "ties"},
    "folding": {"errors", "layers", "shared_parameters"},
    "surgery": {
        "errors",
        "options",
        "convs",
        "folding",
        "geometry",
        "interpolation",
        "warmstart",
        "layers",
        "plan_data",
        "shared_parameters",
    },
    "fingerprint": {"errors", "tracing"},
    "stamp": {"errors", "plan_data"},
    "position_statistics": {"interpolation"},
    "repulsion": set(),
    "timm_groups": set(),
    "tracking": {"errors", "interpolation", "position_statistics", "shared_parameters"},
    "tuning": {"errors", "repulsion", "shared_parameters", "timm_groups", "tracking"},
    "timm_train": {"errors", "shared_parameters", "tuning"},
    "report": {"errors", "budget", "tracing", "sites", "plan_data", "views"},
    "views": {"errors", "geometry", "report"},
    "position_views": {"geometry", "inspection", "views"},
}
# rich asks the record itself for its view, so the report must know the views, which format it.
DEFERRED_BACK = {("report", "views")}
FOREIGN = {
    "timm": {"models", "timm_models", "timm_entry", "timm_convs", "timm_groups", "timm_train"},
    "torchvision": {"models", "timm_models", "timm_entry"},
    "safetensors": {"checkpoint", "stamp", "weights"},
    "typer": {"cli", "cli_checkpoints", "cli_models", "cli_rules"},
    "onnxruntime": {"exporting"},
}
# A command line that answers at once imports these.
LIGHT = [
    "dcls_convert",
    *(
        f"dcls_convert.{name}"
        for name in (
            "cli",
            "cli_models",
            "cli_checkpoints",
            "cli_rules",
            "arguments",
            "errors",
            "options",
            "geometry",
            "budget",
            "rules",
            "workers",
        )
    ),
]


@dataclass(frozen=True)
class Import:
    module: str  # "plan" within the package, "timm.models" outside
    inside: bool
    deferred: bool  # runs when a function is called
    typing: bool  # for type checkers only


class _Imports(ast.NodeVisitor):
    """All imports of a file, also `importlib.import_module("timm")` with a literal name."""

    def __init__(self):
        self.found, self.deferred, self.typing = [], False, False

    def visit_FunctionDef(self, node):
        outer, self.deferred = self.deferred, True
        self.generic_visit(node)
        self.deferred = outer

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node):
        outer = self.typing
        self.typing = outer or "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body:
            self.visit(child)
        self.typing = outer
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node):
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node):
        module = node.module or ""
        if node.level:
            assert node.level == 1, "the package is flat"
            module = f"dcls_convert.{module}".rstrip(".")
        if module == "dcls_convert":  # `from . import name`: a module, or something of __init__
            for alias in node.names:
                self.add(f"{module}.{alias.name}" if (PACKAGE / f"{alias.name}.py").exists() else module)
        else:
            self.add(module)

    def visit_Call(self, node):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called.endswith(("import_module", "_import", "__import__")) and isinstance(node.args[0], ast.Constant):
            self.add(node.args[0].value)
        self.generic_visit(node)

    def add(self, module):
        package, _, name = module.partition(".")
        inside = package == "dcls_convert"
        self.found.append(Import((name or "__init__") if inside else module, inside, self.deferred, self.typing))


def _imports_of(path):
    visitor = _Imports()
    visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return visitor.found


IMPORTS = {path.stem: _imports_of(path) for path in sorted(PACKAGE.glob("*.py"))}


def cycle(edges):
    graph = {module: {target for source, target in edges if source == module} for module in IMPORTS}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def edges(wanted):
    return {
        (name, found.module) for name, imports in IMPORTS.items() for found in imports if found.inside and wanted(found)
    }


# Direction.


def test_the_reader_of_imports_sees_all_kinds():
    def seen(name, **wanted):
        return {
            found.module
            for found in IMPORTS[name]
            if all(getattr(found, key) == value for key, value in wanted.items())
        }

    assert "sites" in seen("rules", typing=True)
    assert "views" in seen("report", deferred=True)
    assert "__init__" in seen("checkpoint", deferred=False, typing=False)
    assert "timm" in seen("models", deferred=True)  # importlib.import_module


def test_no_modules_import_each_other():
    assert cycle(edges(lambda found: not found.typing and not found.deferred)) is None


def test_no_modules_import_each_other_later_either():
    deferred = edges(lambda found: not found.typing)
    assert deferred >= DEFERRED_BACK, "an exception that is no longer needed"
    assert cycle(deferred - DEFERRED_BACK) is None


@pytest.mark.parametrize("name", ALLOWED)
def test_a_module_imports_only_what_lies_below_it(name):
    assert {found.module for found in IMPORTS[name] if found.inside} - ALLOWED[name] == set()


@pytest.mark.parametrize("library", FOREIGN)
def test_a_library_has_its_own_modules(library):
    users = {
        name for name, imports in IMPORTS.items() for found in imports if found.module.partition(".")[0] == library
    }
    assert users <= FOREIGN[library]


def test_timm_and_torchvision_are_imported_when_they_are_used_only():
    eager = {
        (name, found.module)
        for name, imports in IMPORTS.items()
        for found in imports
        if found.module.partition(".")[0] in ("timm", "torchvision") and not found.deferred
    }
    assert eager == set()


# What a start costs.


def imported_by(*arguments):
    """The exit code, and every module that Python imported on the way."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done, set(re.findall(r"^import time:.*\|\s+(\S+)$", done.stderr, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--help"], 0, "Usage"),
        (["--version"], 0, f"dcls-convert {dcls_convert.__version__}"),
        (["convert", "--help"], 0, "--dilated-size"),
        (["models", "--help"], 0, "--timeout"),
        (["models", "--json", "--csv"], 2, "--json and --csv exclude each other"),
        (["models", "--jobs", "0"], 2, "--jobs '0'"),
        (["verify", "--help"], 0, "--json"),
        (["inspect", "a", "b"], 2, "unexpected extra argument"),
        (["fold", "--help"], 0, "--format"),
        (["fold", "folder", "--format", "tflite"], 2, "tflite"),
        (["resnet18", "--dilated-sise", "7"], 2, "--dilated-sise"),
        (["resnet18", "--scope", "globe"], 2, "globe"),
    ],
)
def test_the_command_line_answers_without_torch(arguments, code, printed):
    done, modules = imported_by("-m", "dcls_convert", *arguments)
    assert "dcls_convert.cli" in modules
    assert modules & {"torch", "timm", "torchvision", "safetensors"} == set()
    assert done.returncode == code
    assert printed in (done.stdout if code == 0 else done.stderr)


def test_importing_the_light_modules_imports_no_torch():
    check = f"import sys, {', '.join(LIGHT)}; sys.exit('torch' in sys.modules)"
    done, modules = imported_by("-c", check)
    assert done.returncode == 0
    assert set(LIGHT) <= modules


def test_the_console_script_is_the_command_line():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="dcls-convert")
    assert script.value == "dcls_convert.cli:main"
    assert callable(cli.main)


# Public names.

PUBLIC = [name for name in dcls_convert.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_resolve_and_have_a_docstring(name):
    thing = getattr(dcls_convert, name)
    assert thing.__name__ == (f"dcls_convert.{name}" if isinstance(thing, ModuleType) else name)
    own = thing.__doc__ or ""
    assert own.strip()
    assert not own.startswith(f"{name}("), "what a dataclass writes for itself"


def test_public_names_are_sorted_unique_and_listed():
    assert sorted(set(PUBLIC)) == PUBLIC
    assert set(PUBLIC) <= set(dir(dcls_convert))
    assert dcls_convert.__version__


def test_public_names_for_type_checkers_are_those_that_resolve():
    (block,) = [node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If)]
    homes = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(homes) == PUBLIC
    for name, home in homes.items():
        if home is None:  # a module
            assert importlib.import_module(f"dcls_convert.{name}") is getattr(dcls_convert, name)
        else:
            assert getattr(importlib.import_module(f"dcls_convert.{home}"), name) is getattr(dcls_convert, name)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'konvert_'"):
        dcls_convert.konvert_  # noqa: B018


def test_options_name_all_interpolations():
    assert options.INTERPOLATIONS == tuple(interpolation.INTERPOLATIONS)
