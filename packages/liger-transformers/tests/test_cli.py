"""The command, and the program in the README."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import liger_core as liger
from liger_transformers import cli, compare

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


def test_compare_trains_both_ways(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both start with the same weights and tokens, so both have the same loss."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 32, **sizes}))
    picture = tmp_path / "picture.svg"
    words = ["compare", str(tmp_path), "--layers", "1", "--batch", "2", "--length", "16", "--steps", "1"]
    assert cli.main([*words, "--picture", str(picture)]) == 0
    out, err = capfd.readouterr()
    plain, swapped = (line.split() for line in out.splitlines() if line.startswith(("plain", "liger")))
    assert (plain[0], swapped[0]) == ("plain", "liger")
    assert float(plain[1]) > 0
    assert plain[4] == swapped[4]
    assert "1 × lean" in err
    assert ("On a CPU no kernel runs" in out) == (liger.infer_device() == "cpu")
    bars = [text.text for text in ElementTree.fromstring(picture.read_text()).iter() if text.tag.endswith("text")]
    assert [bars[0], *bars[1::2]] == [str(tmp_path), "plain", "liger", "plain", "liger"]
    assert [label.split(" ", 1)[1] for label in bars[2::2] if label] == 2 * ["ms a step"] + 2 * ["GB at most"]


def test_compare_of_a_way_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = [
        subprocess.CompletedProcess([], 1, ""),
        subprocess.CompletedProcess([], 0, '["liger", 1.0, 2.0, 3.0, 4.0]'),
    ]
    monkeypatch.setattr(compare.subprocess, "run", lambda *_, **__: done.pop(0))
    assert cli.main(["compare", "llama"]) == 1
    out, err = capsys.readouterr()
    assert "plain: failed, as it says above" in err
    assert "3.00" in out
    assert "plain" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [(["olm2"], "no model type 'olm2'; close to it"), (["vit"], "'vit' is no causal language model")],
)
def test_compare_of_what_it_does_not_take(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_compare_of_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["compare", "llama", "--steps", "0"])
    assert "0 is less than 1" in capsys.readouterr().err


def test_readme_trains(tmp_path: Path) -> None:
    """Its program, on real text, with a loss that falls; the next block runs after it."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    program = "\n".join(blocks) + "\nprint([entry['loss'] for entry in trainer.state.log_history if 'loss' in entry])"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in done.stdout.splitlines()[-1].strip("[]").split(", ")]
    assert losses[-1] < losses[0] - 0.5
    assert "fused_linear_cross_entropy" in done.stdout
