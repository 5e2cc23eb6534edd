"""How each operation of Tile IR is encoded: its opcode, its name, and its fields in order.

A line of the table reads ``opcode name field field ...``. A field is one of

    R R*            the type of the result; a counted list of them
    [a,?b]          flag bits: an attribute, or whether the optional field b is there
    name:k          an attribute: e enumerator, i integer, b bool, s string, c constant, t tagged attribute,
                    h dictionary of hints, I integers of 32 bits, B bools, T tagged attributes
    name *name      an operand; a counted list of them
    G               regions
    ?field          there if its flag bit is set
    @field          since format 13.4

Opcodes of released operations do not change from one format to the next; `VERSIONS` are those that the table is true of.
"""

from __future__ import annotations

from typing import NamedTuple

VERSIONS = ("13.4", "13.3")
"""The formats that can be decoded, newest first."""

_TABLE = """
0 absf R x
1 absi R x
2 addf R [ftz] rounding:e a b
3 addi R overflow:e a b
4 andi R a b
5 assert message:s cond
6 assume R pred:t x
7 atomic_cas R R [?mask,?token] order:e scope:e ptr cmp val ?mask ?token
8 atomic_rmw R R [?mask,?token] order:e scope:e mode:e ptr arg ?mask ?token
9 bitcast R x
10 break R* *values
11 broadcast R x
12 cat R dim:i a b
13 ceil R x
14 cmpf R pred:e ordered:e a b
15 cmpi R pred:e signed:e a b
16 constant R value:c
17 continue R* *values
18 cos R x
19 cosh R x
20 divf R [ftz] rounding:e a b
21 divi R signed:e rounding:e a b
23 exp R rounding:e x
24 exp2 R [ftz] x
37 exti R signed:e x
38 extract R* *values
39 floor R x
40 fma R [ftz] rounding:e a b c
41 for R* [unsigned] *values G
42 ftof R rounding:e x
43 ftoi R @[saturating] signed:e rounding:e x
44 get_global R name:s
45 get_index_space_shape R* view
46 get_num_tile_blocks R R R
47 get_tensor_shape R* view
48 get_tile_block_id R R R
50 if R* cond G
51 int_to_ptr R x
58 iota R
59 itof R signed:e rounding:e x
60 join_tokens R* *values
61 load_ptr R R [?scope,?hints,?mask,?pad,?token] order:e ?scope:e ?hints:h ptr ?mask ?pad ?token
62 load_view R* [?scope,?hints,?token] order:e ?scope:e ?hints:h @inbounds:B view *index ?token
63 log R x
64 log2 R x
65 loop R* *values G
66 make_partition_view R view
67 make_tensor_view R* base *shape *strides
68 make_token R
69 maxf R [nan,ftz] a b
70 maxi R signed:e a b
71 minf R [nan,ftz] a b
72 mini R signed:e a b
73 mmaf R [fast] a b c
74 mmai R signed_a:e signed_b:e a b c
76 mulf R [ftz] rounding:e a b
77 mulhi R a b
78 muli R overflow:e a b
79 negf R x
80 negi R overflow:e x
81 offset R ptr off
82 ori R a b
83 permute R perm:I x
84 powf R a b
85 print R* [?token] fmt:s *args ?token
86 ptr_to_int R x
87 ptr_to_ptr R x
88 reduce R* dim:i identities:T *values G
89 remf R a b
90 remi R signed:e a b
91 reshape R x
92 return R* *values
93 rsqrt R [ftz] x
94 scan R* dim:i reverse:b identities:T *values G
95 select R cond a b
96 shli R overflow:e a b
97 shri R signed:e a b
98 sin R x
99 sinh R x
100 sqrt R [ftz] rounding:e x
101 store_ptr R [?scope,?hints,?mask,?token] order:e ?scope:e ?hints:h ptr val ?mask ?token
102 store_view R* [?scope,?hints,?token] order:e ?scope:e ?hints:h @inbounds:B val view *index ?token
103 subf R [ftz] rounding:e a b
104 subi R overflow:e a b
105 tan R x
106 tanh R rounding:e x
107 trunci R overflow:e x
108 xori R a b
109 yield R* *values
110 atan2 R a b
111 pack R x
112 unpack R x
113 alloca R [global] num:i align:i
114 mmaf_scaled R a b c scale_a scale_b
115 make_gather_scatter_view R view
116 make_strided_view R view
117 atomic_red_view R* [?token] order:e scope:e mode:e view *index val ?token
118 insert R* *values
119 gdc_launch_dependents R [?token] ?token
120 gdc_wait R [?token] ?token
121 powi R a b
122 memory_fence_alias R token
"""


class Field(NamedTuple):
    """A field of an encoded operation."""

    kind: str
    """result, results, flags, attribute, operand, operands, or regions."""
    names: tuple[str, ...] = ()
    """Names: of flags, all of them, "?x" for the presence of x; else one, or none."""
    code: str = ""
    """Letter of an attribute's type."""
    optional: bool = False
    since_13_4: bool = False


class Spec(NamedTuple):
    """An operation's name and fields."""

    name: str
    fields: tuple[Field, ...]


def _field(text: str) -> Field:
    since, text = text[0] == "@", text.removeprefix("@")
    if fixed := {"R": "result", "R*": "results", "G": "regions"}.get(text):
        return Field(fixed)
    if text[0] == "[":
        return Field("flags", tuple(text[1:-1].split(",")), since_13_4=since)
    if text[0] == "*":
        return Field("operands", (text[1:],))
    optional, text = text[0] == "?", text.removeprefix("?")
    name, _, code = text.partition(":")
    return Field("attribute" if code else "operand", (name,), code, optional, since)


def _parse(table: str) -> dict[int, Spec]:
    specs: dict[int, Spec] = {}
    for line in table.strip().splitlines():
        opcode, name, *fields = line.split()
        specs[int(opcode)] = Spec(name, tuple(_field(field) for field in fields))
    return specs


SPECS = _parse(_TABLE)
"""By opcode."""
