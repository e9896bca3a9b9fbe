"""Shells complete names of models and rule sets, and checkpoint folders."""

import pytest

from ..command_line import imported_by, run

# Variables that the script of `--show-completion` sets in each shell for the typed text.
SHELLS = {
    "bash": lambda typed: {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)},
    "zsh": lambda typed: {"_TYPER_COMPLETE_ARGS": typed},
    "fish": lambda typed: {
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
}


def typed_in(monkeypatch, shell, typed):
    """Set the environment of a program that a shell asks what to complete."""
    monkeypatch.setenv("_DCLS_CONVERT_COMPLETE", f"complete_{shell}")
    for name, value in SHELLS[shell](typed).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_at_once_and_the_model_of_the_default_command(
    monkeypatch, shell
):
    typed_in(monkeypatch, shell, "dcls-convert con")
    done, modules = imported_by("-m", "dcls_convert")
    assert modules & {"torch", "timm", "torchvision", "numpy", "yaml"} == set()
    assert done.returncode == 0
    assert "convert" in done.stdout
    typed_in(monkeypatch, shell, "dcls-convert convnext_ti")
    out, _ = run()
    assert "convnext_tiny" in out
    assert "convnext_base" not in out


@pytest.mark.parametrize(
    ("typed", "words"),
    {
        "m": {"models"},
        "mo": {"models"},
        "mob": {"mobilenetv3_small_050", "mobilenet_v2"},
        "--ver": {"--version", "--verbose"},
        "timm:convnext_ti": {"timm:convnext_tiny"},
        "--dilated": {"--dilated-size"},
        "convnext_tiny --rules dep": {"depthwise"},
        "inspect mo": set(),  # files, which shells complete themselves
        "rules check c": {"conv3x3"},
        "rules check depthwise --model torchvision:vgg11_": {"torchvision:vgg11_bn"},
    }.items(),
)
def test_what_is_completed_where(monkeypatch, typed, words):
    typed_in(monkeypatch, "bash", f"dcls-convert {typed}")
    completions = run()[0].split()
    assert words <= set(completions)
    last = typed.split()[-1]
    assert all(word.startswith(last) for word in completions)
    assert len(set(completions)) == len(completions)
    assert words or not completions


def test_the_script_is_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done, _ = imported_by("-m", "dcls_convert", "--install-completion", "bash")
    assert done.returncode == 0
    script = (tmp_path / ".bash_completions" / "dcls-convert.sh").read_text()
    assert "_DCLS_CONVERT_COMPLETE=complete_bash" in script
