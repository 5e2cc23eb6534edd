"""A process of two that run a model under transformers' tensor-parallel plan, compared with the plain one.

tensor_parallel.py NAME FOLDER RANK
"""

import os
import sys

import torch
import torch.distributed as dist
from tiny_models import batch, build, run
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import liger_transformers
from liger_core import subclasses
from liger_core.contract import Op

name, folder, rank = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
torch.set_num_threads(1)
calls: list[str] = []
original_call = Op.__call__
Op.__call__ = lambda op, *args, **kwargs: (calls.append(op.name), original_call(op, *args, **kwargs))[1]  # type: ignore[method-assign]

plain, inputs = build(name), batch()
output, want = run(plain, inputs)
if rank == "0":
    plain.save_pretrained(f"{folder}/model")
dist.barrier()
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", distributed_config=DistributedConfig(tp_size=2)).train()
dense = model.lm_head.forward
subclasses._handlers[subclasses.DTENSOR] = None  # as where liger-distributed isn't installed
assert "liger-core[distributed]" in str(liger_transformers.apply(model))
liger_transformers.restore(model)
subclasses._handlers.clear()
report = liger_transformers.apply(model)
assert report.ops["fused_linear_cross_entropy"] == 1, report
assert "lm_head" not in str(report.left), report
calls.clear()
divided = model(**inputs)
divided.loss.backward()
assert divided.logits is None
assert type(divided.loss) is torch.Tensor
assert calls.count("fused_linear_cross_entropy") == 1, calls
assert {"swiglu", "rope", "rms_norm"} <= set(calls) or name == "gemma2", calls
torch.testing.assert_close(divided.loss, output.loss)
for key, parameter in model.named_parameters():
    gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    error = (gradient - want[key]).abs().max() / want[key].abs().max()
    assert error < 1e-5, f"{key} differs by {error}"
losses = [torch.empty(()) for _ in range(2)]
dist.all_gather(losses, divided.loss.detach())
assert torch.equal(*losses)
with torch.no_grad():  # logits where they are asked for, and a report where lazy would let them leave
    torch.testing.assert_close(model.eval()(input_ids=inputs["input_ids"]).logits.shape[-1], output.logits.shape[-1])
logits = model.train()(**inputs, skip_logits=False).logits
torch.testing.assert_close(logits, output.logits)
liger_transformers.restore(model)
assert model.lm_head.forward is dense
calls.clear()
torch.testing.assert_close(model(**inputs).loss, output.loss)
assert not calls
lazy = liger_transformers.apply(model, lazy=True)
assert "trl and lazy take a whole one" in str(lazy), lazy
print("equal")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # see sharded.py
