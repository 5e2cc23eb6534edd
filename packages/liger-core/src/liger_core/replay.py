"""Host code of a kernel, recorded once for a metadata and replayed.

Host code decides by metadata alone. For tensors of the same shapes, strides and dtypes, and for the same options, it allocates
the same tensors and launches the same kernels with the same numbers: only addresses differ. `record` runs it under a dispatch
mode, and writes what it did as a function without branches:

    def replay(i0, i1):
        if hooked() or i0.stride() != k0 or ...: return None
        t0 = empty_like(k1, memory_format=k2)
        launch(grid, ..., t0.data_ptr(), i0.data_ptr(), i1.data_ptr(), k3)
        return t0, (i0, i1)

A replay refuses other strides, and addresses that aren't aligned: then the host code has to run. Host code that does more than
allocate, view and launch, such as a matrix product or a copy, isn't replayed at all.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ALIGNED = 32
"""Bytes by which the addresses of a replayed call's tensors are divisible. Host code asks for 16, and for 8 elements."""

_ALLOCATES = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "zeros",
    "zeros_like",
)


class NotReplayable(Exception):
    """Host code does what can't be replayed. The message says what."""


class Each(NamedTuple):
    """An argument of a launch that each replay asks for anew, such as the current stream: ``function(*arguments)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


class Operator(NamedTuple):
    """A call of an operator that allocates or views, with its results."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[Tensor]
    several: bool
    allocates: bool


class Launch(NamedTuple):
    """A launch: ``function(*arguments)``, with addresses in place of tensors if `addresses`, unless `unless()`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    addresses: bool
    unless: Callable[[], bool] | None


def _is_view(function: Any, name: str, arguments: Sequence[Any]) -> bool:
    """Whether an operator makes views that begin in a place which metadata decides.

    `as_strided` with an offset is none of them: it counts from the storage's start, and nobody knows how far that is.
    """
    aliases = [returned.alias_info for returned in function._schema.returns]
    if name == "as_strided":
        return len(arguments) == 3
    return name == "_unsafe_view" or all(alias is not None and not alias.is_write for alias in aliases)


class Recorder(TorchDispatchMode):
    """Notes what host code allocates, views and launches, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Operator | Launch] = []
        self.why_not: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        if name not in _ALLOCATES and not _is_view(function, name, args):
            self.refuse(f"it calls {name}")
        elif self.why_not is None:
            self.steps.append(Operator(function, args, kwargs or {}, results, several, name in _ALLOCATES))
        return result

    def launch(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        addresses: bool = False,
        unless: Callable[[], bool] | None = None,
    ) -> None:
        """Note a launch that has been made.

        Args:
            function: what launches.
            arguments: its arguments, in which `Each` and tensors may stand, also within tuples.
            addresses: whether it takes the tensors' addresses.
            unless: a function that each replay asks: if it returns True, host code runs.
        """
        if held := [type(argument).__name__ for argument in arguments if dataclasses.is_dataclass(argument)]:
            self.refuse(f"a launch takes a {held[0]}, which may hold an address")
        elif self.why_not is None:
            self.steps.append(Launch(function, arguments, addresses, unless))

    def refuse(self, why: str) -> None:
        """Say why this can't be replayed."""
        self.why_not = self.why_not or why
        self.steps.clear()


class _Thread(threading.local):
    recorder: Recorder | None = None
    """The recorder of the host code that runs in this thread."""


state = _Thread()


@contextmanager
def _recording() -> Iterator[Recorder]:
    with Recorder() as state.recorder:
        try:
            yield state.recorder
        finally:
            state.recorder = None


def launch(function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function(*arguments)``, with what an `Each` among them gives, and note that as a launch if this thread records.

    Operators that the function calls itself, as an interpreter does, are no part of the host code.
    """
    values = [each.function(*each.arguments) if type(each) is Each else each for each in arguments]
    if (recorder := state.recorder) is None:
        function(*values)
        return
    with _disable_current_modes():
        function(*values)
    recorder.launch(function, *arguments)


def may_record() -> bool:
    """Whether what recording allocates outlives the call. What a CUDA graph's capture allocates is the graph's."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class Recorded(NamedTuple):
    """A result of host code, and how to have the like again.

    Attributes:
        returned: tensors and None, in nested tuples.
        replay: a function of other inputs; it returns the like, or None: then the host code has to run. None if there is none.
        why_not: why there is no replay.
    """

    returned: Any
    replay: Callable[..., Any] | None
    why_not: str | None


def record(host_code: Callable[[], Any], inputs: Sequence[Tensor | None]) -> Recorded:
    """Run host code of these inputs, and write it down."""
    with _recording() as recorder:
        returned = host_code()
    if recorder.why_not is not None:
        return Recorded(returned, None, recorder.why_not)
    try:
        return Recorded(returned, _Writer(inputs).write(recorder.steps, returned), None)
    except NotReplayable as why_not:
        return Recorded(returned, None, str(why_not))


class _Writer:
    """Writes the function that replays what was recorded. `write` is called once.

    Values that aren't tensors become variables around it, which Python reads as fast as locals.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.inputs = inputs
        self.constants: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        # The tensor whose memory one is a part of, and where that begins in it.
        self.roots: dict[int, tuple[Tensor, int]] = {}
        self.lines: list[str] = []
        self.asked: list[Callable[[], bool]] = []
        self.allocated: set[str] = set()
        self.with_address: set[str] = set()

    def write(self, steps: Sequence[Operator | Launch], returned: Any) -> Callable[..., Any]:
        addresses = [t.data_ptr() for t in self.inputs if t is not None and t.numel()]
        if len(set(addresses)) < len(addresses) or any(address % ALIGNED for address in addresses):
            raise NotReplayable("an input is given twice, or isn't aligned")
        for number, tensor in enumerate(self.inputs):
            if tensor is None:
                continue
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise NotReplayable(f"an input is a {type(tensor).__name__}")
            self.names[id(tensor)], self.roots[id(tensor)] = f"i{number}", (tensor, 0)
        used = self._used(steps, returned)
        for step in steps:
            if isinstance(step, Launch):
                self._launch(step)
            elif any(id(result) in used for result in step.results):
                self._operator(step)
        result = self._expression(returned)
        inputs = ", ".join(f"i{number}" for number in range(len(self.inputs)))
        body = "\n  ".join([*self._guards(), *self.lines, f"return {result}"])
        source = f"def make({', '.join(self.constants)}):\n def replay({inputs}):\n  {body}\n return replay"
        space: dict[str, Any] = {}
        exec(source, space)
        return space["make"](**self.constants)

    def _used(self, steps: Sequence[Operator | Launch], returned: Any) -> set[int]:
        """The tensors by id that a replay needs: a view whose address alone is used is an offset."""
        for step in steps:
            if isinstance(step, Operator):
                for result in step.results:
                    self._root(step, result)
        used = {id(tensor) for tensor in _tensors(returned)}
        for step in reversed(steps):
            if isinstance(step, Launch):
                for tensor in _tensors(step.arguments):
                    if id(tensor) not in self.roots:
                        raise NotReplayable("a launch gets a tensor of elsewhere")
                    used.add(id(self.roots[id(tensor)][0] if step.addresses else tensor))
            elif any(id(result) in used for result in step.results):
                used.update(id(tensor) for tensor in _tensors((step.arguments, step.options)))
        return used

    def _root(self, step: Operator, result: Tensor) -> None:
        if step.allocates:
            self.roots[id(result)] = result, 0
            return
        if id(step.arguments[0]) not in self.roots:
            raise NotReplayable("a tensor of elsewhere is viewed")
        root, offset = self.roots[id(step.arguments[0])]
        self.roots[id(result)] = root, offset + result.data_ptr() - step.arguments[0].data_ptr()

    def _guards(self) -> list[str]:
        guards = [f"{self._constant(ask)}()" for ask in dict.fromkeys(self.asked)]
        there: list[str] = []
        for number, tensor in enumerate(self.inputs):
            if tensor is None:
                guards.append(f"i{number} is not None")
                continue
            there.append(f"i{number}")
            guards.append(f"i{number}.__class__ is not {self._constant(type(tensor))}")
            guards.append(f"i{number}.stride() != {self._constant(tensor.stride())}")
        asked = [f"if {' or '.join(guards)}: return None", *[f"p_{name} = {name}.data_ptr()" for name in there]]
        return [*asked, f"if ({' | '.join(f'p_{name}' for name in there)}) % {ALIGNED}: return None"]

    def _operator(self, step: Operator) -> None:
        names = [f"t{len(self.names) + number}" for number in range(len(step.results))]
        function = step.function
        if step.allocates:
            self.allocated.update(names)
        result = step.results[0]
        if step.allocates and "empty" in function._schema.name and result.is_contiguous():
            # A view of one element says shape, dtype and device, in less time than torch.empty is told them.
            like = torch.empty((), dtype=result.dtype, device=result.device).expand(result.shape)
            dense = self._constant(torch.contiguous_format)
            call = f"{self._constant(torch.empty_like)}({self._constant(like)}, memory_format={dense})"
        elif function is torch.ops.aten.view.default:
            call = f"{self._expression(step.arguments[0])}.view({self._expression(step.arguments[1])})"
        elif function is torch.ops.aten.detach.default and self._expression(step.arguments[0]) in self.allocated:
            call = self._expression(step.arguments[0])  # PyTorch detaches what it has allocated
            self.allocated.update(names)
        else:
            arguments = [self._expression(argument) for argument in step.arguments]
            arguments += [f"{name}={self._expression(option)}" for name, option in step.options.items()]
            call = f"{self._constant(function)}({', '.join(arguments)})"
        self.names.update({id(result): name for result, name in zip(step.results, names, strict=True)})
        self.lines.append(f"{', '.join(names)}{', ' if step.several else ''} = {call}")

    def _launch(self, step: Launch) -> None:
        if step.unless is not None:
            self.asked.append(step.unless)
        arguments = [self._expression(argument, step.addresses) for argument in step.arguments]
        self.lines.append(f"{self._constant(step.function)}({', '.join(arguments)})")

    def _expression(self, value: Any, address: bool = False) -> str:
        if isinstance(value, Tensor):
            if address:
                return self._address(value)
            if id(value) not in self.names:
                raise NotReplayable("a tensor of elsewhere")
            return self.names[id(value)]
        if type(value) is Each:
            return f"{self._constant(value.function)}({', '.join(map(self._constant, value.arguments))})"
        if isinstance(value, (tuple, list)) and any(isinstance(leaf, (Tensor, Each)) for leaf in _leaves(value)):
            kind = self._constant(type(value)) if hasattr(value, "_fields") else ""
            return f"{kind}({''.join(f'{self._expression(each, address)}, ' for each in value)})"
        return self._constant(value)

    def _address(self, tensor: Tensor) -> str:
        root, offset = self.roots[id(tensor)]
        name = self.names[id(root)]
        if name not in self.with_address and not name.startswith("i"):
            self.with_address.add(name)
            self.lines.append(f"p_{name} = {name}.data_ptr()")
        return f"p_{name} + {offset}" if offset else f"p_{name}"

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name


def _leaves(value: Any) -> Iterator[Any]:
    """Values in nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)) and type(value) is not Each:
        for each in value:
            yield from _leaves(each)
    elif type(value) is dict:
        yield from _leaves(list(value.values()))
    else:
        yield value


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
