"""Do not import a slow test file if slow tests are deselected."""


def pytest_ignore_collect(collection_path, config):
    """Ignore a file that would spend seconds importing torch's test tools, to run no tests."""
    is_slow_to_import = collection_path.name == "test_torch_modules.py"
    skips_slow_tests = config.option.markexpr.startswith("not (slow")
    return True if is_slow_to_import and skips_slow_tests else None
