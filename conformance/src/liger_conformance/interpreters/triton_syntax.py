"""Repairs of Python's syntax in Triton's interpreter. It rewrites a kernel's syntax tree, then runs it as Python."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np


def repair_syntax(interpreter: Any) -> None:
    """Syntax that means something else on a device than in Python keeps Python's meaning. All releases.

    - The variable of `for i in range(...)` is a Python int: `i.to(tl.int64)` fails, and `i * x` promotes as if i were a
      constant. Until 3.6, and with numpy 2.4, a bound that is a tensor raises.
    - `a and b`, `a or b` and `not a` take every block for true: `mask_a and mask_b` is mask_b. On a device they are
      elementwise.
    - `if block:` is always taken. On a device it is a compile error, and so is `0 <= block < n` until 3.8.
    """
    import triton
    import triton.language as tl

    semantic = interpreter.interpreter_semantic
    tensor = cast("Any", tl.tensor)

    def interpreter_range(start: Any, stop: Any = None, step: Any = None, **_hints: Any) -> Iterator[Any]:
        first, end = (0, start) if stop is None else (start, stop)
        bounds = [semantic.to_tensor(bound) for bound in (first, end, 1 if step is None else step)]
        dtype = functools.reduce(semantic.integer_promote_impl, [bound.dtype for bound in bounds])
        np_dtype = interpreter._get_np_dtype(dtype)
        for value in range(*(int(bound.handle.data.item()) for bound in bounds)):
            yield tensor(interpreter.TensorHandle(np.array([value], np_dtype), dtype), dtype)

    def interpreter_and(*operands: Callable[[], Any]) -> Any:
        return combine(operands, absorbing=False, method="logical_and")

    def interpreter_or(*operands: Callable[[], Any]) -> Any:
        return combine(operands, absorbing=True, method="logical_or")

    # As the compiler does: a constant decides or drops out, and tensors are combined.
    def combine(operands: tuple[Callable[[], Any], ...], absorbing: bool, method: str) -> Any:
        tensors, constant = list[Any](), not absorbing
        for operand in operands:
            value = operand()
            if isinstance(value, tensor):
                tensors.append(value)
            elif bool(value) is absorbing:
                return value
            else:
                constant = value
        return functools.reduce(lambda left, right: getattr(left, method)(right), tensors) if tensors else constant

    def interpreter_not(value: Any) -> Any:
        return value.__not__() if isinstance(value, tensor) else not value

    def interpreter_truth(value: Any) -> bool:
        if isinstance(value, tensor) and value.handle.data.size != 1:
            shape = list(value.handle.data.shape)
            raise TypeError(f"a block of shape {shape} is neither true nor false: reduce it, or choose with tl.where")
        return bool(value)

    def call(function: Callable[..., Any], *arguments: ast.expr) -> ast.Call:
        return ast.Call(func=ast.Name(id=function.__name__, ctx=ast.Load()), args=[*arguments], keywords=[])

    class Transformer(interpreter.ASTTransformer):
        def visit_For(self, node: ast.For) -> ast.For:
            self.generic_visit(node)
            match node.iter:
                case ast.Call(func=ast.Name(id="range") | ast.Attribute(attr="range" | "parallel")):
                    node.iter.func = ast.Name(id=interpreter_range.__name__, ctx=ast.Load())
                case _:
                    pass
            return node

        def visit_BoolOp(self, node: ast.BoolOp) -> ast.Call:
            self.generic_visit(node)
            nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            operands = [ast.Lambda(args=nothing, body=value) for value in node.values]
            return call(interpreter_and if isinstance(node.op, ast.And) else interpreter_or, *operands)

        def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
            self.generic_visit(node)
            return call(interpreter_not, node.operand) if isinstance(node.op, ast.Not) else node

        def visit_test(self, node: Any) -> Any:
            self.generic_visit(node)
            node.test = call(interpreter_truth, node.test)
            return node

        visit_If = visit_While = visit_IfExp = visit_test

    class TransformerUntil38(Transformer):
        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            if len(node.ops) > 1:
                raise SyntaxError(
                    f"triton {triton.__version__} doesn't compile a chained comparison: {ast.unparse(node)}"
                )
            return self.generic_visit(node)

        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            node.value = self.visit(node.value)  # which upstream's leaves out
            return cast("ast.AST", super().visit_Assign(node))

    # A rewritten kernel sees the names of the interpreter's module.
    for function in (interpreter_range, interpreter_and, interpreter_or, interpreter_not, interpreter_truth):
        setattr(interpreter, function.__name__, function)
    chains = hasattr(interpreter.ASTTransformer, "visit_Compare")
    interpreter.FunctionRewriter.ast_transformer = Transformer() if chains else TransformerUntil38()
