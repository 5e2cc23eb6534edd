"""A process of two that train a model under FSDP2, compared with the plain model: sharded.py NAME STORE RANK."""

import copy
import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import batch, build, run
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import liger_transformers
from liger_core.contract import Op

name, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{Path(store)}", rank=rank, world_size=2)
torch.set_num_threads(1)
mesh = dist.init_device_mesh("cpu", (2,))
calls: list[str] = []
original_call = Op.__call__
Op.__call__ = lambda op, *args, **kwargs: (calls.append(op.name), original_call(op, *args, **kwargs))[1]  # type: ignore[method-assign]

plain, inputs = build(name), batch()
in_8_bits = copy.deepcopy(plain)
liger_transformers.apply(in_8_bits, precision="fp8")
expected = {None: run(plain, inputs), "fp8": run(in_8_bits, inputs)}
count = 0
for precision, first, own_unit, checkpointing, inner in itertools.product(
    expected, (True, False), (True, False), (True, False), (None, "mlp", "linear")
):
    if inner is not None and not (checkpointing and own_unit):
        continue
    if precision is not None and not (own_unit and inner == ("linear" if checkpointing else None)):
        continue
    output, want = expected[precision]
    model = copy.deepcopy(plain)
    if first:
        liger_transformers.apply(model, mlp=True, precision=precision)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        if inner == "mlp":
            fully_shard(layer.mlp, mesh=mesh)
        if inner == "linear":
            fully_shard(layer.mlp.up_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    if own_unit and not model.config.tie_word_embeddings:
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not first:
        liger_transformers.apply(model, mlp=True, precision=precision)
    calls.clear()
    sharded = model(**inputs)
    sharded.loss.backward()
    assert calls.count("fused_linear_cross_entropy") == 1, calls
    # A linear layer that gathers its weight itself has hooks, which only calling it runs.
    assert calls.count("gated_mlp") == (4 if checkpointing and inner != "linear" and precision is None else 0), calls
    assert ("quantize" in calls) == (precision is not None), calls
    torch.testing.assert_close(sharded.loss, output.loss)
    for key, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), key
        error = (parameter.grad.full_tensor() - want[key]).abs().max() / want[key].abs().max()
        assert error < 1e-5, f"{key} differs by {error}"
    liger_transformers.restore(model)
    calls.clear()
    torch.testing.assert_close(model(**inputs).loss, expected[None][0].loss)
    assert not calls
    count += 1
print(f"{count} ways are equal")
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
# Python's own end would abort this process where a thread of gloo drops its last tensor after it. FSDP keeps the group, so the
# threads outlive destroy_process_group.
os._exit(0)
