"""Address errors are found in the words of a disassembly."""

from __future__ import annotations

import pytest

from liger_conformance.compilers.alignment import misread, unaligned


def disassembly(*lines: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/  {line} ;   /* 0x000000 */\n" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    ("address", "access", "right"),
    [
        ("IMAD.SHL.U32 R2, R0, 0x8, RZ", "LDG.E.64 R4, desc[UR4][R2.64]", True),
        ("IMAD.SHL.U32 R2, R0, 0x4, RZ", "LDG.E.64 R4, desc[UR4][R2.64]", False),
        ("IMAD.SHL.U32 R2, R0, 0x4, RZ", "LDG.E R4, desc[UR4][R2.64]", True),
        ("IMAD.SHL.U32 R2, R0, 0x2, RZ", "LDG.E R4, desc[UR4][R2.64]", False),
        ("SHF.R.U32.HI R2, RZ, 0x3, R0", "@!P0 STS [R2], R4", True),  # by every 32nd thread
        ("IMAD.SHL.U32 R2, R0, 0x2, RZ", "LDG.E.U16 R4, desc[UR4][R2.64]", True),
        ("IMAD.IADD R2, R0, 0x1, RZ", "LDG.E.U8 R4, desc[UR4][R2.64]", True),
        ("IMAD.SHL.U32 R2, R0, 0x10, RZ", "LDG.E.128 R4, desc[UR4][R2.64+0x10]", True),
        ("IMAD.SHL.U32 R2, R0, 0x10, RZ", "LDG.E.128 R4, desc[UR4][R2.64+-0x8]", False),
        ("IMAD.WIDE.U32 R2, R0, 0x10, R6", "@!P0 STG.E.128 desc[UR4][R2.64], R4", True),
        ("LEA R2, R0, UR4, 0x3", "STS.128 [R2+UR6+0x400], R4", False),
        ("LEA.HI R2, R0, R6, RZ, 0x1f", "LDS.64 R4, [R2]", False),  # half of the thread's number
        ("SHF.R.U32.HI R2, RZ, 0x7, R0", "LDS.64 R4, [R2.X8]", True),
        ("SHF.R.U32.HI R2, RZ, 0x7, R0", "LDS.64 R4, [R2.X4]", False),
        ("LOP3.LUT R2, R0, 0x3f8, RZ, 0xc0, !PT", "LDS.64 R4, [R2]", True),
        ("LOP3.LUT R2, R0, 0x3fc, RZ, 0xc0, !PT", "LDS.64 R4, [R2]", False),
        ("LOP3.LUT R2, R0, 0x7, R0, 0x30, !PT", "LDS.64 R4, [R2]", True),  # a & ~b
        ("IADD3 R2, P1, R0, -R0, RZ", "LDS.64 R4, [R2]", True),
        ("IMAD R2, R0, c[0x0][0x220], RZ", "LDG.E.64 R4, desc[UR4][R2.64]", True),  # strides may be aligned
    ],
)
def test_addresses(address: str, access: str, right: bool) -> None:
    accesses = unaligned(disassembly("S2R R0, SR_TID.X", address, access, "EXIT"))
    assert accesses == (() if right else (access,))


def test_sums_are_those_of_each_thread() -> None:
    """Twice a multiple of 8 is one of 16."""
    lines = "S2R R0, SR_TID.X", "IMAD.SHL.U32 R2, R0, 0x8, RZ", "IMAD.IADD R3, R2, 0x1, R2", "LDS.128 R4, [R3]", "EXIT"
    assert unaligned(disassembly(*lines)) == ()


def test_what_a_loop_adds_up() -> None:
    for step, right in (("0x8", True), ("0x4", False)):
        lines = ("MOV R2, RZ", "LDS.64 R4, [R2]", f"VIADD R2, R2, {step}", "@P0 BRA 0x10", "EXIT")
        assert (unaligned(disassembly(*lines)) == ()) == right


def test_what_is_not_reached_is_not_read() -> None:
    access = "LDS.64 R4, [0x4]"
    assert unaligned(disassembly("BRA 0x20", access, "EXIT")) == ()
    assert unaligned(disassembly("@P0 BRA 0x20", access, "EXIT")) == (access,)


def test_a_load_ends_what_is_known_of_its_registers() -> None:
    lines = "S2R R5, SR_TID.X", "LDG.E.64 R4, desc[UR4][R2.64]", "LDS.64 R6, [R5]", "EXIT"
    assert unaligned(disassembly(*lines)) == ()


def test_a_mask_of_threads_is_no_place() -> None:
    """On sm_80 threads wait for those of a mask, elsewhere for others at a place."""
    access = "LDS.64 R4, [0x4]"
    assert unaligned(disassembly("WARPSYNC 0xffffffff", access, "EXIT")) == (access,)
    assert unaligned(disassembly("WARPSYNC.COLLECTIVE R4, 0x20", "EXIT", access, "EXIT")) == (access,)


def test_what_a_condition_keeps_from_an_access() -> None:
    """A program of which a branch takes the condition of an earlier instruction; and what changes that condition between."""
    access = "LDS.64 R4, [R2]"
    for between, right in (("NOP", True), ("ISETP.EQ.AND P0, PT, R6, RZ, PT", False)):
        lines = ("@P0 MOV R2, 0x4", between, "@!P0 BRA 0x40", "MOV R2, 0x8", access, "EXIT")
        assert unaligned(disassembly(*lines)) == (() if right else (access,))
    lines = ("@P0 MOV R2, 0x4", "@P0 BRA 0x30", "MOV R2, 0x8", access, "EXIT")
    assert unaligned(disassembly(*lines)) == (access,)


@pytest.mark.parametrize(
    ("before", "way", "between", "other", "right"),
    [
        ("S2R R2, SR_TID.X", "@!P3 BRA 0x30", "NOP", "MOV R2, 0x8", True),
        ("S2R R2, SR_TID.X", "@!P3 BRA 0x30", "ISETP.EQ.AND P3, PT, R6, RZ, PT", "MOV R2, 0x8", False),
        ("S2R R2, SR_TID.X", "@!P2 BRA 0x30", "NOP", "MOV R2, 0x8", False),
        ("S2R R2, SR_TID.X", "@P3 BRA 0x30", "NOP", "MOV R2, 0x8", False),
        ("S2R R2, SR_TID.X", "@!P3 BRA 0x30", "VIADD R2, R2, 0x4", "MOV R2, 0x8", False),
        ("MOV R2, 0x8", "@P3 BRA 0x30", "NOP", "S2R R2, SR_TID.X", True),
        ("MOV R2, 0x8", "@!P3 BRA 0x30", "NOP", "S2R R2, SR_TID.X", False),
    ],
)
def test_ways_that_meet_and_part_again(before: str, way: str, between: str, other: str, right: bool) -> None:
    """By the same condition: what one of them brings never comes to the other."""
    access = "LDS.64 R4, [R2]"
    lines = before, way, other, between, "@!P3 BRA 0x60", access, "EXIT"
    assert unaligned(disassembly(*lines)) == (() if right else (access,))


def test_ways_that_meet_in_a_loop() -> None:
    access = "LDS.64 R4, [R2]"
    for other, right in (("MOV R2, 0x8", True), ("VIADD R2, R2, 0x8", False)):
        lines = (
            *("MOV R2, RZ", "@!P3 BRA 0x30", other, "NOP", "@!P3 BRA 0x60", access),
            *("VIADD R2, R2, 0x4", "@P1 BRA 0x10", "EXIT"),
        )
        assert unaligned(disassembly(*lines)) == (() if right else (access,))


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (("PRMT R0, R5.reuse, 0x7610, R0",), True),
        (("PRMT R0, R5, 0x7632, R0",), True),
        (("PRMT R0, R4, 0x7632, R0",), False),  # what was loaded
        (("PRMT R0, R5, 0x5410, R0",), False),  # puts two elements together
        (("PRMT R0, R6, 0x7610, R5",), False),
        (("LDG.E R5, desc[UR30][R8.64]", "PRMT R0, R5, 0x7610, R0"), False),
        (("LDG.E.64 R4, desc[UR30][R8.64]", "PRMT R0, R5, 0x7610, R0"), False),
        (("@P1 BRA 0x20", "PRMT R0, R5, 0x7610, R0"), False),  # not followed so far
    ],
)
def test_elements_that_are_half_of_an_address(lines: tuple[str, ...], wrong: bool) -> None:
    text = disassembly("LDG.E.U16 R4, desc[UR30][R4.64]", *lines, "EXIT")
    assert misread(text) == (lines[-1:] if wrong else ())


def test_what_is_known_of_a_condition_ends_where_other_threads_come() -> None:
    """After both ways round, the condition that a load has is that of the instruction which made its address."""
    access = "LDS.64 R4, [R2]"
    start = "MOV R2, 0x4", "@P0 MOV R2, 0x8", "@!P0 BRA 0x40", "NOP"
    for last, right in (("@!P0 BRA 0x60", True), ("@P0 BRA 0x60", False)):
        assert unaligned(disassembly(*start, last, access, "EXIT")) == (() if right else (access,)), last


@pytest.mark.parametrize(
    ("condition", "right"),
    [
        ("ISETP.NE.U32.AND P0, PT, R3, RZ, PT", True),  # off in all threads but the first eight
        ("ISETP.NE.U32.OR P0, PT, R3, RZ, P1", True),
        ("ISETP.NE.U32.AND P0, PT, R3, RZ, P1", False),  # P1 may be false
        ("ISETP.EQ.U32.AND P0, PT, R3, RZ, PT", False),
        ("ISETP.NE.U32.AND P0, PT, R3, UR4, PT", False),  # UR4 may be any number
    ],
)
def test_threads_that_a_condition_leaves_out(condition: str, right: bool) -> None:
    """Each of the first eight threads stores 16 bytes. The others would store at four bytes more, and so on."""
    access = "@!P0 STG.E.128 desc[UR4][R2.64], R4"
    lines = (
        "S2R R0, SR_TID.X",
        "SHF.R.U32.HI R3, RZ, 0x3, R0",
        "IMAD.SHL.U32 R2, R0, 0x4, RZ",
        "LOP3.LUT R2, R2, 0x1c, RZ, 0xc0, !PT",
        condition,
        "IMAD.IADD R2, R2, 0x1, R3",
        "IMAD.SHL.U32 R2, R2, 0x4, RZ",
        access,
        "EXIT",
    )
    assert unaligned(disassembly(*lines)) == (() if right else (access,))


def test_predicates_that_follow_from_others() -> None:
    access = "@P2 LDS.64 R4, [R2]"
    lines = "S2R R0, SR_TID.X", "ISETP.GE.U32.AND P0, PT, R0, 0x1, PT", "IMAD.SHL.U32 R2, R0, 0x4, RZ"
    for between, table, right in (("NOP", "0x0c", True), ("NOP", "0xc0", False), ("R2P PR, R6, 0x9", "0x0c", False)):
        last = between, f"PLOP3.LUT P2, PT, P0, P1, PT, {table}, 0x0", access, "EXIT"  # ~a & b, and a & b
        assert unaligned(disassembly(*lines, *last)) == (() if right else (access,))
