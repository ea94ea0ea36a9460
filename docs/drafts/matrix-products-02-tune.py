"""Tunes matrix-products/02-swiglu on one GPU.

From the repository root: python3 docs/drafts/matrix-products-02-tune.py

First the kernels of the gate: bytes of a tile, warps, and hints to the caches,
forward and backward, of two tensors and of halves, in % of a copy. Then the
fused product: tiles, stages, groups and two other forms, in % of cuBLAS.
GATE_S and PRODUCT_S are seconds at most. PARTS says which: gate,product.
"""

import itertools
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

START = time.time()
GATE_S = float(os.environ.get("GATE_S", 100))
PRODUCT_S = float(os.environ.get("PRODUCT_S", 110))
WORKERS = int(os.environ.get("WORKERS", 8))
PARTS = os.environ.get("PARTS", "gate,product").split(",")
ROOT = os.environ.get("ROOT", os.getcwd())
sys.path[:0] = [f"{ROOT}/docs/_ext", f"{ROOT}/tests"]
NAME = "matrix-products/02-swiglu"

import torch  # noqa: E402

import tutorial  # noqa: E402

M = 8192
SIZES = 128, 512, 2048, 14336
# Text of the page, and what takes its place.
PLAN = (
    (
        "def fused(x, weight, keeps_h=True):",
        "def fused(x, weight, keeps_h=True, plan=None):",
    ),
    (
        "    plan = plan_product(x.dtype)\n",
        "    plan = plan or plan_product(x.dtype)\n",
    ),
)
LOADS = "mask=mask, other=0)"
STREAMED = 'mask=mask, other=0, eviction_policy="evict_first")'


def say(*words):
    print(*words, flush=True)


def caught(function, *arguments):
    """What the function gives, or None and a line that says why not."""
    try:
        return function(*arguments)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = str(error).replace("\n", " ")[:110]
        say(f"  -- {type(error).__name__} in {last.name}: {words}")
        torch.cuda.synchronize()
        return None


def stores_edit(text):
    """All stores of the gate's kernels that do not stay in a cache."""
    found = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("tl.store(") and stripped.endswith(
            "mask=mask)"
        ):
            found.append((line, line[:-1] + ', cache_modifier=".cs")'))
    return tuple(found)


def page_with(edits):
    """The page, where each edit is made at every place that it fits."""
    path = os.path.join(ROOT, "tutorials", f"{NAME}.py")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    begin = text.index("def _gate_fwd(")
    end = text.index("class _Gated(")
    part = text[begin:end]
    new = part
    for old, by in edits:
        new = new.replace(old, by)
    return tutorial.load(NAME, ((part, new), *PLAN))


# The gate


def gate_calls(page, N, kind):
    """prepare() of one of four ways, and how many matrices move."""
    dtype = torch.bfloat16

    def new(columns):
        return torch.randn(M, columns, device=page.DEVICE).to(dtype)

    def prepare():
        if kind.endswith("halves"):
            gate, up = page.halves(new(2 * N))
        else:
            gate, up = new(N), new(N)
        dy = new(N)
        if kind.startswith("fwd"):

            def call():
                y = torch.empty_like(dy)
                page.forward(gate, up, y, page._silu)
                return y

            return call

        def back():
            if kind.endswith("halves"):
                dx = torch.empty(M, 2 * N, dtype=dtype, device=page.DEVICE)
                grads = page.halves(dx)
            else:
                grads = torch.empty_like(dy), torch.empty_like(dy)
            page.backward(dy, gate, up, *grads, page._silu)
            return grads

        return back

    return prepare, 3 if kind.startswith("fwd") else 5


def gate_speed(page, N, kind, tile, warps):
    page.TILE_BYTES, page.WARPS = tile, warps
    prepare, matrices = gate_calls(page, N, kind)
    return page.speed(matrices * M * N * 2, prepare)[0]


def tune_gate():
    end = time.time() + GATE_S
    pages = {"": page_with(())}
    path = os.path.join(ROOT, "tutorials", f"{NAME}.py")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    stores = stores_edit(text[text.index("def _gate_fwd(") :])
    pages["loads evict_first"] = page_with(((LOADS, STREAMED),))
    pages["stores .cs"] = page_with(stores)
    pages["both hints"] = page_with(((LOADS, STREAMED), *stores))
    first = pages[""]
    copies = {}
    for mode, N in itertools.product(("fwd", "bwd"), SIZES):
        reads, writes = (2, 1) if mode == "fwd" else (3, 2)
        copies[mode, N] = first.ceiling(reads, writes, (M, N), torch.bfloat16)[
            0
        ]
    say("copy, GB/s:", {f"{m} {n}": round(v) for (m, n), v in copies.items()})
    plain = [
        (tile, warps)
        for tile in (4096, 1024, 2048, 8192, 16384)
        for warps in (1, 2, 4, 8)
        if 16 <= tile / warps / 32 <= 128
    ]
    for kind in ("fwd", "bwd", "fwd halves", "bwd halves"):
        say(f"--- {kind}: % of a copy at {SIZES} columns")
        table = []

        def measure(hint, tile, warps, kind=kind, table=table):
            if time.time() > end:
                return
            shares = []
            for N in SIZES:
                found = caught(gate_speed, pages[hint], N, kind, tile, warps)
                share = 0
                if found:
                    share = 100 * found / copies[kind[:3], N]
                shares.append(share)
            table.append((min(shares), shares, tile, warps, hint))

        # The page's own first; then each kind gets its part of the time.
        for tile, warps in sorted(plain, key=lambda c: c != (4096, 4)):
            measure("", tile, warps)
        rule = next(iter(table), None)
        for _, _, tile, warps, _ in sorted(table, reverse=True)[:2]:
            for hint in list(pages)[1:]:
                measure(hint, tile, warps)
        for name, rows in (
            ("rule", [rule] if rule else []),
            ("best", sorted(table, reverse=True)[:6]),
        ):
            for _, shares, tile, warps, hint in rows:
                numbers = " ".join(f"{share:5.1f}" for share in shares)
                say(f"{name}: {numbers}  {tile:5} bytes {warps} warps {hint}")
        if time.time() > end:
            say("time was up")
            return


# The product

# One product of 256 columns: the rows of the weight come in blocks of TILE_N,
# first one of the gate, then one of the up projection.
TOGETHER = (
    (
        "        gate = tl.zeros((TILE_M, TILE_N), tl.float32)\n"
        "        up = tl.zeros((TILE_M, TILE_N), tl.float32)\n",
        "        sums = tl.zeros((TILE_M, 2 * TILE_N), tl.float32)\n",
    ),
    (
        "            gate_w = gate_w_desc.load([column, k])\n"
        "            up_w = up_w_desc.load([column, k])\n",
        "            both_w = gate_w_desc.load([2 * column, k])\n",
    ),
    (
        "            gate = tl.dot(x, gate_w.T, gate)\n"
        "            up = tl.dot(x, up_w.T, up)\n",
        "            sums = tl.dot(x, both_w.T, sums)\n",
    ),
    (
        "        value, _ = ACT(gate)\n        y_desc.store(",
        "        halves = sums.reshape(TILE_M, 2, TILE_N).permute(0, 2, 1)\n"
        "        gate, up = halves.split()\n"
        "        value, _ = ACT(gate)\n        y_desc.store(",
    ),
    (
        "gate_w_desc=descriptor(weight[:N], tile_n, tile_k)",
        "gate_w_desc=descriptor(weight, 2 * tile_n, tile_k)",
    ),
)
COMING = (("tl.num_programs(0), flatten=True", "tl.num_programs(0)"),)


def product_plan(m, n, k, warps, stages, group=8):
    return {
        "TILE_M": m, "TILE_N": n, "TILE_K": k, "GROUP": group,
        "STAGES": stages, "num_warps": warps,
    }  # fmt: skip


CANDIDATES = (
    ("page", (128, 128, 64, 8, 4)),
    ("page", (128, 128, 64, 8, 3)),
    ("page", (128, 128, 64, 8, 4, 4)),
    ("page", (128, 128, 64, 8, 4, 16)),
    ("page", (128, 128, 128, 8, 2)),
    ("page", (256, 64, 64, 8, 4)),
    ("page", (128, 64, 64, 4, 4)),
    ("page", (128, 64, 64, 8, 4)),
    ("page", (64, 128, 64, 4, 4)),
    ("page", (64, 128, 64, 8, 4)),
    ("together", (128, 128, 64, 8, 4)),
    ("together", (128, 128, 64, 8, 3)),
    ("together", (128, 128, 64, 8, 4, 16)),
    ("together", (64, 128, 64, 4, 4)),
    ("not flat", (128, 128, 64, 8, 4)),
    ("not flat", (128, 128, 64, 8, 3)),
)


def blocks(weight, tile):
    """The weight with blocks of the gate and of up in turns."""
    N, K = weight.shape[0] // 2, weight.shape[1]
    both = weight.view(2, N // tile, tile, K)
    return both.transpose(0, 1).reshape(2 * N, K).contiguous()


def tune_product():
    end = time.time() + PRODUCT_S
    forms = {}
    for name, edits in (
        ("page", ()), ("together", TOGETHER), ("not flat", COMING),
    ):  # fmt: skip
        form = caught(tutorial.load, NAME, (*PLAN, *edits))
        if form:
            forms[name] = form
    page = forms["page"]
    dtype = torch.bfloat16

    def of(candidate, x, weight, keeps_h):
        form, numbers = candidate
        plan = product_plan(*numbers)
        if form == "together":
            weight = blocks(weight, plan["TILE_N"])
        forms[form].fused(x, weight, keeps_h, plan)  # compiles
        return lambda: forms[form].fused(x, weight, keeps_h, plan)

    def compiled(task):
        candidate, keeps_h = task
        x = torch.randn(256, 256, device=page.DEVICE).to(dtype)
        weight = torch.randn(1024, 256, device=page.DEVICE).to(dtype)
        try:
            _, y = of(candidate, x, weight, keeps_h)()
            torch.cuda.synchronize()
        except Exception as error:
            return f"{candidate}: {type(error).__name__} {str(error)[:90]}"
        gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
        exact = torch.nn.functional.silu(gate) * up
        error = ((y - exact).norm() / exact.norm()).item()
        return f"{candidate}: WRONG, {error:.1e}" if error > 0.01 else None

    able = [c for c in CANDIDATES if c[0] in forms]
    tasks = list(itertools.product(able, (True, False)))
    with ThreadPoolExecutor(WORKERS) as pool:
        said = dict(zip(tasks, pool.map(compiled, tasks), strict=True))
    for task, words in said.items():
        if words:  # once more, in case that threads have disturbed each other
            said[task] = compiled(task)
    for words in filter(None, said.values()):
        say("  --", words)
    say(f"compiled after {time.time() - START:.0f} s")

    for tokens, N, K in (
        (8192, 14336, 4096), (8192, 2048, 4096), (8192, 8192, 4096),
        (8192, 4096, 1024), (1024, 14336, 4096), (16, 14336, 4096),
    ):  # fmt: skip
        if time.time() > end:
            say("time was up")
            return
        x, weight, _, _ = page.mlp_inputs(tokens, N, K, dtype)
        x, weight = x.detach(), weight.detach()
        calls = {
            "cublas": lambda x=x, w=weight: x @ w.T,
            "apart": lambda x=x, w=weight: page.product_then_gate(x, w),
        }
        for candidate, keeps_h in tasks:
            if said[candidate, keeps_h] is None:
                call = caught(of, candidate, x, weight, keeps_h)
                if call:
                    calls[candidate, keeps_h] = call
        found = caught(page.in_turns, calls)
        if not found:
            continue
        cublas = found["cublas"][0]
        rate = 4 * tokens * N * K / cublas * 1e-6
        say(
            f"--- {tokens} tokens, {K} -> {N}: cuBLAS {cublas:.1f} us, "
            f"{rate:.0f} TFLOP/s; apart "
            f"{100 * cublas / found['apart'][0]:.1f}%"
        )
        for keeps_h in (True, False):
            rows = sorted(
                (100 * cublas / us[0], name[0])
                for name, us in found.items()
                if isinstance(name, tuple) and name[1] is keeps_h
            )
            rows.reverse()
            rule = [row for row in rows if row[1] == CANDIDATES[0]]
            say(
                "training" if keeps_h else "inference",
                "% of cuBLAS, rule:",
                *(f"{row[0]:.1f}" for row in rule),
            )
            for share, (form, numbers) in rows[:4]:
                say(f"   {share:5.1f} {form} {numbers}")
        del calls, x, weight
        torch.cuda.empty_cache()


if __name__ == "__main__":
    say(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "gate" in PARTS:
        caught(tune_gate)
    if "product" in PARTS:
        caught(tune_product)
    say(f"{time.time() - START:.0f} s")
