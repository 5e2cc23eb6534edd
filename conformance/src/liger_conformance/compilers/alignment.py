"""Address errors in NVIDIA programs, found in a disassembly.

Loads and stores whose addresses aren't aligned; and addresses of which a half is taken for an element.

An address is followed, for each thread of a block, through the instructions that compute it. Whatever else a program works on
counts as a multiple of every access's size: what a launch brings, what is loaded, and what takes more than additions,
products, shifts and logic. So an access that is found goes wrong in some thread, however aligned pointers, sizes and strides
are.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

_WORD = (1 << 32) - 1

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)([^;]*);", re.M)
_REGISTER = re.compile(r"([-~]?)(U?R(?:\d+|Z))((?:\.\w+)*)$")
_PREDICATE = re.compile(r"[!~]?U?P[0-9T]$")
_ADDRESS = re.compile(r"(?<![\w\]])\[([^\]]+)\]|desc\[\w+\]\[([^\]]+)\]")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}

_COMPARISONS = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}

# They lead elsewhere, or name a place where threads come from elsewhere.
_LEAD = ("BRA", "BRX", "BSSY", "CALL", "EXIT", "RET", "WARPSYNC")

# Instructions whose results follow from addresses. All other results are aligned.
_COMPUTE = ("S2R", "S2UR", "MOV", "R2UR", "SEL", "IADD3", "IADD", "VIADD", "IMAD", "LOP3", "LEA", "SHF")

# They write a register after a predicate. Others that begin with one write no register.
_AFTER_A_PREDICATE = ("SHFL", "LOP3", "ULOP3", "ATOM", "ATOMG", "ATOMS", "VOTE", "VOTEU", "ELECT", "MATCH", "R2UR")


class Bits(NamedTuple):
    """A word, one for all threads or one for each: the bits of `either` may be 0 or 1, the others are those of `known`."""

    known: Any = 0
    either: Any = 0
    unless: str = ""
    """A condition: where it is true, the register still has what it had `before`."""
    before: Bits | None = None
    met: bool = False
    """Two ways met with one of these each. Otherwise an instruction has written under a condition, whose users have it, too."""


_ALIGNED = Bits()
_TRUE, _UNKNOWN = Bits(1), Bits(0, 1)
_THREAD = Bits(np.arange(1024))
_BLOCK = Bits(0, _WORD)

_KNOWN = "@", "P", "UP"
"""How the names of conditions and predicates begin. One that a state doesn't name may be true or false."""

_State = dict[str, Bits]
"""What registers hold, by name, and predicates, in one bit. A condition that is known to be true has an entry as ``@!P0``."""


class _Instruction(NamedTuple):
    address: int
    text: str
    condition: str
    name: str
    kinds: tuple[str, ...]
    operands: tuple[str, ...]
    predicates: tuple[str, ...]
    """Those that it writes, or may write."""
    registers: tuple[str, ...]
    """Those that it writes."""
    sources: tuple[str, ...]
    """What the registers follow from; none if they are `_ALIGNED` whatever it is."""


def unaligned(sass: str) -> tuple[str, ...]:
    """The accesses whose addresses aren't multiples of their size in every thread.

    Args:
        sass: what cuobjdump prints of a program of one kernel.
    """
    found = set[str]()
    for instruction, state in _reached(_parsed(sass)):
        size = _size(instruction)
        for address in _ADDRESS.findall(instruction.text) if size else ():
            total = _ALIGNED
            for part in "".join(address).split("+"):
                total = _add(total, _value(part, state))
            if np.any((total.known | total.either) % size & -_maybe(instruction.condition, state)):
                found.add(instruction.text)
    return tuple(sorted(found))


def misread(sass: str) -> tuple[str, ...]:
    """Where a 16-bit element is taken from a register that holds half of an address.

    What a register holds is followed up to the next branch, or place where one leads.

    Args:
        sass: what cuobjdump prints of a program of one kernel.
    """
    program = _parsed(sass)
    places = {int(to, 16) for i in program if i.name in _LEAD for to in re.findall(r"0x[0-9a-f]+", i.text)}
    halves, found = set[str](), list[str]()
    for instruction in program:
        if instruction.address in places:
            halves.clear()
        operands = instruction.operands
        # With these tables PRMT takes one element of its first operand, for a lower half. The upper one stays what it was.
        takes = instruction.name == "PRMT" and operands[2] in ("0x7610", "0x7632") and operands[0] == operands[3]
        if takes and operands[1].removesuffix(".reuse") in halves:
            found.append(instruction.text)
        halves |= {f"R{int(first) + 1}" for first in re.findall(r"\]\[R(\d+)\.64", instruction.text)}
        halves.difference_update(instruction.registers)
        if instruction.name in _LEAD:
            halves.clear()
    return tuple(found)


def _parsed(sass: str) -> list[_Instruction]:
    return [_instruction(*parts) for parts in _INSTRUCTION.findall(sass)]


def _instruction(address: str, condition: str, name: str, kinds: str, rest: str) -> _Instruction:
    each, operands = tuple(kinds.split(".")[1:]), tuple(part.strip() for part in rest.split(","))
    # R2P writes those that bits of a number say.
    predicates = [f"P{number}" for number in range(7)] if name == "R2P" else operands[:3]
    after = operands[2 if _PREDICATE.match(operands[0]) else 1 :]
    return _Instruction(
        int(address, 16),
        " ".join((condition + name + kinds + rest).split()),
        condition.strip().removeprefix("@"),
        name,
        each,
        operands,
        tuple(filter(_PREDICATE.match, predicates)),
        _written(name, each, operands),
        tuple(part for part in after if not _PREDICATE.match(part)) if _computes(name, each) else (),
    )


def _computes(name: str, kinds: tuple[str, ...]) -> bool:
    """Whether what an instruction writes follows from addresses."""
    upper = "X" in kinds or (name.endswith("IMAD") and "HI" in kinds)  # of two words
    return name.removeprefix("U") in _COMPUTE and not upper


def _size(instruction: _Instruction) -> int:
    """Bytes that an access takes at once, to which it must be aligned: a word unless it says otherwise.

    0 for what is none, and for a word under a condition: one thread of a warp has it, whose address alone is right.
    """
    if instruction.name in ("LDSM", "STSM"):
        return 16
    if instruction.name not in ("LD", "LDG", "LDS", "ST", "STG", "STS", "LDGSTS"):
        return 0
    return next((_BYTES[kind] for kind in instruction.kinds if kind in _BYTES), 0 if instruction.condition else 4)


def _reached(program: list[_Instruction]) -> Iterator[tuple[_Instruction, _State]]:
    """Each instruction, and what registers may hold before it, by whichever way a thread came there."""
    places = {instruction.address: place for place, instruction in enumerate(program)}
    after = [_following(instruction, place, places, len(program)) for place, instruction in enumerate(program)]
    starts = {0}
    for place, following in enumerate(after):
        if following != (place + 1,):
            starts |= {*following, place + 1}
    entered: dict[int, _State] = {0: {}}
    waiting = [0]  # a heap: what leads to a place has mostly been looked at before it
    while waiting:
        place = heapq.heappop(waiting)
        state = dict(entered[place])
        _run(program[place], state)
        while place + 1 not in starts:
            place += 1
            _run(program[place], state)
        for following, condition in zip(after[place], _conditions(program[place]), strict=False):
            there = {**state, f"@{condition}": _ALIGNED} if condition else dict(state)
            if following not in entered:
                entered[following] = there
                heapq.heappush(waiting, following)
            elif _widen(entered[following], there) and following not in waiting:
                heapq.heappush(waiting, following)
    for place, state in entered.items():
        yield program[place], state
        _run(program[place], state)
        while place + 1 not in starts:
            place += 1
            yield program[place], state
            _run(program[place], state)


def _following(instruction: _Instruction, place: int, places: dict[int, int], end: int) -> tuple[int, ...]:
    """Where a program may go on after an instruction."""
    on = (place + 1,) if place + 1 < end else ()
    if instruction.name in ("EXIT", "RET"):
        return on if instruction.condition else ()
    target = instruction.operands[-1].rpartition(" ")[2]
    if instruction.name not in ("BRA", "CALL", "WARPSYNC") or not target.startswith("0x"):
        return on
    if instruction.name == "WARPSYNC" and len(instruction.operands) == 1:  # a mask, and no target
        return on
    always = instruction.name == "BRA" and not instruction.condition and len(instruction.operands) == 1
    return (places[int(target, 16)],) if always else (places[int(target, 16)], *on)


def _conditions(last: _Instruction) -> tuple[str, str]:
    """Condition that is true at each place where a program may go on after an instruction; empty if unknown."""
    if last.name == "BRA" and len(last.operands) == 1:
        return last.condition, _opposite(last.condition)
    return "", ""


def _opposite(condition: str) -> str:
    return condition and (condition.removeprefix("!") if condition.startswith("!") else f"!{condition}")


def _widen(state: _State, other: _State) -> bool:
    """Let a state hold what another holds, too; whether it didn't. A register that one doesn't name may hold the other's.

    What is known to be true has to be so in both. A register to which it matters has what it has where that is known, unless it
    matters in both alike. Where the opposite is known in the other, which of the two a register has is known from then on.
    """
    lost = [name for name in state if name.startswith(_KNOWN) and name not in other]
    apart = next((name[1:] for name in lost if f"@{_opposite(name[1:])}" in other), "")
    for register, bits in state.items():
        if f"@{bits.unless}" in lost and other.get(register, _ALIGNED).unless != bits.unless:
            state[register] = _held(register, state)
    for name in lost:
        del state[name]
    changed = bool(lost)
    for register, bits in other.items():
        held = state.get(register)
        if held is bits or (register.startswith(_KNOWN) and (held is None or register.startswith("@"))):
            continue
        if held is None or (held.unless, held.met) != (bits.unless, bits.met):
            bits = _held(register, other)
        if held is None:
            state[register], changed = bits, True
            continue
        if apart and not held.before and not bits.before and _finest(held) != _finest(bits):
            state[register], changed = Bits(bits.known, bits.either, apart, held, True), True
            continue
        side = _side(held, other) if held.met and not bits.before else ""
        joined = None if side == "before" else _joined(held, bits)
        now = held._replace(known=joined.known, either=joined.either) if joined else held
        if held.before and (bits.before or side):
            before = None if side == "now" else _joined(held.before, bits.before or bits)
            if joined or before:
                state[register], changed = now._replace(before=before or held.before), True
        elif joined or held.before:
            state[register], changed = _plain(now), True
    return changed


def _side(held: Bits, state: _State) -> str:
    """Which of the two that a register holds is that of a state; empty if the state doesn't tell."""
    if f"@{held.unless}" in state:
        return "before"
    return "now" if f"@{_opposite(held.unless)}" in state else ""


def _finest(bits: Bits) -> int:
    """The lowest bit that may be set, in any thread."""
    may = bits.known | bits.either
    return _lowest(may if isinstance(may, int) else int(np.bitwise_or.reduce(may)))


def _plain(bits: Bits) -> Bits:
    """Bits of a register if the condition isn't known: either of the two, if two ways met."""
    return (bits.met and bits.before and _joined(bits, bits.before)) or Bits(bits.known, bits.either)


def _joined(held: Bits, other: Bits) -> Bits | None:
    """Bits of `held` or `other`; None if `held` covers both. If `other` may hold, bits above the lowest may be either.

    A loop would come to that in the end.
    """
    if not _any((other.either | (held.known ^ other.known)) & ~held.either):
        return None
    both = _either(held, other)
    above = -_lowest(both.either) & _WORD
    return Bits(both.known & ~above, above)


def _run(instruction: _Instruction, state: _State) -> None:
    """Update the registers of a state as an instruction does."""
    compared = _compared(instruction, state)
    for predicate in instruction.predicates:
        state.pop(predicate, None)
        state.pop(f"@{predicate}", None)
        state.pop(f"@!{predicate}", None)
        for register, bits in state.items():
            if bits.unless and bits.unless.removeprefix("!") == predicate:
                state[register] = _plain(bits)
    if compared and instruction.operands[0] != "PT":
        state[instruction.operands[0]] = compared
    if not instruction.registers:
        return
    first, *others = instruction.registers
    result = _result(instruction, state) if instruction.sources else _ALIGNED
    # Also under a condition: what uses it has the same, or a copy, or comes after a branch that has it.
    if instruction.condition:
        before = _held(first, state)
        result = Bits(result.known, result.either, _opposite(instruction.condition), Bits(before.known, before.either))
    state[first] = result
    for register in others:
        state[register] = _ALIGNED


def _written(name: str, kinds: tuple[str, ...], operands: tuple[str, ...]) -> tuple[str, ...]:
    """The registers that an instruction writes."""
    if _PREDICATE.match(operands[0]):
        if name not in _AFTER_A_PREDICATE:
            return ()
        operands = operands[1:]
    if not operands or not (target := _REGISTER.match(operands[0])) or target[2].endswith("Z"):
        return ()
    bank, first = target[2].rstrip("0123456789"), int(target[2].lstrip("UR"))
    return tuple(f"{bank}{number}" for number in range(first, first + _words(name, kinds)))


def _words(name: str, kinds: tuple[str, ...]) -> int:
    """How many registers an instruction writes."""
    if name == "CS2R":
        return 1 if "32" in kinds else 2
    return max([1, 2 * ("WIDE" in kinds), *(_BYTES.get(kind, 0) // 4 for kind in kinds)])


def _result(instruction: _Instruction, state: _State) -> Bits:
    """The word that an instruction writes, or the lower of two."""
    name, kinds, operands = instruction.name, instruction.kinds, instruction.sources
    if name in ("S2R", "S2UR"):
        return _THREAD if operands[0] == "SR_TID.X" else _BLOCK if operands[0].startswith("SR_CTAID") else _ALIGNED
    values = [_value(operand, state) for operand in operands]
    match name.removeprefix("U"), values:
        case (("MOV" | "R2UR"), [a, *_]):
            return a
        case "SEL", [a, b]:
            return _either(a, b)
        case (("IADD3" | "IADD" | "VIADD"), _):
            total = _ALIGNED
            for value in values:
                total = _add(total, value)
            return total
        case "IMAD", [a, b, c]:
            return _add(_product(a, b), c)
        case "LOP3", [a, b, c, table]:
            return _logic(a, b, c, table.known)
        case "LEA", [a, b, by] if "HI" not in kinds:
            return _add(_left(a, by), b)
        case "LEA", [a, b, _, by] if operands[2].endswith("RZ"):
            return _add(_right(a, Bits(32 - by.known)), b)
        case "SHF", [a, by, _] if "L" in kinds and "HI" not in kinds:
            return _left(a, by)
        case "SHF", [_, by, c] if "R" in kinds and "HI" in kinds:
            return _right(c, by)
        case "SHF", [a, by, _] if "R" in kinds and operands[2].endswith("RZ"):
            return _right(a, by)
        case _:
            return _ALIGNED


def _compared(instruction: _Instruction, state: _State) -> Bits | None:
    """The predicate that an instruction writes first, for each thread, if it follows from the thread's number."""
    operands, kinds = instruction.operands, instruction.kinds
    if instruction.condition:
        return None
    match instruction.name, operands:
        case (("PLOP3" | "UPLOP3"), [_, _, a, b, c, table, *_]):
            return _logic(_predicate(a, state), _predicate(b, state), _predicate(c, state), int(table, 16))
        case "ISETP", [_, _, a, b, c] if "EX" not in kinds and kinds[0] in _COMPARISONS:
            number, limit = _value(a, state), _value(b, state)
            compared = _UNKNOWN
            # Another number than a thread's may be any that is loaded, or that a launch brings.
            if np.ndim(number.known) and not _any(number.either) and re.match("RZ|0x", b):
                compared = Bits(_COMPARISONS[kinds[0]](number.known, limit.known) * 1)
            return _logic(compared, _predicate(c, state), _TRUE, 0xC0 if "AND" in kinds else 0xFC)
        case _:
            return None


def _predicate(operand: str, state: _State) -> Bits:
    name = operand.lstrip("!~")
    bits = _TRUE if name in ("PT", "UPT") else state.get(name, _UNKNOWN)
    return bits if operand == name else Bits(~(bits.known | bits.either), bits.either)


def _maybe(condition: str, state: _State) -> Any:
    """For each thread, 1 if a condition may be true, otherwise 0."""
    bits = _predicate(condition or "PT", state)
    return (bits.known | bits.either) & 1


def _held(register: str, state: _State) -> Bits:
    bits = state.get(register, _ALIGNED)
    if not bits.before:
        return bits
    side = _side(bits, state)
    if side == "before":
        return bits.before
    return _plain(bits) if bits.met and not side else bits


@functools.lru_cache(maxsize=1 << 16)
def _operand(text: str) -> Bits | tuple[str, str, tuple[str, ...]]:
    """Bits of an operand; or, if it is a register, its sign, its name and its kinds."""
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return Bits(int(text, 16) & _WORD)
    if not (register := _REGISTER.match(text)):
        return _ALIGNED
    sign, name, kinds = register.groups()
    return sign, name, tuple(kinds.split(".")[1:])


def _value(operand: str, state: _State) -> Bits:
    """Bits of an operand."""
    found = _operand(operand)
    if isinstance(found, Bits):
        return found
    sign, name, kinds = found
    bits = _held(name, state)
    for kind in kinds:
        if kind.startswith("X"):  # of an address: times so many
            bits = _product(bits, Bits(int(kind[1:])))
        elif kind not in ("reuse", "64", "U32"):
            return _ALIGNED
    if sign:
        bits = Bits(~(bits.known | bits.either) & _WORD, bits.either)
    return _add(bits, Bits(1)) if sign == "-" else bits


def _any(bits: Any) -> bool:
    """np.any, which takes long for a number."""
    return bits != 0 if isinstance(bits, int) else bool(np.any(bits))


def _either(a: Bits, b: Bits) -> Bits:
    either = a.either | b.either | (a.known ^ b.known)
    return Bits(a.known & ~either, either)


def _add(a: Bits, b: Bits) -> Bits:
    """A bit of a sum may be either where one of the two may be, or what is carried there."""
    least = a.known + b.known
    either = (least ^ (least + a.either + b.either)) | a.either | b.either
    return Bits(least & ~either & _WORD, either & _WORD)


def _product(a: Bits, b: Bits) -> Bits:
    if not _any(a.either) and not _any(b.either):
        return Bits(a.known * b.known & _WORD)
    return Bits(0, -(_lowest(a.known | a.either) * _lowest(b.known | b.either)) & _WORD)


def _lowest(word: Any) -> Any:
    """The lowest bit of a word that is set, if one is."""
    return word & -word


def _left(a: Bits, by: Bits) -> Bits:
    return _product(a, Bits(0, _WORD) if _any(by.either) else Bits(1 << _at_most_a_word(by.known)))


def _right(a: Bits, by: Bits) -> Bits:
    if _any(by.either):
        return Bits(0, _WORD) if _any(a.known | a.either) else _ALIGNED
    places = _at_most_a_word(by.known)
    return Bits(a.known >> places, a.either >> places)


def _at_most_a_word(places: Any) -> Any:
    return min(places, 32) if isinstance(places, int) else np.minimum(places, 32)


def _logic(a: Bits, b: Bits, c: Bits, table: int) -> Bits:
    """LOP3's result for each three bits: the bit of its table whose number they are."""
    ones = zeros = 0
    for case in range(8):
        here = _WORD
        for bits, place in ((a, 2), (b, 1), (c, 0)):
            here &= bits.either | (bits.known if case >> place & 1 else ~bits.known)
        if table >> case & 1:
            ones |= here
        else:
            zeros |= here
    return Bits(ones & ~zeros, ones & zeros)
