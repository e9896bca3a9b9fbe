"""Names that other programs add to the modules of a network, and what removes them."""

import re
from collections.abc import Collection

# Two names that come together, and what removes them. The group is the name of a parameter.
REMEDIES = (
    (r"(\w+)_mask", "{}_orig", "torch.nn.utils.prune.remove(module, '{}')"),
    (r"(\w+)_u", "{}_orig", "torch.nn.utils.remove_spectral_norm(module, '{}')"),
    (r"(\w+)_g", "{}_v", "torch.nn.utils.remove_weight_norm(module, '{}')"),
    (
        r"parametrizations\.(\w+)\.original(?:0|)",
        "parametrizations.{}.original",
        "torch.nn.utils.parametrize.remove_parametrizations(module, '{}')",
    ),
    (r"(total)_ops", "{}_params", "del module.total_ops, module.total_params"),
)


def describe_added_names(names: Collection[str]) -> str | None:
    """Say what removes the first of these names that are known; None if there are none.

    Args:
        names: Of tensors that a network should not have, with or without their modules.
    """
    for pattern, other, remedy in REMEDIES:
        for name in names:
            match = re.fullmatch(rf"(?P<module>|.*\.){pattern}", name)
            if match is None:
                continue
            module = match["module"]
            parameter = match[2]
            if any(one.startswith(module + other.format(parameter)) for one in names):
                return (
                    f"run {remedy.format(parameter)} for each module that has "
                    f"{name.removeprefix(module)}, then save"
                )
    return None
