"""One file per op that has a cuTile kernel, named after the op. There is no other registration."""
