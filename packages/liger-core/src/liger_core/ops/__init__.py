"""The contracts: one file per op, with its interface, its checks and its reference."""
