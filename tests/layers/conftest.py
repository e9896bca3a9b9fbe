"""Leaves a test file unimported where slow tests are deselected."""


def pytest_ignore_collect(collection_path, config):
    """The plain run would import torch's test tools, in seconds, and then deselect the tests."""
    imports_much = collection_path.name == "test_torch_modules.py"
    return True if imports_much and config.option.markexpr.startswith("not (slow") else None
