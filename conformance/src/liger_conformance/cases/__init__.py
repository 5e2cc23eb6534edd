"""The cases of each op: how to build its inputs from sizes, the least work, and what its speed is compared with."""
