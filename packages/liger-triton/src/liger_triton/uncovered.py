"""Kernels and branches of host code that no case of liger-conformance reaches: see its README, ``--reached``."""

_INTERPRETED = "Triton interprets a function, and no Kernel is made of it: tests/test_launch.py"
_COMPILED = "a compiler that launches nothing gives nothing to remember: tests/test_launch.py"
_HOPPER = "PyTorch's grouped product is taken on Hopper alone: tests/test_kernels.py"
_NOT_HELD = "logits' products are made here on Hopper alone: tests/test_kernels.py"
_PARTS = "Hopper alone has a tile for a weight in parts: tests/test_kernels.py"
_TRACED = "what torch.compile's graphs call isn't watched: tests/test_kernels.py"
_NO_FLOAT8 = "asked before any test, and then nothing is launched: sm_80"
_AT_IMPORT = "called when a kernel's file is imported, before any test"

UNCOVERED = {
    "interpreted _device.*: device.type == 'cuda' is true": "an interpreter's device is the CPU",
    "compiled* _device.*: device.type == 'cuda' is false": "each chip is a cuda device",
    "* _device._look_up_sm_count: device.type == 'xpu' is true": "no Intel GPU is compiled for",
    "compiled* _device._look_up_sm_count: device.type == 'xpu' is false": "each chip is a cuda device",
    "* quantize.refuses: not has_float8(x.device) is true": _NO_FLOAT8,
    "* quantize_gated.refuses: not has_float8(gate.device) is true": _NO_FLOAT8,
    "* quantize_gated_gradients.refuses: not has_float8(dy.device) is true": _NO_FLOAT8,
    "* _heads.rotate: backward and compiling() is true": _TRACED,
    "* _heads._rotate_gradients": _TRACED,
    "* _heads._heads: y is not None and (y.stride() == dense or y.is_contiguous()) is true": _TRACED,
    "interpreted _launch.Kernel.*": _INTERPRETED,
    "interpreted _launch._hooked": _INTERPRETED,
    "interpreted _launch._specialised": _INTERPRETED,
    "compiled* _launch.Kernel.__init__": _AT_IMPORT,
    "interpreted _launch._Interpreted.__init__": _AT_IMPORT,
    "interpreted _launch._Interpreted.__getattr__": "what interprets a kernel asks for the function's own: tests/test_launch.py",
    "compiled* _launch._Interpreted.*": "a compiler interprets nothing",
    "* _launch.kernel": _AT_IMPORT,
    "compiled* _launch.Kernel.__getitem__: compiling() is true": "traced code isn't watched: tests/traced.py",
    "compiled* _launch.Kernel._launch: compiled is None or pointers % 16 or _hooked() is false": _COMPILED,
    "compiled* _launch.Kernel._launch: (recorder := *": _COMPILED,
    "compiled* _launch.Kernel._launch_anew: *": _COMPILED,
    "compiled* _launch._hooked": _COMPILED,
    "compiled-sm_90 _launch.Kernel._launch: on_amd is true": "no chip of AMD's",
    "compiled-sm_90 attn_res._backward_stages: stages > 1 and 2 * (stages - 1) * tile >= room is true": (
        "Hopper has enough shared memory for the longest rows"
    ),
    "interpreted embedding._sort: rows > MOST_RANKED is true": (
        "65537 indices take an interpreter 15 s; compiled, and run on devices, as `huge`"
    ),
    "interpreted fused_moe.TritonMoE.*_grouped(*) is true": _HOPPER,
    "interpreted fused_moe._clear": _HOPPER,
    "interpreted fused_moe._grouped: * is false": _HOPPER,
    "interpreted fused_moe._in_rows": _HOPPER,
    "interpreted fused_moe._multiply": _HOPPER,
    "interpreted fused_moe._grouped_product": _HOPPER,
    "* fused_moe._product_like": _TRACED,
    "interpreted fused_moe._at_16_bytes": _HOPPER,
    "compiled* fused_moe._at_16_bytes: operand.data_ptr() % 16 == 0 is false": (
        "eager calls take no such operands: tests/test_kernels.py"
    ),
    "interpreted mhc_pre.TritonMHCPre.forward: x.dtype is torch.bfloat16 and is_hopper(x.device) is true": _PARTS,
    "interpreted mhc_pre.TritonMHCPre.forward: parts is *": _PARTS,
    "interpreted mhc_pre._split_weight": _PARTS,
    "interpreted mhc_pre.TritonMHCPre.gradients: is_hopper(x.device) is true": "an interpreter's device is the CPU",
    "compiled-sm_90 mhc_pre.TritonMHCPre.gradients: is_hopper(x.device) is false": "each device is Hopper",
    "interpreted _logit_statistics.TritonStatistics.product*": _NOT_HELD,
    "interpreted _logit_statistics.TritonStatistics.normalise": _NOT_HELD,
    "interpreted _logit_statistics.TritonStatistics.rows_of_product: *": _NOT_HELD,
    "interpreted _logit_statistics.TritonStatistics.rows_of_terms": _NOT_HELD,
    "interpreted _logit_statistics._bases": _NOT_HELD,
    "compiled* _logit_statistics._bases: x.dtype is torch.float16 is true": "cases are in bfloat16: tests/test_kernels.py",
    "interpreted _logit_statistics._columns_of": _NOT_HELD,
    "interpreted _logit_statistics._descriptor": _NOT_HELD,
    "interpreted _logit_statistics._join": _NOT_HELD,
    "interpreted _logit_statistics._launch_join": _NOT_HELD,
    "interpreted _logit_statistics._launch_normalise": _NOT_HELD,
    "interpreted _logit_statistics._launch_tiles": _NOT_HELD,
    "interpreted _logit_statistics._like": _NOT_HELD,
    "interpreted _logit_statistics._loads": _NOT_HELD,
    "interpreted _logit_statistics._normalise": _NOT_HELD,
    "interpreted _logit_statistics._tiles": _NOT_HELD,
    "* fused_moe.TritonMoE.route: blocks > MOST_BLOCKS or experts > MOST_EXPERTS is true": (
        "more than 512 experts, or 262144 slots: tests/test_kernels.py"
    ),
}
