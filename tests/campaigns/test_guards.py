"""The guards that `broken_guards.py` breaks are still in the package, under the texts that it knows."""

import pytest

from .broken_guards import GUARDS, ROOT, broken


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_each_guard_stands_once(guard):
    assert guard.breaks
    folder = ROOT / "tests" / "campaigns"
    tests = "".join(path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    assert (folder / f"test_{guard.campaign}.py").is_file() or f"def test_{guard.campaign}(" in tests
    for name, text, instead in guard.breaks:
        content = (ROOT / "dcls_convert" / name).read_text(encoding="utf-8")
        assert content.count(text) == 1, f"{name}: {text!r} stands there {content.count(text)} times"
        assert instead not in (text, content)


def test_guards_have_names_of_their_own():
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)


def test_a_broken_copy_differs_in_the_guard_alone(tmp_path):
    broken(GUARDS[0], tmp_path / "copy")
    name, text, _ = GUARDS[0].breaks[0]
    there, here = (folder / "dcls_convert" / name for folder in (tmp_path / "copy", ROOT))
    assert there.read_text(encoding="utf-8").count(text) == 0
    changed = zip(there.read_text().splitlines(), here.read_text().splitlines(), strict=True)
    assert sum(one != other for one, other in changed) == 1
