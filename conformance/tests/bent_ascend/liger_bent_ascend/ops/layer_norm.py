"""The same sub-blocks, as _device.py chooses them for the tiles that are alive without double buffers, and with them."""

from liger_bent_ascend.ops._geglu import launch
from liger_triton_ascend.ops._device import compute_default_tiling_strategy

ALIVE = 3, 5


def forward(needs, x, **others):
    for alive in ALIVE:
        ((tile,),) = compute_default_tiling_strategy(1.0, 4, alive, [(x.numel(),)], [0])
        result = launch(x, x, tile, 4 * tile)
    return result


def backward(needs, saved, *incoming, **options):
    return ()
