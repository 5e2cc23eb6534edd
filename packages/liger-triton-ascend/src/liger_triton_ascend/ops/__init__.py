"""One file per op that has a triton-ascend kernel, named after the op. There is no other registration."""
