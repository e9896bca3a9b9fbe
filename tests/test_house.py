"""The structure of the package, read from its imports: one direction, and nothing heavy before it
is needed.
"""

import ast
import graphlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import tomllib
import typing
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dcls_convert
from dcls_convert import options
from dcls_convert.cli import app
from dcls_convert.export.formats import EXPORT_FORMATS
from dcls_convert.layers import interpolation
from dcls_convert.planning.plan_options import PlanOptions
from dcls_convert.planning.rules import RuleSet

from .command_line import imported_by

PACKAGE = Path(dcls_convert.__file__).parent

FRONT_DOOR = ("timm_plugin", "__init__", "__main__")
# A folder (or a file beside the folders) imports only from those before it, in functions too. Every
# folder may also import `__version__` from the package.
ORDER = (
    *("text", "errors", "geometry", "options", "input", "records", "output"),
    *("tables", "progress"),
    *("depthwise", "layers", "networks", "weights", "planning", "reports"),
    *(
        "placing",
        "fitting",
        "conversion",
        "checkpoints",
        "export",
        "tuning",
        "choosing",
        "views",
        "cli",
    ),
    *FRONT_DOOR,
)
# The folders that import a library that is slow, optional or needs care; no others may.
FOREIGN = {
    "timm": {"layers", "networks", "checkpoints", "tuning", "timm_plugin"},
    "torchvision": {"networks"},
    "safetensors": {"output", "weights", "checkpoints"},
    "typer": {"cli"},
    "matplotlib": {"views"},
    "plotly": {"views"},
}


def imports_of(path):
    """Yield (module, own, deferred) of each import.

    The module is without a leading "dcls_convert."; `own` is True if it is the package's, and
    `deferred` if it is imported in a function, or for type checkers alone.
    """
    package = ["dcls_convert", *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                deferred.update(ast.walk(statement))
        elif isinstance(node, ast.FunctionDef | ast.Lambda):
            deferred.update(ast.walk(node))
    for node in ast.walk(tree):
        for name in imported_names(node, package):
            yield (
                name.removeprefix("dcls_convert."),
                name.startswith("dcls_convert"),
                node in deferred,
            )


def imported_names(node, package):
    """Return the full names that a node imports, if it is an import or a call that imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module
        if node.level:
            parent = package[: len(package) - node.level + 1]
            module = ".".join([*parent, *filter(None, [node.module])])
        return [f"{module}.{alias.name}" for alias in node.names if alias.name != "__version__"]
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        if function.endswith(("import_library", "import_module")):
            return [value.value for value in node.args if isinstance(value, ast.Constant)]
    return []


def module_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


PATHS = sorted(PACKAGE.rglob("*.py"))
IMPORTS = {module_of(path): list(imports_of(path)) for path in PATHS}


def folder_of(module):
    return module.partition(".")[0]


def test_a_folder_imports_only_from_those_before_it():
    assert {folder_of(module) for module in IMPORTS} == set(ORDER)
    rank = {name: index for index, name in enumerate(ORDER)}
    upwards = {
        (module, name)
        for module, imports in IMPORTS.items()
        for name, own, _ in imports
        if own and folder_of(name) in rank
        if rank[folder_of(name)] > rank[folder_of(module)]
    }
    assert upwards == set()


def test_the_documentation_lists_the_folders_in_this_order():
    text = (PACKAGE.parent / "docs" / "develop.md").read_text(encoding="utf-8")
    table = text.partition("| folder | its job |\n")[2].partition("\n\n")[0]
    names = []
    for row in table.splitlines():
        names += re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1])
    assert names == [name for name in ORDER if name not in FRONT_DOOR]


def test_no_modules_import_each_other():
    graph = {
        module: {
            target
            for name, own, _ in imports
            if own
            for target in (name, name.rpartition(".")[0])
            if target in IMPORTS and target != module
        }
        for module, imports in IMPORTS.items()
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(order) == set(IMPORTS)


def declared(*extras):
    """Return the names of the packages that pyproject.toml requires, always or in these extras."""
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    requirements = project["dependencies"]
    if extras:
        requirements = []
        for extra in extras:
            requirements += project["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def test_every_dependency_is_imported_and_every_import_is_declared():
    packages = importlib.metadata.packages_distributions()
    imported = set()
    for imports in IMPORTS.values():
        for name, own, _ in imports:
            if not own:
                imported.update(map(canonicalize_name, packages.get(folder_of(name), ())))
    assert declared() - imported == set()
    allowed = declared() | declared("export", "plot", "train")
    # Others require these: pydantic, and torch's builds for GPUs.
    allowed |= {"dcls-convert", "pydantic-core", "triton"}
    assert imported - allowed == set()


@pytest.mark.parametrize("library", FOREIGN)
def test_a_library_is_imported_in_its_own_folders_only(library):
    uses = {
        (module, deferred)
        for module, imports in IMPORTS.items()
        for name, own, deferred in imports
        if folder_of(name) == library and not own
    }
    assert {folder_of(module) for module, _ in uses} == FOREIGN[library]
    if library in ("timm", "torchvision"):
        assert all(deferred for _, deferred in uses), "imported before it is used"


@pytest.mark.parametrize(
    "library", sorted({package for row in EXPORT_FORMATS.values() for package in row.packages})
)
def test_a_formats_packages_are_imported_by_exports_when_they_are_called(library):
    for module, imports in IMPORTS.items():
        for name, own, deferred in imports:
            if folder_of(name) == library and not own:
                assert (folder_of(module), deferred) == ("export", True)


@pytest.mark.parametrize("name", [name for name in ORDER if (PACKAGE / name).is_dir()])
def test_a_folder_has_a_docstring(name):
    assert (importlib.import_module(f"dcls_convert.{name}").__doc__ or "").strip()


# What the program imports when it starts.


@pytest.mark.parametrize(
    ("line", "code", "printed"),
    [
        ("--help", 0, "Usage"),
        ("--version", 0, f"dcls-convert {dcls_convert.__version__}"),
        ("convert --help", 0, "--dilated-size"),
        ("rules list", 0, "depthwise"),
        ("inspect tests --picture x.gif", 2, "must end in .png, .svg, .pdf"),
        (
            "inspect tests --html x.html --history nowhere",
            2,
            "history nowhere: there is no such file",
        ),
        ("fold nowhere", 2, "nowhere: is not a folder"),
        ("verify nowhere", 2, "nowhere: is not a folder"),
        ("sweep resnet18 --sizes 23..7", 2, "give 7..23"),
        ("resnet18 --init fit", 2, "init 'fit' needs trained weights"),
        ("resnet18 --output /tmp", 2, "output /tmp already exists"),
        ("resnet18 --checkpoint nowhere", 2, "nowhere: there is no such file"),
        ("resnet18 --pretrained --calibrate nowhere", 2, "nowhere: there is no such folder"),
    ],
)
def test_the_command_line_answers_without_torch(line, code, printed):
    done, modules = imported_by("-m", "dcls_convert", *line.split())
    assert "dcls_convert.cli.app" in modules
    slow = {"numpy", "yaml"} if "help" in line or line == "--version" else set()
    assert modules & {"torch", "timm", "torchvision", *slow} == set()
    assert done.returncode == code
    assert printed in (done.stdout if code == 0 else done.stderr)


def test_a_missing_torch_is_one_line_that_says_what_to_install():
    program = (
        "import sys; sys.modules['torch'] = None; "
        "from dcls_convert.cli.app import main; main(['resnet18'])"
    )
    done, _ = imported_by("-c", program)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "\nerror: torch is not installed: pip install torch torchvision timm\n"
    )
    assert "Traceback" not in done.stderr


def test_the_console_script_is_the_command_line():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="dcls-convert")
    assert script.load() is app.main


# Public names.

PUBLIC = [name for name in dcls_convert.__all__ if not name.startswith("__")]


def test_public_names_are_sorted_and_have_a_docstring():
    assert sorted(set(PUBLIC)) == PUBLIC
    assert set(PUBLIC) <= set(dir(dcls_convert))
    for name in PUBLIC:
        thing = getattr(dcls_convert, name)
        assert thing.__name__ == (f"dcls_convert.{name}" if isinstance(thing, ModuleType) else name)
        assert (thing.__doc__ or "").strip()
        assert not thing.__doc__.startswith(f"{name}("), "a docstring that @dataclass made"


PLANNING_FUNCTIONS = ("convert_", "convert_from_authors_", "plan_conversion")
# A class that the annotations of options name, without importing torch.
ANNOTATED = {"RuleSet": RuleSet}


@pytest.mark.parametrize("name", PLANNING_FUNCTIONS)
def test_a_function_that_takes_planning_options_writes_them_all_out(name):
    """In the source, for editors and type checkers, with the record's types and defaults."""
    function = inspect.unwrap(getattr(dcls_convert, name))
    record = dict(inspect.signature(PlanOptions).parameters)
    if name == "convert_from_authors_":  # the weights state the counts
        for option in ("kernel_count", "scope", "budget"):
            del record[option]
    shown = inspect.signature(function).parameters
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
    assert {key: shown[key].default for key in record} == {
        key: parameter.default for key, parameter in record.items()
    }
    types = typing.get_type_hints(function)
    types_of_record = typing.get_type_hints(PlanOptions, localns=ANNOTATED)
    assert {key: set(typing.get_args(types[key])) for key in record} == {
        key: set(typing.get_args(types_of_record[key])) for key in record
    }


def documented(function):
    """Return the entries of a docstring's Args, by the name of the argument."""
    _, _, rest = inspect.getdoc(function).partition("Args:\n")
    arguments = rest.partition("\n\n")[0]
    entries = {}
    for names, text in re.findall(
        r"^    (\w[\w, ]*): (.*(?:\n      .*)*)", arguments, re.MULTILINE
    ):
        for name in names.split(", "):
            entries[name] = text
    return entries


def test_a_sweep_takes_the_options_of_a_conversion_as_a_conversion_does():
    conversion = inspect.signature(dcls_convert.convert_).parameters
    sweep = inspect.signature(dcls_convert.sweep).parameters
    shared = conversion.keys() & sweep.keys()
    assert shared > {"rules", "tie", "interpolation", "strict", "input_size"}
    for name in shared:
        assert sweep[name].default == conversion[name].default
        assert sweep[name].annotation == conversion[name].annotation


@pytest.mark.parametrize("name", [*PLANNING_FUNCTIONS, "sweep"])
def test_a_docstring_has_an_entry_for_each_argument_and_each_word_of_an_option(name):
    function = getattr(dcls_convert, name)
    entries = documented(function)
    assert entries.keys() == inspect.signature(function).parameters.keys()
    if name in ("convert_from_authors_", "sweep"):  # where most options are "As in `convert_`"
        return
    words = {"scope": options.SCOPES, "tie": options.TIES}
    words["interpolation"] = options.INTERPOLATION_NAMES
    for option, choices in words.items():
        for word in choices:
            assert f'"{word}"' in entries[option]


def test_options_name_all_interpolations():
    assert options.INTERPOLATION_NAMES == tuple(interpolation.INTERPOLATIONS)
