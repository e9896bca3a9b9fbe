"""Rule sets for tests."""

from dcls_convert.planning.rule_files import load_rules

LARGER_THAN_1 = {"match": {"kernel_size": {"min": 2}}}  # kernels with a side of at least 2


def rules_of(*rules, **top):
    """Return the rule set of a file with these rules, and other keys at its top level."""
    return load_rules({"format": 1, **top, "rules": list(rules)})
