"""Write what the wheel needs of others: python docs/supply.py

`docs/sbom/dcls-convert.cdx.json` is the bill of materials that the wheel carries (CycloneDX 1.7, PEP 770), and
`docs/licences.md` lists the licences of all dependencies, as this environment's packages state them.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SBOM = ROOT / "docs" / "sbom" / "dcls-convert.cdx.json"
LICENCES = ROOT / "docs" / "licences.md"
EXTRAS = ("export", "plot", "train")  # of users; the others are for work on this package
GPU = re.compile(r"^(nvidia|cuda)-|^triton$")  # what torch brings on some platforms, for GPUs
# What classifiers and free texts say, as SPDX writes it.
WORDS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "MIT License": "MIT",
    "ISC License (ISCL)": "ISC",
    "3-Clause BSD License": "BSD-3-Clause",
    "GNU Library or Lesser General Public License (LGPL)": "LGPL",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
FAMILY = re.compile(r"Apache|BSD|BSL|CC0|ISC|LGPL|AGPL|GPL|HPND|MIT|MPL|NVIDIA|PSF|Unlicense|Zlib")
INTRODUCTION = """# Licences

dcls-convert is MIT. Its wheel holds no code of others; `pip` installs these beside it, whose licences are as their own
metadata state them. `python docs/supply.py` writes this page. Of each package the name counts, not the version.
"""
FOR_GPUS = """
On Linux, torch also brings libraries for NVIDIA's GPUs (`nvidia-*`, of NVIDIA's own licence; `cuda-*`, Apache-2.0) and
`triton` (MIT). torch's builds for CPUs come without them.
"""


def requirements(*extras: str) -> list[Requirement]:
    """Direct dependencies, of extras or of all users."""
    optional = PROJECT["optional-dependencies"]
    texts = [text for extra in extras for text in optional[extra]] if extras else PROJECT["dependencies"]
    return [Requirement(text) for text in texts]


def closure(direct: Iterable[Requirement]) -> dict[str, set[str]]:
    """Name of every installed package that is needed -> names of those that need it; "" for us."""
    found: dict[str, set[str]] = {}
    todo = [("", requirement) for requirement in direct]
    seen = set()
    while todo:
        user, requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, key := frozenset(requirement.extras)) in seen:
            found[name].add(user)
            continue
        seen.add((name, key))
        found.setdefault(name, set()).add(user)
        todo += [(name, needed) for needed in _needed(name, requirement.extras)]
    return {name: users for name, users in found.items() if _installed(name)}


def _needed(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for text in (metadata.requires(name) or ()) if _installed(name) else ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield needed


def _installed(name: str) -> bool:
    return next(iter(metadata.distributions(name=name)), None) is not None


def licence(name: str) -> str:
    """What an installed package says of its licence, as SPDX writes it; its file of licences where it says nothing."""
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return expression
    classifiers = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if text.startswith("License")]
    stated = (about.get("License") or "").strip()
    said = [stated] if stated and "\n" not in stated and len(stated) < 60 else classifiers
    return " AND ".join(WORDS.get(text, text) for text in classifiers or said) or "not stated"


def families(text: str) -> set[str]:
    """The families of licences that a text names: those of BSD are one."""
    return set(FAMILY.findall(text))


def licences() -> str:
    """The page of licences."""
    parts, known = [INTRODUCTION], set[str]()
    for extra in ("", *EXTRAS):
        found = closure(requirements(*filter(None, [extra])))
        rows = [
            f"| {name} | {licence(name)} | {', '.join(sorted(user or '**dcls-convert**' for user in users))} |"
            for name, users in sorted(found.items())
            if not GPU.search(name) and name not in known
        ]
        known |= found.keys()
        title = f"## Extra `{extra}`" if extra else "## Needed by all"
        parts.append("\n".join([title, "", "| package | licence | needed by |", "| --- | --- | --- |", *rows]) + "\n")
        parts += [FOR_GPUS.lstrip()] * (not extra)
    return "\n".join(parts)


def sbom() -> dict[str, Any]:
    """The wheel's bill of materials: the package and its direct dependencies, by the ranges that it states."""
    text = (ROOT / "dcls_convert" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    name = PROJECT["name"]
    needed = {canonicalize_name(each.name): (each, "required") for each in requirements()}
    optional = {canonicalize_name(each.name): (each, "optional") for each in requirements(*EXTRAS)}
    components = [_component(*value) for _, value in sorted((optional | needed).items())]
    own = {"type": "library", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name, "version": version}
    own |= {"description": PROJECT["description"], "licenses": [{"license": {"id": PROJECT["license"]}}]}
    own |= {"purl": own["bom-ref"]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _component(requirement: Requirement, scope: str) -> dict[str, Any]:
    """A package that pip chooses, so it has a range of versions and no hash."""
    purl = f"pkg:pypi/{canonicalize_name(requirement.name)}"
    bounds = "|".join(sorted(str(bound).replace(" ", "") for bound in requirement.specifier))
    return {
        "type": "library",
        "bom-ref": purl,
        "name": requirement.name,
        "scope": scope,
        "purl": purl,
        "isExternal": True,
        "versionRange": f"vers:pypi/{bounds or '*'}",
    }


def sbom_text() -> str:
    return json.dumps(sbom(), indent=1) + "\n"


def main() -> None:
    SBOM.parent.mkdir(exist_ok=True)
    SBOM.write_text(sbom_text(), encoding="utf-8")
    LICENCES.write_text(licences(), encoding="utf-8")


if __name__ == "__main__":
    main()
