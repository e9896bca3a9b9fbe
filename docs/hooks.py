"""What MkDocs runs while it builds the site.

Pages from beside docs/, and references made from the package.

A line `<!-- made: NAME -->` in a page becomes what REFERENCES[NAME] returns, in Markdown.
"""

import importlib
import json
import os
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Files, and folders of files, that are in the site too, since pages link to them.
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "benchmarks", "examples")
SHOWN = (".md", ".py", ".slurm", ".yaml")
FIRST = "convert_"  # function of the reference
# How mkdocstrings writes a constant of the package that is a default or a type.
CONSTANT = re.compile(r'<span title="(dcls_convert[.\w]*)\.(\w+)">\2</span>')
MODULES = ("__version__", "depthwise", "tuning")  # public, but no functions or classes


REPOSITORY = "REPOSITORY_URL"  # variable of the environment; without it, no page has an edit link
EDIT = "/edit/main/"  # behind the repository's address; the folder and the file follow


def on_config(config: Any) -> Any:
    """Say the version on every page, and link to the repository if its address is known.

    Not by `repo_url`: Material would ask the repository's host for the number of stars.
    """
    from dcls_convert import __version__

    config.copyright = f"dcls-convert {__version__}, MIT licence"
    repository = os.environ.get(REPOSITORY)
    if repository:
        config.copyright += f', <a href="{repository}">source</a>'
        config.edit_uri = f"{repository}{EDIT}docs/"
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Pictures of the terminal lead to themselves: on a narrow screen they are small."""
    return re.sub(
        r'<p>(<img [^>]*src="([^"]+\.svg)"[^>]*>)</p>', r'<p><a href="\2">\1</a></p>', html
    )


def on_post_page(output: str, **_: Any) -> str:
    """Signatures show values, such as "auto", in place of the constants' names."""
    for name, value in _constants(output).items():
        output = output.replace(f">{name}</span>", f">{escape(value, quote=False)}</span>")
    return output


def _constants(page: str) -> dict[str, str]:
    """Return the values of the package's constants and Literals that the page names."""
    values = {}
    for module, name in CONSTANT.findall(page):
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, str | int | float):
            values[name] = json.dumps(value)
        elif get_origin(value) is Literal:
            values[name] = f"Literal{json.dumps(get_args(value))}"
    return values


def on_files(files: Any, config: Any) -> Any:
    for place in BESIDE:
        for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if path.suffix in SHOWN:
                name = path.relative_to(ROOT).as_posix()
                files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_path.startswith(BESIDE):  # in the site, docs/ is the folder around these
        if page.edit_url:
            page.edit_url = page.edit_url.replace(f"{EDIT}docs/", EDIT)
        markdown = re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    else:
        markdown = re.sub(rf"\]\(\.\./({'|'.join(BESIDE)})", r"](\1", markdown)
    return re.sub(
        r"^<!-- made: (\w+) -->$", lambda line: REFERENCES[line[1]](), markdown, flags=re.MULTILINE
    )


def install() -> str:
    """How to install the package, as README says."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, text = readme.split("<!-- install: ")
    return text.partition("-->")[2].partition("<!-- end of install -->")[0]


def command_line() -> str:
    """Every command with all its arguments and options, from the program itself."""
    import typer

    with mock.patch(
        "sys.argv", ["dcls-convert", "--help"]
    ):  # only then has the program the options for completion
        from dcls_convert.cli.app import EXIT_CODES, app

    return "\n".join([*_commands(typer.main.get_command(app), "dcls-convert"), EXIT_CODES])


def _commands(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    context = command.context_class(
        command, info_name=name, parent=parent, **command.context_settings
    )
    usage = f"```text\n{command.get_usage(context)}\n```"
    yield f"## {context.command_path}\n\n{_plain(command.help)}\n\n{usage}\n"
    panels: dict[str, list[list[str]]] = {}
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            name, text = record
            short = [
                option
                for option in parameter.opts
                if option.startswith("-") and option not in re.split("[ ,]+", name)
            ]
            row = [f"`{', '.join([*short, name])}`", _plain(text)]
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(row)
    for panel, rows in panels.items():
        yield _table([panel, ""], rows)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, name, context)


def rules() -> str:
    """Every key of a rule file, from the schema that `dcls-convert rules schema` prints."""
    from dcls_convert.planning.rule_files import rules_schema

    schema = rules_schema()
    parts = {
        "The file": schema,
        **{f"`{name}`": schema["$defs"][name] for name in ("Rule", "Match")},
    }
    parts |= {
        f"`{name}`": part for name, part in schema["$defs"].items() if name not in ("Rule", "Match")
    }
    made = []
    for title, part in parts.items():
        rows = [
            [f"`{key}`", _plain(about.get("description", ""))]
            for key, about in part["properties"].items()
        ]
        made += [
            f"### {title}\n",
            _plain(part["description"]) + "\n",
            _table(["key", "value"], rows),
        ]
    return "\n".join(made)


def python_names() -> str:
    """A heading for every public name, for mkdocstrings to fill from where the name is defined."""
    import dcls_convert

    public = [getattr(dcls_convert, name) for name in dcls_convert.__all__ if name not in MODULES]
    errors = [thing for thing in public if isinstance(thing, type) and issubclass(thing, Exception)]
    classes = [thing for thing in public if isinstance(thing, type) and thing not in errors]
    functions = sorted(
        (thing for thing in public if not isinstance(thing, type)),
        key=lambda one: one.__name__ != FIRST,
    )
    tuning = [getattr(dcls_convert.tuning, name) for name in dcls_convert.tuning.__all__]
    parts = {
        "Functions": functions,
        "Classes": classes,
        "dcls_convert.tuning": tuning,
        "Errors": errors,
    }
    return "\n".join(
        f"## {title}\n\n"
        + "\n".join(f"::: {thing.__module__}.{thing.__name__}\n" for thing in things)
        for title, things in parts.items()
    )


def _plain(text: str) -> str:
    """A text for terminals as Markdown: nothing in it is a tag or a table's border."""
    return (
        (text or "")
        .replace("<", "&lt;")
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("_", "\\_")
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [
        header,
        ["---"] * len(header),
        *([cell.replace("\n", " ") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


REFERENCES = {
    "install": install,
    "command_line": command_line,
    "rules": rules,
    "python_names": python_names,
}
