"""The command, and the program in the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from liger_transformers import cli

README = Path(__file__).parent.parent / "README.md"


def test_model_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["olmo2"]) == 0
    shown = capsys.readouterr().out
    assert shown in README.read_text(encoding="utf-8")


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["llama", "--mlp", "--lean"]) == 0
    shown = capsys.readouterr().out
    assert "32 × gated_mlp(in checkpointing, activation='silu')" in shown
    assert "32 × lean" in shown


def test_unknown_model_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["olm2"]) == 2
    assert "transformers has no model type 'olm2'; close to it: " in capsys.readouterr().err


def test_a_name_on_a_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["acme/llama-9b"]) == 2
    assert "It takes a `model_type`, such as llama, or a directory that holds a config.json" in capsys.readouterr().err


def test_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "num_hidden_layers": 3}')
    assert cli.main([str(tmp_path)]) == 0
    assert "3 × geglu" in capsys.readouterr().out


def test_a_configuration_that_builds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 7}')
    assert cli.main([str(tmp_path)]) == 2
    assert f"transformers can't build a model of {str(tmp_path)!r}: ValueError: " in capsys.readouterr().err


def test_readme_trains(tmp_path: Path) -> None:
    """Its program, on real text, with a loss that falls; the next block runs after it."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    program = "\n".join(blocks) + "\nprint([entry['loss'] for entry in trainer.state.log_history if 'loss' in entry])"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in done.stdout.splitlines()[-1].strip("[]").split(", ")]
    assert losses[-1] < losses[0] - 0.5
    assert "fused_linear_cross_entropy" in done.stdout
