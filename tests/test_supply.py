"""What the package takes from others: the bill of materials, licences, and that each is used."""

import importlib
import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from .test_house import IMPORTS

ROOT = Path(__file__).parent.parent


@pytest.fixture
def supply(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("supply")


def distributions(modules):
    """Installed packages, less this one, to which modules belong by their names."""
    known = metadata.packages_distributions()
    of = {canonicalize_name(name) for module in modules for name in known.get(module.partition(".")[0], ())}
    return of - {"dcls-convert"}


def test_the_bill_of_materials_is_that_of_pyproject(supply):
    text = supply.SBOM.read_text(encoding="utf-8")
    assert text == supply.sbom_text(), "run python docs/supply.py"
    assert re.findall(r"https?:|file:|[\w-]+\.(?:org|com|io|net)\b|\"/|~/|\\\\", text) == [], "names a host or a path"
    components = json.loads(text)["components"]
    required = [c["purl"].removeprefix("pkg:pypi/") for c in components if c["scope"] == "required"]
    assert required == sorted(canonicalize_name(each.name) for each in supply.requirements())
    bounds = re.findall(r'^  "([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    ranges = {(component["name"], component["versionRange"]) for component in components}
    assert len(bounds) > len(required)
    assert ranges <= {(name, f"vers:pypi/>={bound}") for name, bound in bounds}


def test_every_dependency_is_on_the_page_with_its_licence(supply):
    page = supply.LICENCES.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.+?) \|", page, re.MULTILINE))
    installed = supply.closure([*supply.requirements(), *supply.requirements(*supply.EXTRAS)])
    named = {name for name in installed if not supply.GPU.search(name)}
    assert named - rows.keys() == set(), "run python docs/supply.py"
    for name in named:
        found, stated = supply.families(supply.licence(name)), supply.families(rows[name])
        assert found, f"{name} states no licence that is known here"
        assert found <= stated, name  # releases differ in how much they tell of code that they hold
    for name in installed.keys() - named:
        assert supply.families(supply.licence(name)) <= {"NVIDIA", "Apache", "MIT"} or name == "cuda-toolkit"
    assert "GPL" not in supply.families(" ".join(rows.values()))
    assert [name for name, text in rows.items() if "LGPL" in supply.families(text)] == ["pebble"]  # imported, unchanged


def test_every_dependency_is_imported_and_every_import_is_declared(supply):
    imported = distributions(name for imports in IMPORTS.values() for name, own, _ in imports if not own)
    required = {canonicalize_name(each.name) for each in supply.requirements()}
    optional = {canonicalize_name(each.name) for each in supply.requirements(*supply.EXTRAS)}
    assert required - imported == set()
    assert imported - required - optional <= {"pydantic-core"}  # which pydantic cannot be without
