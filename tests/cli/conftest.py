import sys

import pytest


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Unset variables that change the output, write no bytecode; unload `mymodel` at the end."""
    monkeypatch.chdir(tmp_path)
    for variable in (
        "FORCE_COLOR",
        "CLICOLOR_FORCE",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "DCLS_CONVERT_TRACEBACK",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("mymodel", None)
