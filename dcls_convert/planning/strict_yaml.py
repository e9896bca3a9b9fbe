"""YAML from strangers: what would be wrong in silence is an error, and size, depth and aliases are bounded first."""

from collections.abc import Hashable
from typing import Any

import yaml

from ..errors import shown

MOST_CHARACTERS = 100_000  # of a text
MOST_DEPTH = 20  # mappings and lists inside each other
MOST_NODES = 10_000  # with aliases written out
MOST_DIGITS = 18  # of an integer; Python refuses to print those of more than 4300


def load_yaml(text: str) -> Any:
    """The plain values of a YAML text.

    Raises:
        yaml.YAMLError, or whatever else PyYAML's constructors raise: Not valid, or beyond the bounds.
    """
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"{len(text):,} characters; {MOST_CHARACTERS:,} are the most")
    _check_bounds(text)
    return yaml.load(text, Loader=_StrictLoader)


def _check_bounds(text: str) -> None:
    """Count nodes and depth as the parser meets them, before anything is built: aliases can grow without end."""
    sizes: dict[str, int] = {}  # anchor -> nodes below it, aliases written out
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and the nodes before it
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, nodes))
        if isinstance(event, yaml.AliasEvent):
            nodes += sizes.get(str(event.anchor), 0)  # one that holds itself is not closed yet
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
        if isinstance(event, yaml.ScalarEvent) and event.anchor is not None:
            sizes[event.anchor] = 1
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
        if len(open_nodes) > MOST_DEPTH:
            raise _at(event.start_mark, f"more than {MOST_DEPTH} mappings and lists inside each other")
        if nodes > MOST_NODES:
            raise _at(event.start_mark, f"more than {MOST_NODES:,} values, with aliases written out")


class _StrictLoader(yaml.SafeLoader):
    """YAML without what would be wrong in silence, or could not be written again."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Of two equal keys, YAML lets the last one win; here this is an error."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise _at(key_node.start_mark, f"key {shown(key_node.value)!r} stands twice")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_scalar(node)
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
            raise _at(node.start_mark, f"an integer of {len(node.value)} digits; {MOST_DIGITS} are the most")
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise _at(node.start_mark, f"{shown(node.value)!r} has half a surrogate pair, which is no character")
        return super().construct_scalar(node)


def _at(mark: Any, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
