"""Kernels and branches of host code that no case of liger-conformance reaches: see its README, ``--reached``."""

_FLOAT32 = "with torch 2.10 an NPU multiplies into float32: the other way is that of torch 2.9 and of the interpreter"
_ON_CPU = "an interpreter's device is the CPU, whose torch.mm takes no other dtype for its result"

UNREACHED = {
    "* _linear._Linear.add_product: total is None* is true": "core's host code gives memory: another's needn't",
    "compiled* fused_neighborhood_attention._launch: rows > 1 and rows // 2 >= length is true": (
        "more than 8 short sequences for each of a chip's cores; the interpreter has 2"
    ),
    "compiled* _linear._Linear.add_product: a.device.type == 'npu' and _FLOAT32_RESULT is false": _FLOAT32,
    "compiled* _linear._Linear.add_product: for * in self.chunks(columns, max(self.aligned, *": _FLOAT32,
    "compiled* modulated_rms_norm._runs: tile_rows >= 2 * m2 is true": (
        "hundreds of short runs of rows, so that each of a chip's cores has several; the interpreter has 2"
    ),
    "interpreted _linear._Linear.add_product: a.device.type == 'npu' and _FLOAT32_RESULT is true": _ON_CPU,
    "interpreted _linear._Linear.add_product: for * in self.chunks(columns, max(1, room // width)) *": _ON_CPU,
    "interpreted _linear._Linear.product: * is true": _ON_CPU,
}
