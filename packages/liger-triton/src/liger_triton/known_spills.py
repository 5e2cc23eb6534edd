"""Kernels that spill registers to memory with triton 3.7.1 and 3.5. Any other spill fails liger-conformance's ``--compile``."""

import triton

_PIECES = "rows of up to 8192 columns that are not a multiple of 16: each is fetched ahead in small pieces"
_NO_TENSOR_CORES = "x in float32, which is multiplied without tensor cores; models have bfloat16"
_ODD_EXPERTS = "sizes that are no multiples of a tile, with a hundred slots and more an expert: no model has them"

KNOWN_SPILLS = {
    "softmax-triton-sm_* softmax._backward[*BLOCK=32768*": (
        36,
        "the longest row that is held in registers: 64 columns of y and dy a thread, which has 128 registers",
    ),
    "fused_add_rms_norm-triton-sm_90 rms_norm._backward[*BLOCK=8192*, i32, i32, i32, i32*": (18, _PIECES),
    "attn_res-triton-sm_* attn_res._backward[*BLOCK=8192*": (
        16,
        "up to 16 registers where a thread holds a source, dy, query and their sum, and has 128",
    ),
    "modulated_rms_norm-triton-sm_1* modulated_rms_norm._backward[*BLOCK=8192*": (
        10,
        "two to ten registers where a thread holds two tiles, their factor and both sums, and has 128",
    ),
    "mhc_pre-triton-sm_120 mhc_pre._multiply[ROWS=128, COUNT=32, *fp32:16*": (28, _NO_TENSOR_CORES),
    "mhc_pre-triton-gfx942 mhc_pre._multiply[ROWS=128, COUNT=32, *fp32:16*": (36, _NO_TENSOR_CORES),
    "fused_moe-triton-sm_90 fused_moe._gradient[*EVEN=False, WHOLE=False, ROWS=128*": (262, _ODD_EXPERTS),
    "fused_moe-triton-sm_90 fused_moe._up[*EVEN=False, WHOLE=False, ROWS=128*": (112, _ODD_EXPERTS),
    "fused_linear_kl_div-triton-sm_1* _distillation._rows[KIND=5,*": (
        20,
        "4 registers on sm_100, 20 on sm_120, where a thread has 128: near classes have a sum of their own; sm_90 spills none",
    ),
    "sparsemax-triton-sm_100 sparsemax._forward_packed[BLOCK=65536*": (
        8,
        "two registers where a thread holds 64, and half of all that 16 warps can have",
    ),
}

if triton.__version__.startswith("3.5."):  # the oldest: the kernels are tuned for newer ones
    KNOWN_SPILLS |= {
        "layer_norm-triton-sm_90 layer_norm._forward[TWICE=True, ROWS=64, BLOCK=64, *": (6, "by triton 3.5 alone"),
        "group_norm-triton-sm_90 group_norm._backward_long[*": (4, "by triton 3.5 alone"),
        "group_norm-triton-sm_90 group_norm._sum[*": (2, "by triton 3.5 alone"),
        "fused_linear_kl_div-triton-sm_90 _distillation._rows[KIND=5,*": (6, "by triton 3.5 alone"),
    }
else:
    KNOWN_SPILLS |= {
        "rms_norm-triton-sm_90 rms_norm._backward[*BLOCK=8192*, i32, i32, i32, i32*": (18, _PIECES),
    }
