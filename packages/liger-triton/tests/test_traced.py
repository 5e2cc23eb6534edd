"""torch.compile traces the host code of every op, also where there is no GPU to run it on."""

import os
import sys
from pathlib import Path

import pytest

from liger_conformance.traces import run_tracing
from liger_core.contract import ops
from liger_triton import backend


def test_host_code_is_traced_with_sizes_that_vary() -> None:
    names = [name for name in sorted(ops) if backend.has_kernel(name)]
    names += [f"fused_linear_{loss}@chunks" for loss in ("cross_entropy", "distillation", "jsd", "kl_div")]
    names += ["rope@gradients", "qwen2vl_mrope@gradients"]
    names += ["fused_linear_logit_statistics@frozen", "fused_moe@products"]
    trace(names)


@pytest.mark.slow
def test_arguments_whose_elements_are_not_adjacent_are_traced() -> None:
    """Sizes of copies that vary may turn out to be constant. Dynamo of torch 2.11 fails at those; 2.9 and 2.13 don't."""
    names = [f"{name}@sliced" for name in sorted(ops) if backend.has_kernel(name) and ops[name].differentiable]
    trace([*names, "modulated_rms_norm@expanded"])


def trace(names: list[str]) -> None:
    """In a process that doesn't interpret kernels, which can't be traced."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = run_tracing([sys.executable, Path(__file__).with_name("traced.py"), *names], environment)
    assert f"{len(names)} traced" in printed
