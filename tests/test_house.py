"""The structure of the package, read from its imports: one direction, and nothing heavy before it is needed."""

import ast
import graphlib
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest

import dcls_convert
from dcls_convert import options
from dcls_convert.cli import app
from dcls_convert.layers import interpolation

PACKAGE = Path(dcls_convert.__file__).parent

# A folder (or a file beside the folders) imports from those before it, deferred imports included.
ORDER = (
    "errors",
    "options",
    "files",
    "records",
    "output",
    "tables",
    "progress",
    "depthwise",
    "layers",
    "networks",
    "planning",
    "reports",
    "fitting",
    "surgery",
    "pipeline",
    "checkpoints",
    "export",
    "tuning",
    "compare",
    "views",
    "cli",
    "timm_plugin",
    "__init__",
    "__main__",
)
# `__version__` is the one name that every folder may take from the front door.
VERSION = "__version__"
# Who may import a library that is slow, optional or needs care.
FOREIGN = {
    "timm": {"layers", "networks", "checkpoints", "tuning", "timm_plugin"},
    "torchvision": {"networks"},
    "safetensors": {"output", "networks", "checkpoints"},
    "typer": {"cli"},
    "onnxruntime": {"export"},
    "matplotlib": {"views"},
}
# A command line that answers at once imports these.
LIGHT = ("dcls_convert.cli.app", "dcls_convert.options", "dcls_convert.planning.rules", "dcls_convert.planning.budget")


@dataclass(frozen=True)
class Import:
    module: str  # "planning.plan" inside the package, "timm.models" outside
    names: tuple[str, ...]
    inside: bool
    deferred: bool  # runs when a function is called
    typing: bool  # for type checkers only


class _Imports(ast.NodeVisitor):
    """All imports of a module, also `importlib.import_module("timm")` with a literal name."""

    def __init__(self, module):
        self.package = ["dcls_convert", *module.split(".")[:-1]]
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
        parts = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*parts, *filter(None, [node.module])])
        names = tuple(alias.name for alias in node.names)
        inner = [name for name in names if _path_of(f"{module}.{name}".removeprefix("dcls_convert.")).exists()]
        for name in inner if module.startswith("dcls_convert") else ():
            self.add(f"{module}.{name}")
        if rest := tuple(name for name in names if name not in inner):
            self.add(module, rest)

    def visit_Call(self, node):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called.endswith(("import_module", "_import", "__import__")) and isinstance(node.args[0], ast.Constant):
            self.add(node.args[0].value)
        self.generic_visit(node)

    def add(self, module, names=()):
        package, _, name = module.partition(".")
        inside = package == "dcls_convert"
        self.found.append(Import((name or "__init__") if inside else module, names, inside, self.deferred, self.typing))


def _path_of(module):
    path = PACKAGE.joinpath(*module.split("."))
    return path if path.is_dir() else path.with_suffix(".py")


def _module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def _imports_of(path):
    module = _module_of(path)
    visitor = _Imports(f"{module}.__init__" if path.name == "__init__.py" and module != "__init__" else module)
    visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return visitor.found


IMPORTS = {_module_of(path): _imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def room(module):
    return module.partition(".")[0]


def edges(wanted):
    return {
        (name, found.module)
        for name, imports in IMPORTS.items()
        for found in imports
        if found.inside and found.module != name and found.names != (VERSION,) and wanted(found)
    }


def cycle(pairs):
    graph = {module: {target for source, target in pairs if source == module} for module in IMPORTS}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


# Direction.


def test_the_reader_of_imports_sees_all_kinds():
    def seen(name, **wanted):
        return {
            found.module
            for found in IMPORTS[name]
            if all(getattr(found, key) == value for key, value in wanted.items())
        }

    assert "networks.sites" in seen("planning.rules", typing=True)
    assert "views.report" in seen("reports.report", deferred=True)
    assert "depthwise.geometry" in seen("planning.plan", deferred=False, typing=False)
    assert "timm" in seen("networks.source", deferred=True)  # importlib.import_module
    assert "networks.positions" in seen("tuning", deferred=False)


def test_every_file_stands_in_a_room_of_the_house():
    assert {room(module) for module in IMPORTS} == set(ORDER)


def test_a_room_imports_from_the_rooms_before_it_alone():
    place = {name: index for index, name in enumerate(ORDER)}
    # A record asks for its view when it is shown.
    found = edges(lambda found: not (found.deferred and room(found.module) == "views"))
    upwards = {(name, target) for name, target in found if place[room(target)] > place[room(name)]}
    # The front door looks for timm when the package is imported; that must not wait for a first use.
    assert upwards - {("__init__", "timm_plugin")} == set()


def test_no_modules_import_each_other():
    assert (
        cycle(edges(lambda found: not found.typing and not (found.deferred and room(found.module) == "views"))) is None
    )


@pytest.mark.parametrize("library", FOREIGN)
def test_a_library_has_its_own_rooms(library):
    users = {
        room(name)
        for name, imports in IMPORTS.items()
        for found in imports
        if found.module.partition(".")[0] == library
    }
    assert users == FOREIGN[library]


def test_timm_and_torchvision_are_imported_when_they_are_used_only():
    eager = {
        (name, found.module)
        for name, imports in IMPORTS.items()
        for found in imports
        if found.module.partition(".")[0] in ("timm", "torchvision") and not found.deferred
    }
    assert eager == set()


@pytest.mark.parametrize("name", [name for name in ORDER if (PACKAGE / name).is_dir()])
def test_a_room_says_what_it_promises(name):
    assert (importlib.import_module(f"dcls_convert.{name}").__doc__ or "").strip()


# What others may change.

# Names with an underscore that belong to a dependency, each with what it is for, and what is lost without it. None is
# called by its name alone, so that a newer release without it is no AttributeError.
PRIVATE = {
    ("layers.conv_classes", "_conv_forward"): "what subclasses override; without it, there is nothing to override",
    ("depthwise.eager", "_are_functorch_transforms_active"): "without it, the plain forms are taken",
    ("depthwise.eager", "_len_torch_dispatch_stack"): "without it, no way is timed at first sight",
    ("networks.positions", "_orig_mod"): "of torch.compile; without it, a compiled model is not looked into",
    ("networks.positions", "_fsdp_wrapped_module"): "of FSDP1; likewise",
    ("layers.ties", "_apply"): "overridden, as in torch's RNNs; without it, tied positions refuse channels_last",
    ("layers.ties", "_is_replica"): "of nn.DataParallel; without it, positions stay on the first device",
    ("networks.sites", "_model_args"): "of timm; without it, the input has the config's channels",
    ("networks.source", "_model_args"): "of timm; without it, a model's source is not known",
    ("networks.tracing", "_forward_hooks"): "a copy without the user's hooks; without it, they see the trace",
    ("surgery.fold", "_model_args"): "as `place` sets it",
    ("surgery.place", "_model_args"): "what timm's own savers read",
}
DOCUMENTED = {("compare.workers", "_exit"), ("output", "_thread")}


def private_names(path):
    """Names with one leading underscore that a module imports, reads from objects or has as text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (part for module in modules for part in module.split("."))


def own_names(path):
    """Names that a module of the package defines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_private_names_of_others_are_few_and_have_a_reason():
    private = re.compile(r"_[a-z]\w*")
    paths = sorted(PACKAGE.rglob("*.py"))
    own = {name for path in paths for name in own_names(path)} - {name for _, name in PRIVATE}
    found = {
        (_module_of(path), name)
        for path in paths
        for name in private_names(path)
        if private.fullmatch(name) and name not in own
    }
    assert found == {*PRIVATE, *DOCUMENTED}


# What a start costs.


def imported_by(*arguments):
    """The exit code, and every module that Python imported on the way."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done, set(re.findall(r"^import time:.*\|\s+(\S+)$", done.stderr, flags=re.MULTILINE))


FOLDERS = ("inspect nowhere", "fold nowhere", "verify nowhere", "diff tests nowhere", "resnet18 --plan nowhere")


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--help"], 0, "Usage"),
        (["--version"], 0, f"dcls-convert {dcls_convert.__version__}"),
        (["convert", "--help"], 0, "--dilated-size"),
        (["models", "--help"], 0, "--timeout"),
        (["models", "--json", "--csv"], 2, "--json and --csv exclude each other"),
        (["models", "--jobs", "0"], 2, "--jobs"),
        (["verify", "--help"], 0, "--json"),
        (["rules", "--help"], 0, "schema"),
        (["inspect", "a", "b"], 2, "unexpected extra argument"),
        (["inspect", "folder", "--picture", "x.gif"], 2, "must end in .png, .svg, .pdf"),
        (
            ["inspect", "folder", "--html", "x.html", "--images", "nowhere"],
            2,
            "images nowhere: there is no such folder",
        ),
        (["inspect", "folder", "--html", "x.html", "--history", "nowhere"], 2, "nowhere: there is no such file"),
        (["fold", "--help"], 0, "--format"),
        (["fold", "folder", "--format", "tflite"], 2, "tflite"),
        (["sweep", "--help"], 0, "--sizes"),
        (["sweep", "resnet18", "--sizes", "23..7"], 2, "give 7..23"),
        (["sweep", "resnet18", "--sizes", "7", "--picture", "a.gif"], 2, "must end in .png"),
        (["resnet18", "--dilated-sise", "7"], 2, "--dilated-sise"),
        (["resnet18", "--scope", "globe"], 2, "globe"),
        (["resnet18", "--init", "fit"], 2, "--init fit"),
        *((command.split(), 2, "nowhere: is not a folder") for command in FOLDERS),
        (["resnet18", "--output", "."], 2, "name a new folder"),
        (["resnet18", "--output", "/tmp"], 2, "output /tmp already exists"),
        (["resnet18", "--checkpoint", "nowhere"], 2, "nowhere: there is no such file"),
        (["resnet18", "--pretrained", "--calibrate", "nowhere"], 2, "nowhere: there is no such folder"),
    ],
)
def test_the_command_line_answers_without_torch(arguments, code, printed):
    done, modules = imported_by("-m", "dcls_convert", *arguments)
    assert "dcls_convert.cli.app" in modules
    slow = {"numpy", "pydantic", "yaml"} if arguments[1:] == ["--help"] or arguments == ["--version"] else set()
    files = set() if "--output" in arguments else {"safetensors"}  # whose errors the writer of outputs knows
    assert modules & {"torch", "timm", "torchvision", *files, *slow} == set()
    assert done.returncode == code
    assert printed in (done.stdout if code == 0 else done.stderr)


def test_a_missing_torch_is_one_line_that_says_what_to_install():
    program = "import sys; sys.modules['torch'] = None; from dcls_convert.cli.app import main; main(['resnet18'])"
    done, _ = imported_by("-c", program)
    assert done.returncode == 2
    assert done.stderr.endswith("\nerror: torch is not installed: pip install torch torchvision timm\n")
    assert "Traceback" not in done.stderr


def test_importing_the_light_modules_imports_no_torch():
    check = f"import sys, {', '.join(LIGHT)}; sys.exit('torch' in sys.modules)"
    done, modules = imported_by("-c", check)
    assert done.returncode == 0
    assert set(LIGHT) <= modules


def test_the_console_script_is_the_command_line():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="dcls-convert")
    assert script.load() is app.main


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


def test_a_function_that_takes_planning_options_shows_them_all():
    planning = {field.name: field.default for field in fields(options.PlanOptions)}
    for name in ("convert_", "convert_from_authors_", "plan_conversion"):
        shown = inspect.signature(getattr(dcls_convert, name)).parameters
        assert {key: shown[key].default for key in planning} == planning


def test_options_name_all_interpolations():
    assert options.INTERPOLATIONS == tuple(interpolation.INTERPOLATIONS)
