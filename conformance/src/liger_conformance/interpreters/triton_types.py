"""Types in Triton's interpreter, kept instead of made anew.

Each value of a kernel has a type. Whenever an operation makes a value, the lengths of the type's shape are checked, wrapped as
constants, and written into the type's name. That takes a third of an interpreter's time. No release keeps them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def keep_numpy_types(interpreter: Any) -> None:
    """A table of all dtypes is made to look one up. All releases."""
    find = interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}

    @functools.wraps(find)
    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find(dtype.scalar)
        return numpy_types[name]

    interpreter._get_np_dtype = look_up


def keep_block_types(interpreter: Any) -> None:
    """The type of a block, and a value of it, are made from each length of their shape. All releases.

    Here what follows from the shape is made once. A type notes its lengths in `_lengths`.
    """
    core = interpreter.tl.core
    init_type, init_value = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}  # attributes by the name of an element's type, and lengths
    values: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.wraps(init_type)
    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = tuple([length.value if isinstance(length, core.constexpr) else length for length in shape])
        key = element_ty.name, *lengths
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = {**vars(self), "_lengths": lengths}
        vars(self).update(types[key])
        self.element_ty = element_ty  # a pointer's type, which may be another one of the same name

    @functools.wraps(init_value)
    def make_value(self: Any, handle: Any, type: Any) -> None:
        lengths = type._lengths if type.is_block() else ()
        if lengths not in values:
            init_value(self, handle, type)
            values[lengths] = {**vars(self), "handle": None}  # without an array
        vars(self).update(values[lengths])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.block_type.__init__ = make_type
    core.tensor.__init__ = make_value


def compare_at_once(interpreter: Any) -> None:
    """Types are compared by their names, and the shapes of two operands length by length, as constants. All releases.

    Here the same dtype is equal to itself, and two operands whose types have the same `_lengths` aren't broadcast.
    """
    dtype, semantic = interpreter.tl.core.dtype, interpreter.TritonSemantic
    are_equal, broadcast = dtype.__eq__, semantic.broadcast_impl_value

    @functools.wraps(are_equal)
    def are_one_or_equal(self: Any, other: Any) -> bool:
        return self is other or are_equal(self, other)

    @functools.wraps(broadcast)
    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        lengths = getattr(lhs.type, "_lengths", None)
        alike = lengths is not None and lengths == getattr(rhs.type, "_lengths", None)
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    dtype.__eq__ = are_one_or_equal
    semantic.broadcast_impl_value = broadcast_others


def keep_names_of_builtins(interpreter: Any) -> None:
    """Each launch sets the builtins of triton.language, and looks for them among all names of ten modules. All releases."""
    is_builtin, patch = interpreter.tl.core.is_builtin, interpreter._patch_attr
    builtins: dict[Any, list[str]] = {}

    @functools.wraps(interpreter._patch_builtin)
    def patch_builtins(module: Any, *how: Any) -> None:
        names = builtins.get(module) or [name for name, member in inspect.getmembers(module) if is_builtin(member)]
        for name in names:
            if is_builtin(member := getattr(module, name)):  # not yet set
                patch(module, name, member, *how)
        builtins[module] = names

    interpreter._patch_builtin = patch_builtins
