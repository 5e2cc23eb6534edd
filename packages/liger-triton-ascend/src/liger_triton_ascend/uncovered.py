"""Kernels and branches of host code that no case of liger-conformance reaches: see its README, ``--reached``."""

_FLOAT32 = "with torch 2.10 an NPU multiplies into float32: the other way is that of torch 2.9 and of the interpreter"
_WRONG_TILES = "arguments that make no sense, or a shape that doesn't fit: tests/test_device.py"
_ON_CPU = "an interpreter's device is the CPU, whose torch.mm takes no other dtype for its result"

UNCOVERED = {
    "* _device._largest_tile: not all(* is true": _WRONG_TILES,
    "* _device._largest_tile: size > elements is true": _WRONG_TILES,
    "* _device._of_this_npu": "the environment gives the capacity of the Unified Buffer: tests/test_device.py",
    "* _device.compute_default_tiling_strategy: * is true": _WRONG_TILES,
    "* _device.get_npu_core_count: device is None is true": "kernels give their tensors' device: tests/test_device.py",
    "* _linear.AscendLinear.add_product: total is None* is true": "core's host code gives memory: another's needn't",
    "compiled* _device._look_up_core_count: device.type != 'npu' is true": "each chip is an NPU",
    "compiled* fused_neighborhood_attention._launch: rows > 1 and rows // 2 >= length is true": (
        "more than 8 short sequences for each of a chip's cores; the interpreter has 2"
    ),
    "compiled* _linear.AscendLinear.add_product: a.device.type == 'npu' and _FLOAT32_RESULT is false": _FLOAT32,
    "compiled* _linear.AscendLinear.add_product: for * in self.chunks(columns, max(self.aligned, *": _FLOAT32,
    "compiled* modulated_rms_norm._runs: tile_rows >= 2 * m2 is true": (
        "hundreds of short runs of rows, so that each of a chip's cores has several; the interpreter has 2"
    ),
    "interpreted _device._look_up_core_count: device.type != 'npu' is false": "an interpreter's device is the CPU",
    "interpreted _linear.AscendLinear.add_product: a.device.type == 'npu' and _FLOAT32_RESULT is true": _ON_CPU,
    "interpreted _linear.AscendLinear.add_product: for * in self.chunks(columns, max(1, room // width)) *": _ON_CPU,
    "interpreted _linear.AscendLinear.product: * is true": _ON_CPU,
}
