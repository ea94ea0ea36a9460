"""What must hold of the page "Programs that share a row"."""

import torch

from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, w, b, dy = page.inputs(M, N, dtype)
    torch.autograd.grad(page.LayerNorm.apply(x, w, b, 1e-5), (x, w, b), dy)
    page.shared_sums(
        page._shared_sums, torch.ones(4, 16, device=page.DEVICE), 100, 1
    )


def also(page, M, N, dtype):
    page.shared_sums(
        page._shared_sums, torch.ones(128, 16, device=page.DEVICE)
    )
    x, w, b, dy = page.inputs(3, 72, dtype)
    torch.autograd.grad(page.LayerNorm.apply(x, w, b, 1e-5), (x, w, b), dy)


SIZES = {
    "float16": [
        32768, 65536, 98304, 131072, 262144, 393216, 524288, 786432,
        1048576,
    ],
    "bfloat16": [65536, 524288],
    "float32": [65536, 262144],
}  # fmt: skip

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[65536, 524288],
    dtype="float16",
    sizes=SIZES,
    kernels={
        "_shared_sums": Kernel(
            look="""
            A word is stored, then four are awaited: the load of 8 bytes stands
            in a loop of its own.
            GPUs of AMD get no PTX; this page refuses them.
            """,
            true=lambda code: [
                code.amd or code.count("load", 8) == code.count("store", 8) > 0
            ],
            narrow_loads=3,
            narrow_stores=6,
        ),
        "_layer_norm_fwd_shared": Kernel(
            look="""
            ``x`` comes by asynchronous copies, two tiles ahead.
            The loads and stores of 8 bytes are the words by which programs
            tell each other their sums.
            At 524288 columns some registers are spilled.
            """,
            true=lambda code: [
                code.amd
                or (
                    code.count("load", 8) == 1 and code.count("store", 8) == 2
                ),
                (code.count("copy", 16) > 0) != code.amd,
            ],
            true_at={524288: lambda code: [code.spills > 0]},
            narrow_loads=2,  # words
            narrow_stores=4,  # words, mean and rstd
            copies=True,
            # 16 KB of a row in four warps: still faster than half of it in
            # eight.
            spills={524288: 56, 786432: 56, 1048576: 56},
        ),
        "_layer_norm_bwd_shared": Kernel(
            look="""
            Two matrices come by asynchronous copies, and the sums for ``dw``
            and ``db`` stay in registers: look at how many they are.
            """,
            true=lambda code: [
                code.registers > 128,
                code.count("load", 8) > 0,
            ],
            narrow_loads=2,  # words
            narrow_stores=4,  # words of 4 rows
            narrow_copies=12,  # mean and rstd
            copies=True,
        ),
    },
)
