"""Numbers that each row reads one after the other, from key to key backwards, as a relative bias by distance is.

A thread would load one number for each score, from as many cache lines as a warp has rows. Here the four threads that
share a row load its run of 16-bit numbers in words, and each gives the others what their scores need.

A row's numbers are words before and at the one of its first key, whose place in a block of four words differs. Thread c
of a quad has word c of each block. Scores of eight columns need four words in a row, one for a thread's two columns, or
the lower half of it and the upper half of the word before.
"""

import os

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.products import PIECE, float32_each, joined, layout_of_piece
from quire.kernels.hopper.work_tile import ROWS

WIDE = gl.constexpr(os.environ.get("QV_WIDE", "0") == "1")


@gluon.constexpr_function
def run_text(keys, is_bfloat16, wide):
    """Return PTX that reads the numbers of scores. Its operand is the address of each row's number of the first key."""
    numbers, blocks = keys // 2, keys // 8
    lines = [
        ".reg .b32 lane, low, part, place, word, from0, from1, chosen, first, second, pick0, pick1, base; "
        ".reg .b64 block, more; .reg .pred odd, high, has, after0, after1, isodd;",
        f".reg .b32 w<{blocks + 4}>, a<{blocks + 4}>, s<4>;",
        "mov.u32 lane, %laneid; and.b32 part, lane, 3; and.b32 base, lane, 28;",
    ]
    for half in range(2):
        at = f"${numbers + 2 * half}"
        lines += [
            f"cvt.u32.u64 low, {at}; and.b32 low, low, 15; shr.u32 place, low, 2;",
            f"and.b64 block, {at}, -16;",
            "setp.ne.u32 has, low, 14;",  # whether the block after the last is read
            "setp.gt.u32 after0, part, place; setp.ge.u32 after1, part, place;",
            "sub.s32 from0, place, part; and.b32 from0, from0, 3; or.b32 from0, from0, base;",
            "sub.s32 from1, place, part; add.s32 from1, from1, -1; and.b32 from1, from1, 3; or.b32 from1, from1, base;",
            "and.b32 word, low, 2; setp.ne.u32 isodd, word, 0;",
            # of bytes: the first number's become the upper half of a float32, and the second's
            "selp.b32 pick0, 0x3244, 0x1044, isodd; selp.b32 pick1, 0x1044, 0x7644, isodd;"
        ]
        if wide:
            lines += [
                "shl.b32 word, part, 4; cvt.u64.u32 more, word; sub.s64 more, block, more;",
                "setp.ne.u32 odd, 0, 1; and.b32 word, part, 1; setp.ne.u32 odd, word, 0; setp.gt.u32 high, part, 1;",
            ]
            for i in range(blocks // 4):
                w = [f"w{4 * i + n}" for n in range(4)]
                lines.append(f"ld.global.v4.b32 {{{', '.join(w)}}}, [more+{-64 * i}];")
        lines += ["shl.b32 word, part, 2; cvt.u64.u32 more, word; add.s64 more, block, more;"]
        lines += [f"mov.b32 a{blocks}, 0; @has ld.global.b32 a{blocks}, [more+{-16 * blocks}];"]
        if wide:
            for i in range(blocks // 4):
                w = [f"w{4 * i + n}" for n in range(4)]
                a = [f"a{4 * i + n}" for n in range(4)]
                lines += [
                    f"selp.b32 s0, {w[0]}, {w[1]}, odd; shfl.sync.bfly.b32 s0, s0, 1, 0x1f, 0xffffffff; "
                    f"selp.b32 s1, {w[2]}, {w[3]}, odd; shfl.sync.bfly.b32 s1, s1, 1, 0x1f, 0xffffffff; "
                    f"selp.b32 {w[0]}, s0, {w[0]}, odd; selp.b32 {w[1]}, {w[1]}, s0, odd; "
                    f"selp.b32 {w[2]}, s1, {w[2]}, odd; selp.b32 {w[3]}, {w[3]}, s1, odd; "
                    f"selp.b32 s0, {w[0]}, {w[2]}, high; shfl.sync.bfly.b32 s0, s0, 2, 0x1f, 0xffffffff; "
                    f"selp.b32 s1, {w[1]}, {w[3]}, high; shfl.sync.bfly.b32 s1, s1, 2, 0x1f, 0xffffffff; "
                    f"selp.b32 {a[0]}, s0, {w[0]}, high; selp.b32 {a[1]}, s1, {w[1]}, high; "
                    f"selp.b32 {a[2]}, {w[2]}, s0, high; selp.b32 {a[3]}, {w[3]}, s1, high;"
                ]
        else:
            lines += [f"ld.global.b32 a{m}, [more+{-16 * m}];" for m in range(blocks)]
        for j in range(blocks):
            outs = [f"${4 * j + 2 * half + b}" for b in range(2)]
            lines += [
                f"selp.b32 chosen, a{j + 1}, a{j}, after0; shfl.sync.idx.b32 first, chosen, from0, 0x1f, 0xffffffff; "
                f"selp.b32 chosen, a{j + 1}, a{j}, after1; shfl.sync.idx.b32 second, chosen, from1, 0x1f, 0xffffffff; "
            ]
            if is_bfloat16:
                lines += [
                    f"mov.b32 word, 0; prmt.b32 {outs[0]}, first, word, pick0; "  # byte 4 is 0
                    f"selp.b32 second, first, second, isodd; selp.b32 word, 0x1044, 0x3244, isodd; "
                    f"mov.b32 low, 0; prmt.b32 {outs[1]}, second, low, word;"
                ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def pitch_of(keys):
    return 2 * keys + 16


@gluon.constexpr_function
def smem_text(keys, is_limited):
    numbers, each = keys // 2, PIECE.value // 2
    lines = [
        ".reg .b32 lane, low, part, at, to; .reg .b64 block, more; .reg .pred has, first; .reg .b16 zero, h; .reg .b32 off, size; .reg .pred in; .reg .b64 from;",
        "mov.u32 lane, %laneid; and.b32 part, lane, 3; mov.b16 zero, 0; setp.eq.u32 first, part, 0; "
        "bar.warp.sync 0xffffffff;",
    ]
    for half in range(2):
        address, to = f"${numbers + 2 * half}", f"${numbers + each + 2 * half}"
        lines += [
            f"cvt.u32.u64 low, {address}; and.b32 low, low, 15; and.b64 block, {address}, -16;",
            "setp.ne.and.u32 has, low, 14, first;",
            "shl.b32 at, part, 4; cvt.u64.u32 more, at; sub.s64 more, block, more; "
            f"sub.s32 to, {to}, at; add.s32 to, to, {2 * keys};",
        ]
        guard = ""
        if is_limited:
            begin, size = f"${numbers + 2 * each + 2 * half}", f"${numbers + 3 * each + 2 * half}"
            lines.append(f"sub.s64 from, more, {begin}; cvt.u32.u64 off, from; add.s32 off, off, 15; add.s32 size, {size}, 15;")
            guard = "@in "
        for i in range(keys // 32):
            if is_limited:
                lines.append("setp.lt.u32 in, off, size; add.s32 off, off, -64;")
            lines.append(f"{guard}cp.async.cg.shared.global [to+{-64 * i}], [more+{-64 * i}], 16;")
        if is_limited:
            lines.append("setp.lt.and.u32 has, off, size, has;")
        lines.append(f"@has cp.async.cg.shared.global [to+{-2 * keys}], [more+{-2 * keys}], 16;")
    lines.append("cp.async.wait_all; bar.warp.sync 0xffffffff;")
    for half in range(2):
        address, to = f"${numbers + 2 * half}", f"${numbers + each + 2 * half}"
        lines.append(f"cvt.u32.u64 low, {address}; and.b32 low, low, 15; shl.b32 at, part, 2; add.s32 to, {to}, low; "
                     f"sub.s32 to, to, at; add.s32 to, to, {2 * keys};")
        for j in range(keys // 8):
            for b in range(2):
                lines.append(f"ld.shared.u16 h, [to+{-16 * j - 2 * b}]; mov.b32 ${4 * j + 2 * half + b}, {{zero, h}};")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def smem_constraints(keys, is_limited):
    each = PIECE.value // 2
    return ",".join(["=&r"] * (keys // 2) + ["l"] * each + ["r"] * each + (["l"] * each + ["r"] * each) * is_limited)


@gluon.constexpr_function
def run_constraints(keys):
    """Return the constraints of `run_text`."""
    return ",".join(["=&r"] * (keys // 2) + ["l"] * (PIECE.value // 2))


@gluon.jit
def run_before(pointers, KEYS: gl.constexpr, scratch, begin=None, size=None):
    """Return what rows read, [ROWS, KEYS] in float32: of each, the number at its pointer, [ROWS, 1], and those before it."""
    LAYOUT: gl.constexpr = layout_of_piece()
    addresses = gl.convert_layout(pointers.to(gl.int64).reshape([ROWS]), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    addresses = addresses[:, None] + gl.zeros([ROWS, PIECE], gl.int64, LAYOUT)
    if scratch is None:
        parts = gl.inline_asm_elementwise(
            run_text(KEYS, pointers.dtype.element_ty == gl.bfloat16, WIDE), run_constraints(KEYS), (addresses,),
            dtype=float32_each(KEYS // PIECE), is_pure=False, pack=PIECE // 2,
        )  # fmt: skip
    else:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        to = scratch + rows * pitch_of(KEYS) + gl.zeros([ROWS, PIECE], gl.int32, LAYOUT)
        IS_LIMITED: gl.constexpr = begin is not None
        operands = (addresses, to)
        if IS_LIMITED:
            begin = gl.convert_layout(begin.to(gl.int64).reshape([ROWS]), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
            begin = begin[:, None] + gl.zeros([ROWS, PIECE], gl.int64, LAYOUT)
            operands = operands + (begin, 2 * size + gl.zeros([ROWS, PIECE], gl.int32, LAYOUT))
        parts = gl.inline_asm_elementwise(
            smem_text(KEYS, IS_LIMITED), smem_constraints(KEYS, IS_LIMITED), operands,
            dtype=float32_each(KEYS // PIECE), is_pure=False, pack=PIECE // 2,
        )  # fmt: skip
    return joined(parts, KEYS)
