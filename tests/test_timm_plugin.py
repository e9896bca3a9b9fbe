"""timm knows our entry in every order of imports. Each order runs in a process of its own."""

import subprocess
import sys

import pytest

ORDERS = {
    "ours first": "import dcls_convert, timm",
    "timm first": "import timm, dcls_convert",
}
CHECK = "assert timm.list_models('dcls*') == ['dcls_convert']"


@pytest.mark.processes
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_imports_registers_our_entry(order):
    subprocess.run([sys.executable, "-c", f"{ORDERS[order]}\n{CHECK}"], check=True, timeout=120)
