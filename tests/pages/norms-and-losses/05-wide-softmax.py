"""What must hold of the page "Softmax over a million columns"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    y = page.Softmax.apply(x, False, dtype, ("slices", "slices"))
    torch.autograd.grad(y, x, dy)
    page.in_shifted(x.detach())
    page.backward(page.forward(x.detach()), dy)
    x, dy = page.inputs(M, 4096, dtype)
    page.backward(
        page.forward(x.detach(), plan=page.tile_of(4096, x.itemsize, 1)), dy
    )


def also(page, M, N, dtype):
    for n in 301, 50257:
        x, dy = page.inputs(5, n, dtype)
        for log in False, True:
            y = page.Softmax.apply(x, log, dtype, ("shifted", "slices"))
            torch.autograd.grad(y, x, dy)
        y = page.Softmax.apply(x, True, torch.float32, ("slices", "slices"))
        torch.autograd.grad(y, x, dy.float())


def slices(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    y = page.Softmax.apply(x, False, dtype, ("slices", "slices"))
    torch.autograd.grad(y, x, dy)


def log(page, M, N, dtype):
    x, dy = page.inputs(M, N, dtype)
    y = page.Softmax.apply(x, True, dtype, ("slices", "slices"))
    torch.autograd.grad(y, x, dy)


def shifted(page, M, N, dtype):
    page.in_shifted(page.inputs(M, N, dtype)[0].detach())


WIDE = {
    "bfloat16": [49152, 50257, 65536, 100003, 131072, 262144, 524288, 1048576],
    "float16": [65536, 131072],
    "float32": [32768, 100003, 262144],
}  # fmt: skip


def no_spills(code):
    return [code.spills == 0 or code.target != "sm_90"]


KERNELS = Kernels(
    run=run,
    also=also,
    M=1024,
    N=[131072],
    dtype="bfloat16",
    sizes={
        "bfloat16": [131072],
    },
    kernels={
        "_softmax_fwd": Kernel(
            look="That of page 03: look there.",
            true=no_spills,
        ),
        "_softmax_bwd": Kernel(
            look="That of page 03: look there.",
            true=no_spills,
        ),
        "_softmax_fwd_streaming": Kernel(
            look="That of page 03: look there.",
            true=no_spills,
        ),
        "_softmax_bwd_streaming": Kernel(
            look="""
            That of page 03.
            A thread has 32 columns of both matrices at a time, and spills some
            of them.
            """,
            true=lambda code: [
                code.spills > 0 or code.target not in ("sm_80", "sm_90")
            ],
            spills=256,
        ),
        "_softmax_fwd_shifted": Kernel(
            look="""
            Two loops, each with loads of 16 bytes.
            On sm_90 a thread has more than 32 registers: one program of 1024
            threads fits on a multiprocessor, two of narrower rows.
            """,
            true=lambda code: [
                code.narrow("load") == 0 or code.amd,  # whose warps are wider
                code.registers > 32 or code.target != "sm_90",
            ],
            narrow_stores=24,  # single columns at both ends of a row
        ),
        "_softmax_fwd_shared": Kernel(
            look="""
            A slice is loaded by 16 bytes, four loads at once for each thread,
            and waits in 16 of 64 registers.
            The loads of 8 bytes are the words that other programs publish.
            """,
            true=lambda code: [
                code.registers <= 64 or code.amd,
                code.count("load", 8) > 0,
            ],
            narrow_loads=8,  # words
            narrow_stores=64,  # single columns at both ends of a row
        ),
        "_softmax_bwd_shared": Kernel(
            look="""
            Twice as many loads of 16 bytes, of ``y`` and ``dy``, and only one
            number of each slice: the loads of 8 bytes are the same words.
            """,
            true=lambda code: [
                code.registers <= 80 or code.amd,
                code.count("load", 8) > 0,
            ],
            spills=16,  # up to four registers
            narrow_loads=8,  # words
            narrow_stores=64,  # single columns at both ends of a row
        ),
    },
    cases={
        "slices": Case(
            run=slices,
            sizes=WIDE,
            limits={
                "spills": 16,  # up to four registers
            },
        ),
        "log": Case(
            run=log,
            sizes={"bfloat16": [65536, 131072, 1048576]},
            limits={"spills": 16},
        ),
        "shifted": Case(
            run=shifted,
            sizes={
                "bfloat16": [24577, 50257, 65536, 100003],
                "float16": [50257],
                "float32": [24577, 50257],
            },
        ),
    },
)
