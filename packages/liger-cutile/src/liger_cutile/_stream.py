"""The stream on which kernels are launched."""

import threading

import torch


class _Thread(threading.local):
    """What is known of the running thread."""

    has_context = False


_thread = _Thread()


def current_stream() -> int:
    """The current stream of the current device, whose context is then that of the thread.

    cuda.tile launches through the driver, in the thread's context, and a new thread has none. PyTorch's first runtime call there,
    such as an allocation, gives it one. With ``expandable_segments:True``, PyTorch allocates through the driver, too: autograd's
    thread may come to its first launch without a context, which ends in "invalid device context".
    """
    if not _thread.has_context:
        torch.cuda.mem_get_info()  # a call of the runtime that neither waits for the device nor changes anything
        _thread.has_context = True
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
