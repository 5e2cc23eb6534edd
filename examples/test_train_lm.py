"""The example runs, and tells when an op is broken."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import parallel
import pytest
import several_processes
import torch
import train_lm
from PIL import Image
from torch import Tensor

SMALL = replace(train_lm.PRESETS["tiny"], hidden=32, layers=2, feed_forward=64, context=32, batch=4, steps=6)


@pytest.mark.parametrize(("preset", "op"), [("tiny", "swiglu"), ("moe", "fused_moe")])
def test_the_script_trains_draws_and_agrees(preset: str, op: str, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    command = [
        sys.executable,
        train_lm.__file__,
        "--preset",
        preset,
        "--steps",
        "3",
        "--device",
        "cpu",
        "--output",
        str(picture),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The trainings agree" in done.stdout
    assert f"{op}.py" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def torchrun(processes: int, *words: str) -> None:
    """Run a program, which has to succeed, on processes of this machine."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *words,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The trainings agree: first gradients within 1e-05" in done.stdout


def hold(processes: int, losses: Path) -> None:
    """Hold the curve of several processes to that of one."""
    several, one = json.loads(losses.read_text("utf-8")).items()
    assert several[0].startswith(f"{processes} processes --")
    assert several[1] == pytest.approx(one[1], rel=1e-5)


def readme_commands() -> list[tuple[int, list[str]]]:
    """How many processes the README of liger-distributed starts for train_lm, and its arguments."""
    text = (several_processes.PICTURE.parent / "README.md").read_text("utf-8")
    matches = re.findall(r"^uv run torchrun --nproc-per-node (\d) examples/train_lm.py (.+)$", text, re.M)
    return [(int(processes), words.split()) for processes, words in matches]


def test_several_processes_train_as_one(tmp_path: Path) -> None:
    """The README's commands, on four processes for all of them: gradients and losses are those of one process."""
    commands = readme_commands()
    pairs, fours = ([command for command in commands if command[0] == count] for count in (2, 4))
    assert (len(pairs), len(fours)) == (2, 1), "the commands share the processes by rounds: see helpers/worlds.py"
    torchrun(4, str(Path(__file__).parent / "helpers/worlds.py"), str(tmp_path), json.dumps([pairs, fours]))
    for processes, words in commands:
        hold(processes, tmp_path / f"{' '.join(words)}.json")
        assert (tmp_path / f"{' '.join(words)}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "words"), [*readme_commands(), (2, ["--tp", "2", "--untied"])])
def test_several_processes_train_the_preset_as_one(processes: int, words: list[str], tmp_path: Path) -> None:
    """The commands as they are, but for their steps."""
    losses = tmp_path / "curves.json"
    options = ["--device", "cpu", "--steps", "3", "--output", str(tmp_path / "curves.png"), "--curves", str(losses)]
    torchrun(processes, train_lm.__file__, *words, *options)
    hold(processes, losses)


@pytest.mark.parametrize(
    ("world", "arguments", "says"),
    [("2", [], "2 processes, --tp 1: it takes --fsdp"), ("3", ["--fsdp", "--tp", "2"], "3 processes, --tp 2 --fsdp")],
)
def test_processes_that_cannot_be_divided(
    world: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", world), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert train_lm.main(["--device", "cpu", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_one_process_is_not_divided(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_lm.main(["--device", "cpu", "--tp", "2"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_packed_rows_are_cut_into_rows_of_each() -> None:
    """Two heads of q, one of k and one of v have four rows each: the first process gets half of each."""
    assert parallel.order([8, 4, 4], 2).tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]


def test_the_picture_of_several_processes() -> None:
    """It was drawn from the preset as it is, and its curves are one."""
    again = "draw it again: uv run python examples/several_processes.py"
    assert [(int(way[1]), way[3:]) for way in several_processes.WAYS.values()] == readme_commands()
    text = Image.open(several_processes.PICTURE).text
    assert text["settings"] == several_processes.settings(), again
    curves = json.loads(text["curves"])
    assert list(curves) == ["one process", *several_processes.WAYS], again
    assert len(curves["one process"]) == several_processes.STEPS, again
    one = train_lm.mean_losses(curves["one process"])
    for name in several_processes.WAYS:
        assert train_lm.disagreements([train_lm.mean_losses(curves[name]), one], 1e-4) == [], again


def test_a_language_that_cannot_run_ends_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_lm.main(["--device", "cpu", "--language", "no-such-language"]) == 2
    assert "no-such-language" in capsys.readouterr().err


class ForgotEps(train_lm.Plain):
    """Its rms_norm adds no eps."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * weight


class BackwardKeys(train_lm.Plain):
    """Its rope turns the keys backward."""

    @staticmethod
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return train_lm.Plain.rope(q, k, cos, sin)[0], train_lm.Plain.rope(q, k, cos, -sin)[1]


class NoGateGradient(train_lm.Plain):
    """Its swiglu is right, but gives the gate no gradient."""

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return train_lm.Plain.swiglu(gate.detach(), up)


class NoGradientToRouter(train_lm.Plain):
    """Its fused_moe is right, but gives the router no gradient."""

    @staticmethod
    def fused_moe(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, expert_indices: Tensor, expert_weights: Tensor
    ) -> Tensor:
        return train_lm.Plain.fused_moe(x, gate_up_weight, down_weight, expert_indices, expert_weights.detach())


class NoGradientToHead(train_lm.Plain):
    """Its loss is right, but gives the head no gradient."""

    @staticmethod
    def fused_linear_cross_entropy(x: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor:
        return train_lm.Plain.fused_linear_cross_entropy(x, linear_weight.detach(), target)


def gradients(ops: object, **changes: object) -> dict[str, Tensor]:
    data = train_lm.tokenise(Path(train_lm.__file__).read_bytes(), SMALL)
    return train_lm.first_gradients(replace(SMALL, **changes), train_lm.Alone("", ops), data, seed=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_liger_core_agrees(tied: bool, mixed: bool) -> None:
    both = [gradients(ops, tied=tied, mixed=mixed) for ops in (train_lm.liger, train_lm.Plain)]
    assert train_lm.disagreements(both, train_lm.GRADIENT_TOLERANCE[torch.bfloat16 if mixed else torch.float32]) == []


@pytest.mark.parametrize("mixed", [False, True])
def test_experts_agree(mixed: bool) -> None:
    both = [gradients(ops, experts=5, feed_forward=16, mixed=mixed) for ops in (train_lm.liger, train_lm.Plain)]
    assert "gradient of blocks.1.mlp.router.weight" in both[0]
    assert train_lm.disagreements(both, train_lm.GRADIENT_TOLERANCE[torch.bfloat16 if mixed else torch.float32]) == []


@pytest.mark.parametrize(
    ("broken", "mixed"),
    [
        (ForgotEps, False),
        (BackwardKeys, False),
        (NoGateGradient, False),
        (NoGateGradient, True),
        (NoGradientToHead, True),
        (NoGradientToRouter, False),
    ],
)
def test_a_broken_op_is_caught(broken: type[train_lm.Plain], mixed: bool) -> None:
    allowed = train_lm.GRADIENT_TOLERANCE[torch.bfloat16 if mixed else torch.float32]
    experts = 4 if broken is NoGradientToRouter else 0
    both = [gradients(ops, tied=False, mixed=mixed, experts=experts) for ops in (broken, train_lm.Plain)]
    assert train_lm.disagreements(both, allowed), f"{broken.__doc__} No gradient differs by more than {allowed}."


@pytest.mark.parametrize("last", [2.1, float("nan"), float("inf")])
def test_curves_that_part_are_caught(last: float) -> None:
    both = [train_lm.mean_losses(curve) for curve in ([4.0, 3.0, last], [4.0, 3.0, 2.0])]
    (message,) = train_lm.disagreements(both, train_lm.LOSS_TOLERANCE[torch.bfloat16])
    assert "mean loss of part 3" in message


def test_the_split_keeps_the_same_modules_back() -> None:
    train, validation = train_lm.standard_library()
    assert (train, validation) == train_lm.standard_library()
    assert len(train) > 10 * len(validation) > 1_000_000


def test_pairs_of_bytes_are_tokens() -> None:
    size = train_lm.PRESETS["100m"]
    assert train_lm.tokenise(b"abcd!", size).tolist() == [ord("a") * 256 + ord("b"), ord("c") * 256 + ord("d")]
