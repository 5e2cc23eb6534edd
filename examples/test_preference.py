"""The example of preferences runs, and tells when a loss is broken."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import preference
import pytest
import torch
import train_lm
from torch import Tensor

SMALL = replace(train_lm.PRESETS["tiny"], hidden=32, layers=1, feed_forward=64, context=8, batch=8)
DATA = train_lm.tokenise(Path(preference.__file__).read_bytes(), SMALL)
CPU = torch.device("cpu")


def test_the_script_trains_draws_and_agrees(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    command = [sys.executable, preference.__file__, "--steps", "2", "--context", "8", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--output", str(picture)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Both ways agree" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_language_that_cannot_run_ends_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert preference.main(["--device", "cpu", "--language", "no-such-language"]) == 2
    assert "no-such-language" in capsys.readouterr().err


def disagreements(task: str, way: preference.Way, mixed: bool = False, steps: int = 2) -> list[str]:
    size = replace(SMALL, mixed=mixed)
    both = preference.learners(size, CPU, 0, (way, preference.Plain))
    if task == "DPO":
        return preference.compare(task, both, preference.preferences(DATA, size, steps, 0), steps, 1)
    return preference.compare(task, both, preference.rewarded(both, DATA, steps, 0, []), steps, preference.UPDATES)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("task", ["DPO", "GRPO"])
def test_the_losses_agree(task: str, mixed: bool) -> None:
    assert disagreements(task, preference.Fused, mixed) == []


class Averages(preference.Fused):
    """Its DPO takes averages over tokens for sums."""

    @staticmethod
    def dpo(logps: Tensor, ref_logps: Tensor) -> Tensor:
        return preference.Fused.dpo(logps / logps.shape[1], ref_logps / logps.shape[1])


class AllGood(preference.Fused):
    """Its GRPO takes each completion for a good one."""

    @staticmethod
    def grpo(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, advantages: Tensor) -> Tensor:
        return preference.Fused.grpo(logps, old_logps, ref_logps, advantages.abs())


class NoGradientToHead(preference.Fused):
    """Its log-probabilities are right, and give the head no gradient."""

    @staticmethod
    def logprobs(x: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
        return preference.Fused.logprobs(x, head.detach(), tokens)


@pytest.mark.parametrize(("task", "broken"), [("DPO", Averages), ("GRPO", AllGood), ("GRPO", NoGradientToHead)])
def test_a_broken_loss_is_caught(task: str, broken: preference.Way) -> None:
    assert disagreements(task, broken, steps=1), f"{broken.__doc__} No gradient and no loss differs by enough."


def test_rewards_are_of_letters() -> None:
    size = train_lm.PRESETS["100m"]
    tokens = train_lm.tokenise(b"abC9zz", size)
    assert preference.letters(tokens, size).tolist() == [1.0, 0.0, 1.0]


def test_advantages_compare_completions_of_one_prompt() -> None:
    rewards = torch.arange(2 * preference.GROUP, dtype=torch.float32)
    first, second = preference.advantages_of(rewards).chunk(2)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first.sum(), torch.tensor(0.0))
