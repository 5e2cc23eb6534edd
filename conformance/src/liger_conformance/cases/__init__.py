"""The cases of each op: how to build its inputs from sizes."""
