"""Kernels that spill registers with triton 3.5, 3.7.1 or 3.9. Any other spill fails ``pytest conformance --compile``."""

import triton

_PIECES = "rows of up to 8192 columns that are not a multiple of 16: each is fetched ahead in small pieces"
_NO_TENSOR_CORES = "x in float32, which is multiplied without tensor cores; models have bfloat16"
_FIVE_ROWS = "up to 22 registers where a thread holds two sources, dy, query and their sum, 32 elements of each"
_ODD_EXPERTS = "sizes that are no multiples of a tile, with a hundred slots and more an expert: no model has them"

KNOWN_SPILLS = {
    "attn_res-triton-sm_* attn_res._backward[*BLOCK=8192*": (22, _FIVE_ROWS),
    "softmax-triton-sm_* softmax._backward[*BLOCK=32768*": (
        36,
        "the longest row that is held in registers: 64 columns of y and dy a thread, which has 128 registers",
    ),
    "fused_add_rms_norm-triton-sm_90 rms_norm._backward[*BLOCK=8192*, i32, i32, i32, i32*": (18, _PIECES),
    "mhc_pre-triton-sm_120 mhc_pre._multiply[PARTS=False, ROWS=128, COUNT=32, *fp32:16*": (28, _NO_TENSOR_CORES),
    "mhc_pre-triton-gfx942 mhc_pre._multiply[PARTS=False, ROWS=128, COUNT=32, *fp32:16*": (36, _NO_TENSOR_CORES),
    "fused_moe-triton-sm_90 fused_moe._gradient[*EVEN=False, WHOLE=False, ROWS=128*": (262, _ODD_EXPERTS),
    "fused_moe-triton-sm_90 fused_moe._up[*EVEN=False, WHOLE=False, ROWS=128*": (112, _ODD_EXPERTS),
    "sparsemax-triton-sm_100 sparsemax._forward_packed[BLOCK=65536*": (
        8,
        "two registers where a thread holds 64, and half of all that 16 warps can have",
    ),
}

# Kernels are tuned for the locked release, and spill differently with others.
if triton.__version__.startswith("3.5."):
    KNOWN_SPILLS |= {
        "layer_norm-triton-sm_90 layer_norm._forward[TWICE=True, ROWS=64, BLOCK=64, *": (6, "by triton 3.5 alone"),
        "group_norm-triton-sm_90 group_norm._backward_long[*": (4, "by triton 3.5 alone"),
        "group_norm-triton-sm_90 group_norm._sum[*": (2, "by triton 3.5 alone"),
        "quantize_gated_gradients-triton-sm_90 quantize_gated_gradients._rows[*": (2, "by triton 3.5 alone"),
    }
elif triton.__version__.startswith("3.9."):
    KNOWN_SPILLS |= {
        "softmax-triton-sm_* softmax._backward[*BLOCK=32768*": (38, "two more than by triton 3.7"),
        "fused_add_rms_norm-triton-sm_90 rms_norm._backward[*BLOCK=8192*, i32, i32, i32, i32*": (22, _PIECES),
        "fused_add_rms_norm-triton-sm_90 rms_norm._backward_packed[BLOCK=16384, *": (2, "by triton 3.9 alone"),
        "layer_norm-triton-sm_90 layer_norm._forward[TWICE=False, ROWS=1, BLOCK=32768, *": (6, "by triton 3.9 alone"),
        "fused_moe-triton-sm_90 fused_moe._up[*EVEN=True, WHOLE=True, ROWS=128, *": (2, "by triton 3.9 alone"),
    }
else:
    KNOWN_SPILLS |= {
        "rms_norm-triton-sm_90 rms_norm._backward[*BLOCK=8192*, i32, i32, i32, i32*": (18, _PIECES),
    }
