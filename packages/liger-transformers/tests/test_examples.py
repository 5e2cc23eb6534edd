"""Hugging Face examples run on a tiny model, and their two runs learn the same."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.parametrize(
    "words",
    [
        ["sft"],
        ["sft", "--trl"],
        ["dpo"],
        ["dpo", "--lora"],
        ["grpo"],
        ["grpo", "--lora"],
        ["lora_long", "--tiny", "--length", "64"],
    ],
    ids=" ".join,
)
def test_an_example_trains_both_ways(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    name, *options = words
    plain, liger = importlib.import_module(name).main([*options, "--steps", "4", "--output", "picture.png"])
    assert (plain.name, liger.name, len(plain.losses)) == ("plain", "liger", 4)
    assert liger.losses == pytest.approx(plain.losses, rel=1e-3, abs=1e-4)
    assert plain.tokens_per_s > 0
    assert "rms_norm" in capsys.readouterr().out
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_fsdp2_trains_both_ways(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "fsdp2.py"), "--steps", "4", "--output", str(tmp_path / "picture.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, liger = (line.rpartition(" ")[2] for line in done.stdout.splitlines() if "tokens/s" in line)
    assert float(plain) == pytest.approx(float(liger), rel=1e-3)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
