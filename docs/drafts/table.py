"""The page's table on a GPU: which test finds which fault; and seconds."""
import os, sys, time, traceback
sys.path[:0] = ["docs/_ext", "tests"]
import tutorial
START = time.time()
page = tutorial.load("into-pytorch/02-testing")
print("tests:", ", ".join(page.TESTS), flush=True)
for fault, edits in {"ours": None, "atomics": page.WITH_ATOMICS, **page.FAULTS}.items():
    t0 = time.time()
    marks = ""
    try:
        norm = page.ours if edits is None else page.with_fault(*edits)
        for test in page.TESTS.values():
            marks += "X" if page.finds(test, norm) else "."
    except Exception:
        marks += "!" + traceback.format_exc().splitlines()[-1][:150]
    print(f"{fault:24} {marks}  {time.time() - t0:.1f} s", flush=True)
for N in (1024, 4096, 8192):
    for provider in ("triton", "atomics", "race"):
        try:
            print(N, provider, "different, wrong of 100:", page.hundred_runs(4096, N, page.torch.float32, provider), flush=True)
        except Exception:
            print(N, provider, traceback.format_exc().splitlines()[-1][:150], flush=True)
x, w, dy = page.inputs(1151, 8192, page.torch.bfloat16)
for dtype in (page.torch.bfloat16, page.torch.float32):
    x, w, dy = page.inputs(1151, 8192, dtype)
    exact, spread = page.shaken(page.pytorch, (x, w), dy)
    found = page.both_passes(page.ours, (x, w), dy)
    unit = page.torch.finfo(page.torch.float32).eps
    out = page.torch.finfo(dtype).eps
    print(dtype, "times the spread, less half a unit and 8 units:", [
        round((((f - e).abs() - (out / 2 + 8 * unit) * e.abs()).clamp(min=0) / s).nan_to_num(0).max().item(), 1)
        for f, e, s in zip(found, exact, spread)], "of 16", flush=True)
print(f"all: {time.time() - START:.0f} s")
