"""Run model/01-gpt statement by statement on a GPU: what each benchmark gives,
what takes long, kernels by name. What fails is printed, and the rest goes on.

From the root of the checkout: python3 docs/drafts/gpt_page.py
"""

import ast
import os
import sys
import time
import traceback
import types
import warnings

os.environ["MPLBACKEND"] = "Agg"
START = time.perf_counter()
PATH = os.path.abspath("tutorials/model/01-gpt.py")
sys.path.insert(0, os.path.dirname(PATH))
warnings.filterwarnings("ignore", message=".*non-interactive.*")

import triton.testing  # noqa: E402

original = triton.testing.Mark._run


def robust(self, bench, save_path, show, print_data, **options):
    begin = time.perf_counter()
    measure = self.fn

    def measured(**given):
        try:
            return measure(**given)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:500]}"
            print("FAILED", bench.plot_name, given, said, flush=True)
            traceback.print_exc(limit=-6)
            return 3 * [float("nan")]

    self.fn = measured
    table = original(self, bench, save_path, False, False, **options)
    spent = time.perf_counter() - begin
    print(f"--- {bench.plot_name} ({spent:.1f} s)")
    wide = table if len(table) > 2 else table.set_index(table.columns[0]).T
    print(wide.to_string(float_format="%.5g"), flush=True)
    return table


triton.testing.Mark._run = robust
MORE = """
def print_kernels(provider):
    times = kernel_times(provider)
    print(provider, f"{sum(times.values()):.0f} µs of kernels")
    for name in sorted(times, key=times.get, reverse=True)[:16]:
        print(f"{times[name]:9.0f} {kind_of(name):16} {name[:90]}")

if ON_GPU:
    for provider in ("triton", "torch", "torch.compile", "triton compiled"):
        print_kernels(provider)
    for name, errors in errors_of_gradients().items():
        print(name, {k: round(v, 5) for k, v in errors.items()})
"""
module = types.ModuleType("__main__")
module.__file__ = PATH
sys.modules["__main__"] = module


def run(node, begin):
    try:
        code = compile(ast.Module([node], []), PATH, "exec")
        exec(code, module.__dict__)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:800]}"
        print(f"FAILED line {node.lineno}: {said}", flush=True)
        traceback.print_exc(limit=-6)
    spent = time.perf_counter() - begin
    if spent > 1:
        at = time.perf_counter() - START
        print(f"[{at:6.1f} s] line {node.lineno}: {spent:.1f} s", flush=True)


with open(PATH, encoding="utf-8") as script:
    tree = ast.parse(script.read())
for node in tree.body:
    if getattr(node, "name", "") == "times_of_ranks":
        for more in ast.parse(MORE).body:
            run(more, time.perf_counter())
    run(node, time.perf_counter())
print(f"done after {time.perf_counter() - START:.0f} s")
