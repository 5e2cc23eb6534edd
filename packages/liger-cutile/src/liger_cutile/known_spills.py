"""Kernels that tileiras 13.4 spills or doesn't load in bulk. Any other such kernel fails liger-conformance's ``--compile``."""

_ONCE_A_TILE = "numbers that a thread needs once per tile; without them a second block wouldn't fit"
_ODD_ROWS = "addresses of rows that are no multiple of 16 bytes, whose elements are loaded one by one; models have none"
_EIGHT_BLOCKS = "64 registers, so that eight blocks fit on a multiprocessor: each has few loads under way"
_ONCE_A_BLOCK = "numbers that a thread needs once a block"
_LONG_ROW = "four instructions for a row of 32768 elements, 128 a thread, which would have to be read twice else"
_LONG_ROW_IN_PARTS = "few numbers, for a row of 32768 elements in 64 registers a thread, which would be read twice else"
_WIDE_ROW = "few numbers beside a row of 8192 in float32, which would be read twice else; in bfloat16 there are none"
_WIDE_SOURCES = "few numbers beside rows of 8192, of each source, which would be read once more else"
_WEIGHT = (
    "few numbers beside 256 columns of x and of the weight; with 128 there are none, and forward takes a fifth longer"
)
_SIX_BLOCKS = "80 registers, so that six blocks fit on a multiprocessor"
_SMALL_GROUPS = "a tile of several groups of 720 elements, whose sizes are no powers of two; models have larger groups"

KNOWN_SPILLS: dict[str, tuple[int, str]] = {
    "attn_res-cutile-sm_100 attn_res._forward[ROWS=1, BLOCK=8192; *": (2, _WIDE_SOURCES),
    "attn_res-cutile-sm_90 attn_res._gradients[ROWS=4, BLOCK=1024; 2D fp32:16, *": (4, _ONCE_A_TILE),
    "attn_res-cutile-sm_90 attn_res._gradients[ROWS=64, BLOCK=16; 2D bf16, *": (18, _ODD_ROWS),
    "attn_res-cutile-sm_100 attn_res._gradients[ROWS=4, BLOCK=1024; *": (2, _ONCE_A_TILE),
    "distillation-cutile-sm_100 _distillation._rows[*, BLOCK=2048, *": (2, _ONCE_A_BLOCK),
    "embedding-cutile-sm_90 embedding._sum_runs[*": (8, _EIGHT_BLOCKS),
    "embedding-cutile-sm_100 embedding._sum_runs[*": (2, _EIGHT_BLOCKS),
    "embedding-cutile-sm_120 embedding._sum_runs[*": (4, _EIGHT_BLOCKS),
    "fused_linear_distillation-cutile-sm_100 _distillation._rows[*, BLOCK=2048, *": (2, _ONCE_A_BLOCK),
    "fused_neighborhood_attention-cutile-sm_80 *._backward_near[HEAD=128, *": (4, _ONCE_A_BLOCK),
    "fused_neighborhood_attention-cutile-sm_90 *._backward_queries[HEAD=130, *": (6, _ODD_ROWS),
    "grpo_loss-cutile-sm_120 grpo_loss._log_probabilities[*; 3D fp32, 3D bf16, *": (12, _ODD_ROWS),
    "group_norm-cutile-sm_80 group_norm._backward_long[*": (26, _ONCE_A_TILE),
    "group_norm-cutile-sm_90 group_norm._backward_long[*": (2, _ONCE_A_TILE),
    "group_norm-cutile-sm_90 group_norm._forward_long[*; 4D fp32:16, *": (6, _ONCE_A_TILE),
    "group_norm-cutile-sm_90 group_norm._sum_parts[WEIGHT=True, BIAS=True, CHANNELS=4, *": (2, _ONCE_A_TILE),
    "group_norm-cutile-sm_90 group_norm._forward[GROUPS=2, CHANNELS=16, *": (74, _SMALL_GROUPS),
    "group_norm-cutile-sm_90 group_norm._backward[*, GROUPS=2, CHANNELS=16, *": (122, _SMALL_GROUPS),
    "group_norm-cutile-sm_100 group_norm._backward_long[*": (4, _ONCE_A_TILE),
    "group_norm-cutile-sm_120 group_norm._backward_long[*": (6, _ONCE_A_TILE),
    "mhc_pre-cutile-sm_90 mhc_pre._multiply[PARTS=True, ROWS=64, COUNT=32, *": (2, _WEIGHT),
    "qwen2vl_mrope-cutile-sm_80 qwen2vl_mrope._rotate[*": (8, _SIX_BLOCKS),
    "qwen2vl_mrope-cutile-sm_90 qwen2vl_mrope._rotate[BACKWARD=True, *": (4, _SIX_BLOCKS),
    "qwen2vl_mrope-cutile-sm_90 qwen2vl_mrope._rotate[BACKWARD=False, BATCHED=False, *": (4, _SIX_BLOCKS),
    "qwen2vl_mrope-cutile-sm_100 qwen2vl_mrope._rotate[*": (2, _SIX_BLOCKS),
    "softmax-cutile-sm_80 softmax._forward[ROWS=1, BLOCK=32768; *": (4, _LONG_ROW),
    "sparsemax-cutile-sm_80 sparsemax._backward_parts[PARTS=16, *": (2, _LONG_ROW_IN_PARTS),
    "sparsemax-cutile-sm_90 sparsemax._backward_parts[PARTS=16, *": (4, _LONG_ROW_IN_PARTS),
    "sparsemax-cutile-sm_100 sparsemax._backward_parts[PARTS=16, *": (2, _LONG_ROW_IN_PARTS),
    "sparsemax-cutile-sm_100 sparsemax._forward_parts[PARTS=16, *": (8, _LONG_ROW_IN_PARTS),
    "sparsemax-cutile-sm_120 sparsemax._backward_parts[PARTS=16, *": (4, _LONG_ROW_IN_PARTS),
    "sparsemax-cutile-sm_120 sparsemax._forward_parts[PARTS=16, *": (12, _LONG_ROW_IN_PARTS),
    "sparsemax-cutile-sm_90 sparsemax._forward[ROWS=1, BLOCK=8192, *; 2D fp32:16, *": (4, _WIDE_ROW),
    "sparsemax-cutile-sm_90 sparsemax._forward[ROWS=16, BLOCK=128, *; 2D *16, *": (2, _ODD_ROWS),
    "sparsemax-cutile-sm_100 sparsemax._forward[ROWS=16, BLOCK=128, *; 2D bf16, *": (6, _ODD_ROWS),
    "sparsemax-cutile-sm_120 sparsemax._forward[ROWS=16, BLOCK=128, *; 2D bf16, *": (2, _ODD_ROWS),
}
_EXACT = "TensorCoreMMA at *: FMA", "products of float32 are exact: tensor cores would round their operands to tf32"

KNOWN_LOSSES: dict[str, tuple[str, str]] = {
    **{
        f"fused_neighborhood_attention-cutile-sm_90 *[HEAD={head}, * 5D fp32:16, 5D fp32:16, 5D fp32:16, *": _EXACT
        for head in (64, 128)
    },
    "fused_moe-cutile-sm_90 *fp32:16, *D fp32:16, *": _EXACT,
}
