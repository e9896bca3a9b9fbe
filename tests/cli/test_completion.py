"""Shells complete names of models and rule sets, and checkpoint folders."""

import pytest

from ..command_line import imported_by, run


def typed_in(monkeypatch, typed):
    """Set the environment in which bash asks a program what to complete."""
    monkeypatch.setenv("_DCLS_CONVERT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))


def test_a_shell_completes_commands_at_once(monkeypatch):
    typed_in(monkeypatch, "dcls-convert con")
    done, modules = imported_by("-m", "dcls_convert")
    assert modules & {"torch", "timm", "torchvision", "numpy", "yaml"} == set()
    assert done.returncode == 0
    assert "convert" in done.stdout


@pytest.mark.parametrize(
    ("typed", "words"),
    {
        "mob": {"mobilenetv3_small_050", "mobilenet_v2"},
        "--ver": {"--version", "--verbose"},
        "convnext_tiny --rules dep": {"depthwise"},
        "inspect mo": set(),  # files, which shells complete themselves
        "sweep torchvision:vgg11_": {"torchvision:vgg11_bn"},
    }.items(),
)
def test_what_is_completed_where(monkeypatch, typed, words):
    typed_in(monkeypatch, f"dcls-convert {typed}")
    completions = run()[0].split()
    assert words <= set(completions)
    assert all(word.startswith(typed.split()[-1]) for word in completions)
    assert words or not completions
