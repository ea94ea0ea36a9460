"""Second tuning round of layer-norm/08-shared-rows: other forms of its kernels.

python tune/08.py [root of the checkout]; table on stdout, CSV in $OUT.
"""
import csv, multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(ROOT / "docs/_ext"))
import torch
import triton
from tutorial import load

NAME = "layer-norm/08-shared-rows"
# Words are asked for at the beginning of a turn, and looked at after the sums.
EARLY = [
    ('''def _collect(words_ptr, first, ROWS: tl.constexpr, SLICES: tl.constexpr,
             PADDED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """For each row of a tile the numbers of all slices, then zeros."""
    row''', '''def _ask(words_ptr, first, ROWS: tl.constexpr, SLICES: tl.constexpr,
         PADDED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    row = first + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, PADDED)[None, :]
    at = words_ptr + row * SLICES + tl.minimum(s, SLICES - 1)
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [at.to(tl.int64)],
            dtype=tl.int64, is_pure=False, pack=1,
        )
    else:
        return tl.load(at)


@triton.jit
def _collect(words_ptr, first, early, ROWS: tl.constexpr, SLICES: tl.constexpr,
             PADDED: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """For each row of a tile the numbers of all slices, then zeros."""
    row'''),
    ('''            LOAD:
            ld.relaxed.gpu.global.b64 $0, [$1];
            setp''', '''            mov.b64 $0, $2;
            LOAD:
            setp'''),
    ('''            @again bra LOAD; @empty trap;
            }""",
            "=&l,l", [at.to(tl.int64)], tl.int64,''', '''            @again ld.relaxed.gpu.global.b64 $0, [$1];
            @again bra LOAD; @empty trap;
            }""",
            "=&l,l,l", [at.to(tl.int64), early], tl.int64,'''),
    ("        a, b = _collect(words_ptr, due, 1,", "        early = _ask(words_ptr, due, 1, SLICES, SLICES, PTX)\n        a, b = _collect(words_ptr, due, early, 1,"),
    ("    for first in tl.range(start, M + step, step, num_stages=3):\n", '''    for first in tl.range(start, M + step, step, num_stages=3):
        done = tl.maximum(first - step, start)
        early = _ask(words_ptr, done, ROWS, SLICES, PADDED, PTX)
'''),
    ("_collect(words_ptr, done, ROWS, SLICES, PADDED, PTX)\n        mean, rstd", "_collect(words_ptr, done, early, ROWS, SLICES, PADDED, PTX)\n        mean, rstd"),
    ("                          disable_licm=True):  # fmt: skip\n", '''                          disable_licm=True):  # fmt: skip
        done = tl.maximum(first - step, start)
        early = _ask(words_ptr, done, ROWS, SLICES, PADDED, PTX)
'''),
    ("sum1, sum2 = _collect(words_ptr, done, ROWS,", "sum1, sum2 = _collect(words_ptr, done, early, ROWS,"),
]
# One reduction over the words: two sets of numbers are put together at a time.
MERGE = [
    ('''    mean = tl.sum(means * n, 1) / N
    d = means - _column(mean)
    return mean, 1 / tl.sqrt(tl.sum(m2s + n * d * d, 1) / N + eps)
''', '''    n += tl.zeros_like(means)
    mean, m2, _ = tl.reduce((means, m2s, n), 1, _merge)
    return mean, 1 / tl.sqrt(m2 / N + eps)
'''),
    ('''@triton.jit
def _column(t):''', '''@triton.jit
def _merge(mean1, m21, n1, mean2, m22, n2):
    n, d = n1 + n2, mean2 - mean1
    share = n2 / tl.maximum(n, 1)
    return mean1 + d * share, m21 + m22 + d * d * n1 * share, n


@triton.jit
def _column(t):'''),
]

FORMS = {"base": [], "early": EARLY, "merge": EARLY + MERGE}
START = time.time()

# rows, lanes, warps, programs a multiprocessor
FORWARD = [(2, 4096, 8, 2), (1, 4096, 8, 2), (1, 4096, 8, 3), (2, 8192, 8, 1), (2, 8192, 16, 1), (1, 8192, 16, 1)]
NARROW = [(4, 1024, 4, 3), (2, 1024, 4, 3), (2, 2048, 4, 2), (1, 2048, 4, 3), (2, 4096, 8, 1), (1, 4096, 8, 2), (1, 2048, 4, 4), (1, 4096, 4, 2)]
BACKWARD = [(4, 1024, 4, 3), (2, 2048, 4, 2), (2, 2048, 8, 2), (1, 2048, 4, 3), (2, 4096, 8, 1), (1, 4096, 8, 2),
            (1, 4096, 4, 2), (1, 8192, 8, 1), (1, 8192, 16, 1)]
JOBS = []  # N, kernel, form, plan
for N in [10752, 12288, 12800, 14336, 15360]:
    JOBS += [(N, "backward", "base", p) for p in NARROW] + [(N, "backward", "early", p) for p in NARROW[:3]]
for N in [65536, 2**17, 2**18, 2**19, 2**20]:
    JOBS += [(N, "forward", f, p) for f in FORMS for p in FORWARD]
    JOBS += [(N, "backward", f, p) for f in ("base", "early") for p in BACKWARD]


def fits(job, sms):
    N, _, _, (_, lanes, _, per_sm) = job
    return 1 < N / lanes <= sms * per_sm


def launch(kernel, programs, *args, per_sm, warps, only_compile):
    registers = min(65536 // (32 * warps * per_sm) // 8 * 8, 255)
    options = {"num_warps": warps, "maxnreg": registers, "launch_cooperative_grid": True, "PTX": True}
    if only_compile:
        return kernel.warmup(*args, grid=(programs,), **options)
    return kernel[(programs,)](*args, **options)


def run(page, given, kernel, plan, only_compile=False):
    x, dy, w, b, y, mean, rstd = given
    M, N = x.shape
    rows, lanes, warps, per_sm = plan
    groups, programs, words, tiles = page.cut(M, N, rows, lanes, per_sm)
    how = {"per_sm": per_sm, "warps": warps, "only_compile": only_compile}
    if kernel == "backward":
        sums = mean.new_empty(groups, 2, N)
        args = dy, x, w, mean, rstd, y, words, sums, M, N, *tiles
        launch(page._layer_norm_bwd_shared, programs, *args, **how)
        return sums.sum(0)
    args = x, w, b, y, mean, rstd, words, M, 1e-5, N, *tiles
    launch(page._layer_norm_fwd_shared, programs, *args, **how)


def rows_of(N):
    return min(4096, 2**28 // N)


def tensors(N, device):
    M = rows_of(N)
    x, dy = torch.empty(2, M, N, dtype=torch.float16, device=device)
    w, b = torch.empty(2, N, dtype=torch.float16, device=device)
    mean, rstd = torch.empty(2, M, device=device)
    return x, dy, w, b, torch.empty_like(x), mean, rstd


PAGES = {}


def page_of(form):
    if form not in PAGES:
        PAGES[form] = load(NAME, FORMS[form], interpret=False)
    return PAGES[form]


def compile_one(job):
    N, kernel, form, plan = job
    page = page_of(form)
    page.DEVICE = torch.device("meta")
    try:
        run(page, tensors(N, "meta"), kernel, plan, True)
    except Exception as e:  # noqa
        return f"no {job} {str(e)[:150]}"


def clock(fn, n=9):
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        fn()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(n)]
    for a, b in pairs:
        flush.zero_()
        a.record()
        graph.replay()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[n // 2] * 1e3


def filled(N):
    given = tensors(N, "cuda")
    for t in given:
        t.normal_()
    given[-1].fill_(1)
    return given


if __name__ == "__main__":
    page = page_of("base")
    torch.cuda.set_stream(torch.cuda.Stream())
    JOBS = [job for job in JOBS if fits(job, page.NUM_SMS)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(48, len(os.sched_getaffinity(0))), spawn) as pool:
        for said in pool.map(compile_one, JOBS):
            if said:
                print(said)
    print(f"compiled {len(JOBS)} in {time.time() - START:.0f} s")
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")

    # Other forms are right.
    print("µs of an exchange (programs: at once, a turn later):", *(
        f"{n}: " + ", ".join(f"{page.exchange.fn(1000, n, way)[0]:.2f}" for way in ("triton", "later")) for n in (2, 32, 128)))
    for N, plan in (2**17 + 8, (2, 4096, 8, 2)), (2**20, (1, 4096, 8, 2)), (2**17, (1, 2048, 4, 3)):
        given, found = filled(N), {}
        for form in FORMS:
            run(page_of(form), given, "forward", plan)
            y = given[4].clone()
            sums = run(page_of(form), given, "backward", plan) if form != "merge" else found["base"][2]
            found[form] = y, given[4].clone(), sums
        for form in ("early", "merge"):
            same = [torch.equal(a, b) for a, b in zip(found["base"], found[form])]
            print(N, plan, form, "same y, dx, sums:", same, "y off by", f"{(found['base'][0] - found[form][0]).abs().max().item():.1e}")
        want = torch.nn.functional.layer_norm(given[0].double(), (N,), given[2].double(), given[3].double())
        print("    y against float64:", f"{((found['base'][0] - want).norm() / want.norm()).item():.1e}")
        del given, found, y, want

    rows = []
    for N in sorted({job[0] for job in JOBS}):
        given = filled(N)
        x, dy, w, b, y, mean, rstd = given
        copy, add = clock(lambda: torch.mul(x, 1, out=y)), clock(lambda: torch.add(x, dy, out=y))
        plans = [page.plan_shared(N, 2, forward) for forward in (True, False)]
        plans = [(*tile, how["warps"], how["per_sm"]) for tile, how in plans]
        now, back = (clock(lambda: run(page, given, k, p)) for k, p in zip(("forward", "backward"), plans))
        print(f"N = {N}, M = {len(x)}: copy {copy:.1f}, add {add:.1f} µs; now forward {now:.1f} ({100 * copy / now:.0f} %), backward {back:.1f} ({100 * add / back:.0f} %)")
        for kernel in ("forward", "backward"):
            for form in FORMS:
                found, best = [], add if kernel == "backward" else copy
                for n, k, f, plan in JOBS:
                    if (n, k, f) == (N, kernel, form):
                        try:
                            found.append((clock(lambda: run(page_of(form), given, kernel, plan)), plan))
                        except Exception as e:  # noqa
                            print("no", N, kernel, form, plan, str(e)[:100])
                            continue
                        rows.append({"N": N, "kernel": kernel, "form": form, "plan": plan, "us": round(found[-1][0], 2), "copy": round(copy, 2), "add": round(add, 2)})
                if found:
                    print(f"  {kernel:8} {form:5}", *(f"{us:.1f} ({100 * best / us:.0f} %) {p}" for us, p in sorted(found)[:6]), sep="  ")
        del given, x, dy, y
    out = Path(os.environ.get("OUT", ".")) / "tune-08.csv"
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{time.time() - START:.0f} s")
