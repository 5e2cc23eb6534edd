"""For the documentation's site: formulas in docstrings, typeset as MathML, which browsers draw without a script.

Docstrings write formulas as a terminal shows them, such as ``y = x · rsqrt(mean(x²) + eps)``. `typeset` finds them among the
words and sets them. Text that it can't read stays as it is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Set
from itertools import pairwise
from typing import NamedTuple

SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ᵢⱼₖₙₒₑ", "0123456789+−ijknoe", strict=True))
SUPERSCRIPTS = {"²": "2", "³": "3", "ᵀ": "T", "ⁿ": "n"}
FUNCTIONS = frozenset(
    ("exp", "log", "max", "min", "mean", "abs", "tanh", "softmax", "log_softmax", "rsqrt", "silu", "gelu", "act", "clip", "clamp",
     "rms_norm", "KL", "Sinkhorn", "cos", "sin")
)  # fmt: skip
WORDS = frozenset(("a", "an", "as", "at", "be", "by", "if", "in", "is", "it", "no", "of", "on", "or", "so", "to", "we"))
"""Words of two letters or one that are no variables."""

BINARY = {"+", "−", "·", "/", "//", "@", "×", "=", "<", ">", "≤", "≥", "‖", "<<", "|"}
OPEN, CLOSE = {"(": ")", "[": "]"}, {")": "(", "]": "["}
TOKEN = re.compile(
    r"(?P<code>``?[^`]+``?)"
    r"|(?P<prose>[A-Za-z]+(?:['’-][A-Za-z]+)+|[A-Za-z_.]+\.[A-Za-z_]+(?=\W))"
    r"|(?P<number>\d+(?:\.\d+)?(?:e\d+)?)"
    r"|(?P<sub>[₀-₉₊₋ᵢⱼₖₙₒₑ]+)|(?P<sup>[²³ᵀⁿ]+)"
    r"|(?P<name>(?:Σ|[^\W\d])\w*?(?=[₀-₉₊₋ᵢⱼₖₙₒₑ²³ᵀⁿ]|\b|$))"
    r"|(?P<operator>//|\.\.\.|[-+−·/@×=<>≤≥‖()\[\],:|√½…∞])"
    r"|(?P<space>\s+)|(?P<other>.)"
)


class Token(NamedTuple):
    """A piece of a docstring."""

    kind: str
    text: str


def typeset(text: str, names: Set[str]) -> str:
    """Text with its formulas as MathML. One that follows a colon and ends its sentence gets a line of its own.

    Args:
        text: Markdown.
        names: the words that are variables, such as an op's arguments; `defined` has those that a text makes.
    """
    tokens = [Token(str(found.lastgroup), found[0]) for found in TOKEN.finditer(text)]
    done: list[str] = []
    position = 0
    for start, end in runs(tokens, names):
        done += [token.text for token in tokens[position:start]]
        before = "".join(done[-3:]).rstrip()
        block = before.endswith(":") and (end == len(tokens) or tokens[end].text in ",.;")
        made = math(tokens[start:end], names, block=block)
        done.append(made or "".join(token.text for token in tokens[start:end]))
        position = end
        if made and block and end < len(tokens) and tokens[end].text in ",.;":
            position += 1  # no comma at the start of a line
    return "".join([*done, *(token.text for token in tokens[position:])])


def defined(text: str) -> set[str]:
    """The variables that a text defines: ``rstd`` in ``rstd = 1 / √(...)``."""
    found = re.findall(r"(?<![\w.])([^\W\d]\w*)(?=\s=\s)", text) + re.findall(r"\b(\w+) (?:is|are) the\b", text)
    return {word for word in found if word.lower() not in WORDS} | {"weight", "bias"}


def runs(tokens: list[Token], names: Set[str]) -> Iterator[tuple[int, int]]:
    """Where the formulas are."""
    at = 0
    while at < len(tokens):
        depth, end, last, equation = 0, at, at, False
        while end < len(tokens) and _belongs(tokens, end, names, depth, start=at):
            if tokens[end].text == "," and depth == 0 and not equation:
                break
            equation |= tokens[end].text == "=" and depth == 0
            depth += (tokens[end].text in OPEN) - (tokens[end].text in CLOSE)
            end += 1
            if depth == 0:
                last = end
        while last > at and (
            tokens[last - 1].kind == "space"
            or tokens[last - 1].text in (*BINARY, ",", ":")
            or _unfinished(tokens, last)
        ):
            last -= 1
        if last > at and _is_formula(tokens[at:last]):
            yield at, last
        at = max(last, at + 1)


def _belongs(tokens: list[Token], at: int, names: Set[str], depth: int, *, start: int) -> bool:
    """Whether a formula that begins at `start` may have this token."""
    kind, text = tokens[at]
    if kind in ("number", "sup"):
        return kind == "number" or at > start
    if kind == "sub":
        return at > start
    if kind == "space":
        return at > start
    if kind == "operator":
        if text in (",", ":", "-"):
            return at > start and (depth > 0 or (text == "," and _equation_follows(tokens, at)))
        if text in CLOSE:
            return depth > 0
        return True
    if kind != "name":
        return False
    if text in names or text in FUNCTIONS or text.startswith("Σ") or _base(text, names) is not None:
        return True
    if at + 1 < len(tokens) and tokens[at + 1].kind in ("sub", "sup"):
        return True
    if len(text) > 2 or text in ("A", "I") or text.lower() in WORDS:
        before = [token for token in tokens[start:at] if token.kind != "space"]
        return len(text) == 1 and bool(before) and before[-1].text != ","
    return True


def _equation_follows(tokens: list[Token], at: int) -> bool:
    """Whether a comma is followed by another equation, such as ``, y = ...``."""
    following = "".join(token.text for token in tokens[at + 1 : at + 10])
    return bool(re.match(r"\s\w+(\(\w\))?\s=\s", following))


def _unfinished(tokens: list[Token], end: int) -> bool:
    """Whether a formula would end in a function, before its bracket."""
    return tokens[end - 1].text in FUNCTIONS and end < len(tokens) and tokens[end].text == "("


def _is_formula(tokens: list[Token]) -> bool:
    """Whether so many tokens are worth setting: brackets match, and something is computed or compared."""
    stack: list[str] = []
    for token in tokens:
        if token.text in OPEN:
            stack.append(token.text)
        elif token.text in CLOSE and (not stack or stack.pop() != CLOSE[token.text]):
            return False
    operands = sum(token.kind in ("name", "number") for token in tokens)
    signs = any(token.text in BINARY or token.kind in ("sub", "sup") or token.text in "√½" for token in tokens)
    calls = any(a.text in FUNCTIONS and b.text == "(" for a, b in pairwise(tokens))
    return not stack and (operands > 1 or any(token.kind in ("sub", "sup") for token in tokens)) and (signs or calls)


def _base(word: str, names: Set[str]) -> tuple[str, str] | None:
    """``w_y`` as w with the index y, if it is none of the names."""
    base, _, index = word.rpartition("_")
    if word in names or word in FUNCTIONS or not base or not index:
        return None
    if base == "Σ" or len(base) == 1:
        return base, index
    head, _, rest = word.partition("_")
    if len(head) == 1:
        return head, rest
    return (base, index) if base in names or len(index) == 1 else None


def math(tokens: list[Token], names: Set[str], *, block: bool) -> str | None:
    """A formula as MathML, or None if it can't be read."""
    made = ""
    for part in _equations(tokens) if block else [tokens]:
        try:
            inside = _Reader([token for token in part if token.kind != "space"], names, fractions=block).sequence(None)
        except _Unreadable:
            return None
        alt = html.escape(re.sub(r"\s+", " ", "".join(token.text for token in part)).strip(), quote=True)
        display = ' display="block"' if block else ""
        made += f'<math{display} alttext="{alt}"><mrow>{inside}</mrow></math>'
    # Markdown takes a line that begins with <math> for a block of its own.
    return f'<span class="formula">{made}</span>'.replace("_", "&#95;").replace("*", "&#42;")


def _equations(tokens: list[Token]) -> list[list[Token]]:
    """Equations that commas divide, each for a line of its own."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in OPEN) - (token.text in CLOSE)
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


class _Unreadable(Exception):
    """The tokens are no formula."""


class _Reader:
    """Turns tokens into MathML from left to right; a product before ``/`` becomes a numerator, if fractions are allowed."""

    def __init__(self, tokens: list[Token], names: Set[str], *, fractions: bool) -> None:
        self.tokens, self.names, self.at, self.bars, self.fractions = tokens, names, 0, 0, fractions

    def peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else Token("end", "")

    def sequence(self, closing: str | None) -> str:
        """Terms with what stands between them, up to a closing bracket."""
        made: list[str] = []
        while (token := self.peek()).text != (closing or "") or token.kind != ("operator" if closing else "end"):
            if token.kind == "end" or token.text in CLOSE:
                raise _Unreadable
            if token.kind == "operator" and token.text not in (*OPEN, "√", "½", "‖", "…", "..."):
                self.at += 1
                if token.text in ("·", "×", "@", "/"):
                    raise _Unreadable
                made.append(f"<mo>{html.escape(token.text.replace('-', '−'))}</mo>")
            else:
                made.append(self.term())
        return "".join(made)

    def term(self) -> str:
        """A product. ``a · b / c`` is a fraction of ``a · b``."""
        factors = [self.juxtaposed()]
        while self.peek().text in ("·", "×", "@", "/", "//"):
            sign = self.peek().text
            self.at += 1
            following = self.juxtaposed()
            if sign == "/" and self.fractions:
                factors = [f"<mfrac><mrow>{_bare(factors)}</mrow><mrow>{_bare([following])}</mrow></mfrac>"]
            else:
                factors += ["<mo>⋅</mo>" if sign == "·" else f"<mo>{sign}</mo>", following]
        return "".join(factors)

    def juxtaposed(self) -> str:
        """Factors with nothing between them, such as ``log Σ exp x``."""
        factors = [self.factor()]
        while self.peek().kind in ("name", "number") or self.peek().text in (*OPEN, "√", "‖", "½"):
            if self.peek().text == "‖" and self.bars % 2:
                break
            gap = "" if self.peek().text in OPEN else '<mspace width="0.17em"/>'
            factors += [gap, self.factor()]
        return "".join(factors)

    def factor(self) -> str:
        """One operand with its indices and powers."""
        token = self.peek()
        self.at += 1
        if token.text in OPEN:
            inside = self.sequence(OPEN[token.text])
            self.at += 1
            made = f'<mrow class="group"><mo>{token.text}</mo>{inside}<mo>{OPEN[token.text]}</mo></mrow>'
        elif token.text == "√":
            made = f"<msqrt>{_bare([self.factor()])}</msqrt>"
        elif token.text == "½":
            made = "<mfrac><mn>1</mn><mn>2</mn></mfrac>"
        elif token.text == "‖":
            self.bars += 1
            made = '<mo stretchy="false">‖</mo>'
        elif token.text in ("−", "+"):
            made = f"<mo>{token.text}</mo>{self.factor()}"
        elif token.text in ("…", "..."):
            made = "<mo>…</mo>"
        elif token.kind == "number":
            made = f"<mn>{token.text}</mn>"
        elif token.kind == "name":
            made = self.name(token.text)
        else:
            raise _Unreadable
        indices = powers = ""
        while self.peek().kind in ("sub", "sup"):
            if self.peek().kind == "sub":
                indices += "".join(SUBSCRIPTS[sign] for sign in self.peek().text)
            else:
                powers += "".join(SUPERSCRIPTS[sign] for sign in self.peek().text)
            self.at += 1
        if indices:
            made = f"<msub><mrow>{made}</mrow><mtext>{indices}</mtext></msub>"
        return f"<msup><mrow>{made}</mrow><mtext>{powers}</mtext></msup>" if powers else made

    def name(self, word: str) -> str:
        """A variable or a function."""
        if word == "Σ":
            return '<mo largeop="false">∑</mo>'
        if split := _base(word, self.names):
            base, index = split
            return f"<msub>{self.name(base)}<mtext>{index}</mtext></msub>"
        return f"<mi>{word}</mi>" if len(word) == 1 else f'<mi mathvariant="normal">{word}</mi>'


GROUP = re.compile(r'<mrow class="group"><mo>\(</mo>(.*)<mo>\)</mo></mrow>')


def _bare(parts: list[str]) -> str:
    """What a fraction bar or a root holds needs no brackets around all of it."""
    whole = "".join(parts)
    found = GROUP.fullmatch(whole)
    # The brackets at both ends are one pair if no bracket inside is closed before it is opened.
    if found:
        depth = 0
        for sign in re.findall(r"<mo>([()])</mo>", found[1]):
            depth += 1 if sign == "(" else -1
            if depth < 0:
                return whole
        return found[1]
    return whole
