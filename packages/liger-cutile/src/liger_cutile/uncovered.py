"""Kernels and branches of host code that no case of liger-conformance reaches: see its README, ``--reached``."""

_MANY = "more samples or rows than a grid has blocks downwards, 65535, which tests/test_kernels.py makes 2"
_EMPTY = "without a token nothing is launched; the interpreted cases have it"
_FAR = "tensors far apart, of which one is missing or has one sample: compiled, where they take no memory"
_APART = "q's gradient of what k's result alone gets: compiled, where backward is called for each pair"
_TRACED = "what torch.compile's graphs call isn't watched: tests/test_kernels.py"
_NO_TMA = "a GPU without TMA: compiled, for sm_80"
_NO_FLOAT8 = "asked before any test, and then nothing is launched: sm_80"

UNCOVERED = {
    "interpreted _device._look_up_major": "an interpreter's device is the CPU",
    "interpreted _launch.current_stream": "an interpreter has no streams: tests/test_launch.py",
    "interpreted attn_res._launch_backward: not loads_in_bulk(dy.device) is true": _NO_TMA,
    "interpreted attn_res._with_more_registers": _NO_TMA,
    "* quantize.refuses: not has_float8(x.device) is true": _NO_FLOAT8,
    "* quantize_gated.refuses: not has_float8(gate.device) is true": _NO_FLOAT8,
    "* quantize_gated_gradients.refuses: not has_float8(dy.device) is true": _NO_FLOAT8,
    "* _heads.like: gradient and compiling() is true": _TRACED,
    "* rope._launch: y is not None and result is not None and (result is not y) is true": _TRACED,
    "* _heads.samples_of: count > 1 is true": _MANY,
    "interpreted _heads.samples_of: x is None or x.shape[0] == 1 < count is true": _FAR,
    "interpreted *rope.backward: dq is None and dk is None is true": _APART,
    "* group_norm._launch_*ward: samples <= MOST_DOWN is false": _MANY,
    "* group_norm._launch_*ward: for part in _evenly(samples) *": _MANY,
    "* group_norm._evenly": _MANY,
    "interpreted _launch.within_grid: rows <= most is false": _MANY,
    "interpreted embedding._sort: rows > MOST_RANKED is true": (
        "65537 indices take an interpreter 15 s; compiled, and run on devices, as `huge`"
    ),
    "compiled* grpo_loss._launch_*ward: length == 0 is true": _EMPTY,
    "compiled* grpo_loss._launch_forward: *result *": _EMPTY,
}
