"""torch.compile traces the host code of every op, also where there is no GPU to run it on."""

import os
import subprocess
import sys
from pathlib import Path

from liger_core.contract import ops
from liger_triton import backend


def test_host_code_is_traced_with_sizes_that_vary() -> None:
    """In a process that doesn't interpret kernels, which can't be traced."""
    names = [name for name in sorted(ops) if backend.has_kernel(name)]
    names += [f"fused_linear_{loss}@chunks" for loss in ("cross_entropy", "distillation", "jsd", "kl_div")]
    names += ["rope@gradients", "qwen2vl_mrope@gradients"]
    names += ["fused_linear_logit_statistics@hopper", "fused_linear_logit_statistics@frozen@hopper"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("traced.py"), *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} traced" in done.stdout
