"""What must hold of the page "RMS norm in 16 bits"."""

import torch

from compiled.declared import Case, Kernel, Kernels


def run(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(M, N, dtype)
    out = page.add_rms_norm(x, residual, (N,), w, 1e-6, "gemma", 1.0)
    torch.autograd.grad(out, (x, residual, w), (dy, ds))


def also(page, M, N, dtype):
    x, _residual, w, dy, _ds = page.inputs(5, 1000, dtype)
    for casting in page.CASTINGS:
        torch.autograd.grad(
            page.rms_norm(x, 1000, w, 1e-6, casting), (x, w), dy
        )
    for kernel in (page._add_norm, page._add_norm_1):
        kernel[(8,)](x.half(), x.half(), x.half(), x.float(), N=64)


def alone(page, M, N, dtype):
    x, _, w, dy, _ = page.inputs(M, N, dtype)
    torch.autograd.grad(page.rms_norm(x, (N,), w, 1e-6, "llama"), (x, w), dy)


def float32_stream(page, M, N, dtype):
    x, residual, w, dy, ds = page.inputs(M, N, dtype, torch.float32)
    out = page.add_rms_norm(x, residual, (N,), w, 1e-6, "gemma", 1.0)
    torch.autograd.grad(out, (x, residual, w), (dy, ds))


KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 8192],
    dtype="bfloat16",
    sizes={
        "bfloat16": [2048, 2560, 3072, 3584, 4096, 5120, 7168, 8192],
        "float16": [8192],
        "float32": [4096],
    },
    kernels={
        "_rms_norm_fwd": Kernel(
            look="""
            Shown as Gemma rounds, with ``1 + w``: the same loads and stores,
            and no conversion between the product and the store of ``y``.
            """,
            true=lambda code: [
                code.loaded == 3 * 2 * 4096
                or code.amd,  # whose warps are wider
                code.narrow("load") == 0 or code.amd,
                len(code.lines("shuffle")) == 1,
            ],
            narrow_stores=1,  # rstd
        ),
        "_rms_norm_bwd": Kernel(
            look="""
            On NVIDIA GPUs asynchronous copies load ``s``, ``dy`` and ``ds``
            ahead.
            """,
            true=lambda code: [
                (code.count("copy", 16) > 0) != code.amd,
                code.spills == 0,
            ],
            copies=True,
            narrow_copies=4,  # rstd, of several rows
            shared=232448,  # all that a program may have on sm_90
        ),
    },
    cases={
        "alone": Case(
            run=alone,
            sizes={"bfloat16": [2048, 4096, 5120, 8192]},
        ),
        "float32-stream": Case(
            run=float32_stream,
            sizes={"bfloat16": [2048, 4096, 8192]},
        ),
    },
)
