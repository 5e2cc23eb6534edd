"""One file per op that has a cuTile kernel. The file's name is the op's; there is no other registration."""
