"""Shell completion of model names and rule sets."""

from ..input import builtin_rules


def complete_models(incomplete: str) -> list[str]:
    """Complete a model's name, with or without its registry ("timm:").

    This imports both registries, which takes seconds.
    """
    from ..networks.registries import registry_names

    names = registry_names()
    if ":" not in incomplete:
        names = [name.partition(":")[2] for name in names]
    # A dict drops names that both registries have, and keeps the order.
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def complete_rules(incomplete: str) -> list[str]:
    """Complete the name of a built-in rule set; without a match, shells complete files."""
    return [name for name in ("auto", *builtin_rules()) if name.startswith(incomplete)]
