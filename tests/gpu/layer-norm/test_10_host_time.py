"""What the user waits for: on a GPU, at full size."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
import triton

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "layer-norm/10-host-time"
page = load(NAME)
FORMS = {"plain": page.plain} | {
    name: functools.partial(page.layer_norm, launcher=name)
    for name in page.LAUNCHERS
}


def run(function, case):
    cases.run(function, case, page.DEVICE)


@pytest.mark.parametrize("N", [1000, 1023, 4096, 4608, 16384])
def test_full_size(N):
    """In every form: what is compiled for one is compiled for all.

    The second time there are a plan and compiled kernels.
    """
    for name, function in FORMS.items():
        for _ in range(1 if name == "plain" else 2):
            run(function, Case((1151,), (N,), torch.float16))
            run(function, Case((300,), (N,), torch.bfloat16))
            run(function, Case((300,), (N,), torch.float32))
            run(function, Case((30,), (N,), torch.float64))


def test_layouts_share_a_plan():
    """Aligned, unaligned and copied tensors, all of one kind, in turns.

    Few columns: kernels of other alignments are compiled quickly.
    """
    for function in FORMS.values():
        for _ in range(2):
            for which in "x", "dy", "parameters":
                for layout in cases.LAYOUTS:
                    case = Case((20, 30), (8, 12), torch.float16)
                    case = Case(**vars(case) | {which: layout})
                    run(function, case)


def test_dimensions():
    for lead in (), (0,), (1,), (2, 1, 3):
        for function in FORMS.values():
            for _ in range(2):
                run(function, Case(lead, (9,)))


def test_only_some_gradients():
    for function in FORMS.values():
        for _ in range(2):
            for number in range(32):
                *wanted, weight, bias = (
                    bool(number >> i & 1) for i in range(5)
                )
                case = Case((3,), (9,), weight=weight, bias=bias)
                case = Case(**vars(case) | {"wanted": wanted})
                run(function, case)


def step(function, x, w, b, dy):
    y = function(x, w.shape, w, b)
    found = torch.autograd.grad(y, (x, w, b), dy)
    return torch.cat([t.flatten() for t in (y, *found)])


@pytest.mark.parametrize("N", [1024, 4608, 8192, 15872])
def test_deterministic_and_the_same_in_every_form(N):
    """100 times the same bits, however the kernels are launched."""
    given = page.inputs(4096, N, torch.float32)
    first = step(page.plain, *given)
    for function in FORMS.values():
        assert all(
            torch.equal(step(function, *given), first) for _ in range(25)
        )


@pytest.mark.parametrize("name", page.LAUNCHERS)
def test_who_asks_triton(name, monkeypatch):
    """Kept kernels go round the just-in-time compiler, if addresses allow."""
    asked, run = [], triton.runtime.JITFunction.run

    def counted(self, *args, **options):
        asked.append(self.__name__)
        return run(self, *args, **options)

    monkeypatch.setattr(triton.runtime.JITFunction, "run", counted)
    page.PLANS.clear()
    function, given = FORMS[name], page.inputs(64, 96, torch.float16)
    step(function, *given)
    assert len(asked) == 3
    step(function, *given)
    assert len(asked) == (6 if name == "jit" else 3)
    x = torch.zeros(64 * 96 + 1, dtype=torch.float16, device="cuda")[1:]
    function(x.view(64, 96), (96,), *given[1:3])
    assert len(asked) == (7 if name == "jit" else 4)


def test_who_is_seen_by_hooks():
    hooks, seen = triton.knobs.runtime.launch_enter_hook, []
    if not hasattr(hooks, "add"):
        pytest.skip("this version of Triton takes one hook")
    given = page.inputs(64, 96, torch.float16)
    for function in FORMS.values():
        step(function, *given)
    hooks.add(seen.append)
    try:
        counts = {}
        for name, function in FORMS.items():
            seen.clear()
            step(function, *given)
            counts[name] = len(seen)
    finally:
        hooks.remove(seen.append)
    assert counts == {"plain": 3, "jit": 3, "kept": 3, "bare": 0}


def test_threads_and_streams_share_a_plan():
    given = page.inputs(1151, 1000, torch.float16)
    expected = step(page.plain, *given)
    torch.cuda.synchronize()
    page.PLANS.clear()
    found, start = {}, threading.Barrier(8)

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait()
            found[number] = [step(page.layer_norm, *given) for _ in range(30)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    results = [result for part in found.values() for result in part]
    assert len(results) == 240
    assert all(torch.equal(result, expected) for result in results)


def test_a_graph_of_it():
    """Replayed with other values in the same place."""
    x, w, b, dy = page.inputs(1151, 1000, torch.float16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(page.layer_norm, x, w, b, dy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step(page.layer_norm, x, w, b, dy)
        with torch.no_grad():
            x.normal_()
            dy.normal_()
        graph.replay()
        assert torch.equal(found, step(page.plain, x, w, b, dy))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_have_plans_of_their_own():
    given = page.inputs(64, 96, torch.float16)
    expected = step(page.layer_norm, *given)
    with torch.cuda.device(1):
        there = [t.detach().to("cuda:1").requires_grad_() for t in given]
        for _ in range(2):
            got = step(page.layer_norm, *there)
            assert torch.equal(got, expected.to("cuda:1"))
        with pytest.raises(ValueError, match="x is on cuda:0"):
            page.layer_norm(given[0], (96,))


def test_more_than_2_31_elements():
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.empty(M, N, dtype=torch.float16, device="cuda")
    dy = torch.empty_like(x)
    for part in x, dy:
        for rows in part.split(16384):
            rows.normal_()
    x.requires_grad_()
    w, b = torch.rand(2, N, dtype=torch.float16, device="cuda")
    w, b = w.requires_grad_(), b.requires_grad_()
    y = page.layer_norm(x, (N,), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
    sums = torch.zeros(2, N, dtype=torch.float64, device="cuda")
    for X, DY in zip(x.detach().split(8192), dy.split(8192), strict=True):
        X, DY = X.double(), DY.double()
        sums += torch.stack([(DY * F.layer_norm(X, (N,))).sum(0), DY.sum(0)])
    for found, total in zip((dw, db), sums, strict=True):
        assert (found - total).norm() <= 2**-11 * total.norm()
    X = x.detach()[-9:].double().requires_grad_()
    expected = F.layer_norm(X, (N,), w.double(), b.double())
    (grad,) = torch.autograd.grad(expected, X, dy[-9:].double())
    assert (y[-9:] - expected).norm() <= 2**-11 * expected.norm()
    assert (dx[-9:] - grad).norm() <= 2**-11 * grad.norm()


def losses(norm, steps=20):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96, device="cuda") for _ in range(3)]
    w = torch.ones(96, device="cuda", requires_grad=True)
    b = torch.zeros(96, device="cuda", requires_grad=True)
    parameters = [w, b, *(p for f in layers for p in f.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    x = torch.randn(256, 96, device="cuda")
    found = []
    for _ in range(steps):
        h = x
        for layer in layers:
            h = h + F.gelu(layer(norm(h, (96,), w, b)))
        loss = F.mse_loss(h, x.roll(1, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_trains_like_pytorch():
    ours, theirs = losses(page.layer_norm), losses(F.layer_norm)
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


@pytest.mark.parametrize("provider", ["CUDA graph", "torch.compile", "torch"])
def test_what_is_timed_runs(provider):
    with torch.cuda.stream(torch.cuda.Stream()):
        f = page.LADDER[provider]
        call = page.prepared(provider, f, 64, 96, torch.float16)
        (us,) = page.in_turns({provider: call}, rounds=3, times=3).values()
    assert 0 < us[1] <= us[0] <= us[2]


def test_the_parts_of_a_call():
    calls = page.parts(16, 256, torch.float16)
    found = page.in_turns(calls, rounds=3, times=3)
    assert all(0 < low <= us <= high for us, low, high in found.values())


SANITIZED = """
import functools
import torch
from tutorial import load
page = load("layer-norm/10-host-time")
for name in page.LAUNCHERS:
    f = functools.partial(page.layer_norm, launcher=name)
    for _ in range(2):
        page.check(f, 700, 201, torch.float16)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
