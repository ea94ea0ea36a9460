"""Try model/01-gpt on a GPU before it is recorded, what matters first: does
each design run, how fast, how much memory, which kernels, and do the losses of
200 steps agree? What fails is printed, and the rest goes on.

From the root of the checkout: python3 docs/drafts/gpt_page.py [seconds]

It ends within so many seconds, 375 if none are given: what there is no time
for is left out, and named.
"""

import ast
import os
import signal
import subprocess
import sys
import time
import traceback
import types
import warnings

START = time.perf_counter()
SECONDS = float(sys.argv[1]) if sys.argv[1:] else 375
PATH = os.path.abspath("tutorials/model/01-gpt.py")
os.environ["MPLBACKEND"] = "Agg"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # as where it is recorded
sys.path.insert(0, os.path.dirname(PATH))
sys.stdout.reconfigure(line_buffering=True)
warnings.filterwarnings("ignore", message=".*non-interactive.*")

module = types.ModuleType("__main__")
module.__file__ = PATH
sys.modules["__main__"] = module
page = module.__dict__


def spent():
    return time.perf_counter() - START


class LateError(Exception):
    pass


def ring(*_):
    raise LateError("its time is over")


signal.signal(signal.SIGALRM, ring)


def attempt(name, function, *given, limit=60):
    """What a function gives, or None; and how long that took."""
    left = SECONDS - spent()
    if left < 5:
        print(f"[{spent():5.1f} s] LEFT OUT: {name}")
        return None
    begin = time.perf_counter()
    signal.alarm(int(min(limit, left)))
    result = None
    try:
        result = function(*given)
    except BaseException as error:
        said = " ".join(str(error).split())[:600]
        print(f"FAILED {name}: {type(error).__name__}: {said}")
        traceback.print_exc(limit=-5, file=sys.stdout)
    signal.alarm(0)
    took = time.perf_counter() - begin
    print(f"[{spent():5.1f} s] {name}: {took:.1f} s")
    return result


# The page --------------------------------------------------------------------


def defines(node):
    """Whether a statement of the page defines something; others wait."""
    if isinstance(node, ast.Assign):
        names = [
            each.id for each in ast.walk(node) if isinstance(each, ast.Name)
        ]
        return names[0].isupper()
    if isinstance(node, ast.If):
        return "kernel_times" not in ast.unparse(node)
    if isinstance(node, ast.Expr):
        return "enable_" in ast.unparse(node)
    return not isinstance(node, ast.For | ast.Assert)


def define():
    with open(PATH, encoding="utf-8") as script:
        tree = ast.parse(script.read())
    for node in tree.body:
        if defines(node):
            exec(compile(ast.Module([node], []), PATH, "exec"), page)


attempt("definitions, tokens", define)
torch = page["torch"]
ON_GPU = page["ON_GPU"]
print(
    f"torch {torch.__version__}, triton {page['triton'].__version__}, "
    f"{torch.cuda.get_device_name() if ON_GPU else 'no GPU'}, "
    f"{torch.cuda.device_count()} GPUs, {os.cpu_count()} cores; "
    f"{len(page['TOKENS'])} tokens, {list(page['DESIGNS'])}"
)


# What is tried ---------------------------------------------------------------


def start(provider):
    """Whether a design runs, and how fast, in a hurry."""
    if not (found := page["started"](provider)):
        print(f"FAILED {provider}")
        return
    training, most = found
    each = page["batch"](0, seed=0)
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        training.step(*each)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    times = " ".join(f"{ms:.1f}" for ms in sorted(times))
    print(f"   {provider}: {most:.2f} GB; ms of 8 single steps: {times}")


def kernels(provider, most=24):
    times = page["kernel_times"](provider)
    kinds = dict.fromkeys(page["PARTS"], 0.0)
    for name, us in times.items():
        kinds[page["kind_of"](name)] += us
    print(f"   {provider}: {sum(times.values()) / 1000:.2f} ms of kernels:")
    print("   ", {kind: round(us / 1000, 2) for kind, us in kinds.items()})
    for name in sorted(times, key=times.get, reverse=True)[:most]:
        kind = page["kind_of"](name)
        print(f"   {times[name]:8.0f} {kind:16} {name[:110]}")


def losses(provider):
    its = page["losses_of"](provider, 0)
    print(f"   {provider}:", *(f"{each:.4f}" for each in its[:12]))
    tens = range(10, len(its) + 1, 10)
    means = (page["mean_of_ten"](its, step) for step in tens)
    print("   means of ten:", *(f"{each:.3f}" for each in means))


def gap():
    ours = page["losses_of"]("triton", 0)
    theirs = page["losses_of"]("torch", 0)
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    largest = max(gaps)
    print(f"   gap: {largest:.4f} at most, in step {gaps.index(largest)}")
    tens = range(0, len(gaps), 10)
    print("   most of ten:", *(f"{max(gaps[i : i + 10]):.3f}" for i in tens))
    tens = range(10, len(gaps) + 1, 10)
    means = [
        abs(page["mean_of_ten"](ours, i) - page["mean_of_ten"](theirs, i))
        for i in tens
    ]
    print(f"   gap of means of ten: {max(means, default=0):.4f} at most")


def bits():
    again, masters = page["train"](page["OURS"], seed=0)
    pairs = zip(masters, page["trained"]("triton", 0)[1], strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print("   same masters:", same)
    print("   same losses:", again == page["losses_of"]("triton", 0))
    training = page["Training"](page["model_of"](page["OURS"]))
    usual = [training.step(*page["batch"](i, 0)).item() for i in range(8)][
        : len(again)
    ]
    print("   launched as recorded:", usual == again[:8])


def gradients():
    errors = page["errors_of_gradients"]()
    theirs = errors["torch"]
    for provider, its in errors.items():
        order = sorted(its.values())
        worst = max(its, key=its.get)
        print(
            f"   {provider}: median {order[len(order) // 2]:.4f}, least "
            f"{order[0]:.4f}, most {order[-1]:.4f} of {worst}"
        )
    small = 0.005 if ON_GPU else 1e-5
    ratios = {
        n: e / (2 * theirs[n] + small) for n, e in errors["triton"].items()
    }
    for name in sorted(ratios, key=ratios.get, reverse=True)[:8]:
        ours = errors["triton"][name]
        print(
            f"   {ratios[name]:.2f} of its limit: {name}, {ours:.4f} and "
            f"{theirs[name]:.4f}"
        )


def steps(designs):
    """The times as the page has them, and how far its rounds lie apart."""
    every = page["DESIGNS"]
    page["DESIGNS"] = {each: every[each] for each in designs}
    page["step_times"].cache_clear()
    try:
        times = page["step_times"]()
    finally:
        page["DESIGNS"] = every
    for provider, (median, least, most) in times.items():
        print(
            f"   {provider:16} {median / 1000:7.2f} ms, {least / 1000:.2f} to "
            f"{most / 1000:.2f}: {100 * (most - least) / median:.1f}% apart"
        )


def functions():
    for name in page["OURS"]:
        row = []
        for provider in ("triton", "torch"):
            begin = time.perf_counter()
            # As the page calls it, and each failure by itself.
            call = page[{"triton": "OURS", "torch": "PYTORCH"}[provider]][name]
            try:
                times = page["device_time"](
                    lambda call=call, name=name: page["both_passes_of"](
                        call, name
                    )
                )
                apart = (times[2] - times[1]) / times[0]
                row.append(f"{provider} {times[0]:.1f} µs ({apart:.0%}")
            except LateError:
                raise
            except Exception as error:
                row.append(f"FAILED {provider} {type(error)} {error}"[:300])
            row[-1] += f", {time.perf_counter() - begin:.1f} s)"
        print(f"   {name}:", "; ".join(row))


def memory_of_losses():
    """The most GB of both passes of a loss, beside what it is given."""
    for provider, names in (("triton", "OURS"), ("torch", "PYTORCH")):
        call = page["both_passes_of"](page[names]["loss"], "loss")
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        most = torch.cuda.max_memory_allocated() - before
        print(f"   {provider}: {most / 1e9:.2f} GB")


def graphs():
    counters = torch._dynamo.utils.counters
    print("   dynamo:", dict(counters["stats"]))
    for reason, count in counters["graph_break"].most_common(6):
        print("   graph break", count, " ".join(reason.split())[:200])


def exercise():
    print("   right:", page["exercise_1"](page["_squared_relu_1"]))


def seeds():
    for seed in (1, 2, 3):
        its = page["losses_of"]("triton", seed)
        print(
            f"   seed {seed} ends at {page['mean_of_ten'](its, len(its)):.3f}"
        )


def ranks():
    """As the page does it, and with all that is in memory."""
    count = min(torch.cuda.device_count(), 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={count}", PATH],
        capture_output=True,
        text=True,
        timeout=100,
    )
    print("   ", done.returncode, done.stdout[-300:].replace("\n", " | "))
    if done.returncode:
        print(done.stderr[-3000:])


if ON_GPU:
    # First whether it runs at all.
    for provider in ("eager", "triton", "torch", "torch graph", "liger"):
        if provider in page["DESIGNS"]:
            attempt(f"start {provider}", start, provider)
    attempt("kernels of ours", kernels, "triton")
    attempt("kernels of PyTorch", kernels, "torch")
attempt("losses of ours", losses, "triton")
attempt("losses of PyTorch", losses, "torch")
attempt("gap", gap)
if ON_GPU:
    attempt("start torch.compile", start, "torch.compile", limit=120)
    graphs()
    attempt("start compile graph", start, "compile graph")
    attempt("kernels of torch.compile", kernels, "torch.compile")
    quick = [
        each
        for each in page["DESIGNS"]
        if each not in ("max-autotune", "triton compiled")
    ]
    attempt("times of steps", steps, quick)
attempt("gradients", gradients)
attempt("same bits", bits)
if ON_GPU:
    attempt("functions", functions, limit=70)
    attempt("memory of losses", memory_of_losses)
attempt("exercise", exercise)
if ON_GPU:
    attempt("ranks", ranks, limit=110)
    torch._dynamo.utils.counters.clear()
    attempt("start triton compiled", start, "triton compiled", limit=80)
    graphs()
    attempt("seeds", seeds)
print(f"done after {spent():.0f} s")
