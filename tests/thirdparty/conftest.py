"""Other libraries reach no network and write nothing outside the tests' own folders."""

import pytest


@pytest.fixture(scope="package", autouse=True)
def _libraries_at_rest(tmp_path_factory):
    """Sets variables that the libraries read when they are imported, which tests do later."""
    folder = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("YOLO_CONFIG_DIR", "HF_HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME"):
            patch.setenv(variable, str(folder))
        patch.setenv("YOLO_OFFLINE", "true")
        patch.setenv("YOLO_VERBOSE", "false")
        yield
