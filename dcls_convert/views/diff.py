"""How differences between two plans read: a line each."""

import json
from typing import Any

from ..errors import shown
from ..planning.plan import Difference
from ..tables import counted


def difference_line(difference: Difference) -> str:
    """ "dilated_size: 9x9 → 11x11 in 9 layers: stages.0.blocks.0.conv_dw (8 more like it)"."""
    what, names = difference.what, difference.layers
    where = shown(names[0]) + (f" ({len(names) - 1:,} more like it)" if len(names) > 1 else "") if names else ""
    if what == "layers":
        return f"{counted(len(names), 'layer')} only in the {'first' if difference.one else 'second'}: {where}"
    changed = "differ" if what == "rules_text" else f"{_text(difference.one)} → {_text(difference.other)}"
    return f"{what}: {changed}" + (f" in {counted(len(names), 'layer')}: {where}" if names else "")


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(side, int) for side in value):
        return "x".join(map(str, value))
    return shown(value if isinstance(value, str) else json.dumps(value), 60)
