"""Checks that need a GPU."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import sanitizer
from conformance.operation import run
from conformance.page_files import pages


def same_bits(page, case, times=100):
    """Nothing depends on the order of the programs."""
    module = page.load()
    function, operation = page.function(case, module), page.operation
    tensors = operation.tensors(case, module.DEVICE)
    first = operation.results(function, case, tensors)
    for _ in range(times):
        again = operation.results(function, case, tensors)
        for name, value in first.items():
            assert torch.equal(value, again[name]), f"{name} differs"


def compiled(page, name, case):
    """torch.compile takes the function whole, both passes."""
    module = page.load()
    torch._dynamo.reset()  # nothing is left of other shapes
    function = torch.compile(
        page.functions[name](module), fullgraph=True, **page.compile_options
    )
    case = dataclasses.replace(case, function=name)
    tensors = page.operation.tensors(case, module.DEVICE)
    found = page.operation.results(function, case, tensors)
    page.operation.judge(case, tensors, found)


def graph(page, case):
    """A CUDA graph gives the right results for numbers written later."""
    module = page.load()
    operation, function = page.operation, page.function(case, module)
    tensors = operation.tensors(case, module.DEVICE)
    other = dataclasses.replace(case, seed=1)
    later = operation.tensors(other, module.DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        operation.results(function, case, tensors)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=stream):
            found = operation.results(function, case, tensors)
        for name, tensor in tensors.items():
            if tensor is not None:
                tensor.copy_(later[name])
        for _ in range(3):
            recorded.replay()
    torch.cuda.synchronize()
    operation.judge(other, later, found)


def losses(layer, device, steps=100, N=192):
    """How the loss of a small model falls."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        layer(N),
        torch.nn.Linear(N, 4 * N),
        torch.nn.GELU(),
        torch.nn.Linear(4 * N, N),
        layer(N),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 64, N, device=device)
    target = x.roll(1, dims=1) + 0.5 * x**2
    found = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def trains(page, name):
    """100 steps: the two curves of losses differ by at most 0.1 %."""
    module = page.load()
    layers = page.operation.model(page.functions[name](module))
    ours, theirs = (losses(layer, module.DEVICE) for layer in layers)
    assert theirs[-1] < 0.9 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


def dies(code):
    """Who waits for what never comes ends with an error, and does not hang;
    alone, for no process can use a GPU after that."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code += "\ntorch.cuda.synchronize()\nprint('no error')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env
    )
    assert done.returncode and "no error" not in done.stdout
    assert "CUDA error" in done.stderr, done.stderr[-2000:]


WATCHED = """
import torch
from conformance import on_gpu
on_gpu.watched({name!r}, {tool!r})
torch.cuda.synchronize()
print("done")
"""


def sanitized(page, tool):
    """compute-sanitizer sees nothing wrong in the cases of the page."""
    printed = sanitizer.run(tool, WATCHED.format(name=page.name, tool=tool))
    if tool == "memcheck":
        assert "ERROR SUMMARY: 0 errors" in printed


def watched(name, tool):
    """What runs under the sanitizer: no bands, each tensor an allocation."""
    page = pages()[name]
    for step in (*page.sanitized, *page.sanitized_by.get(tool, ())):
        if callable(step):
            step(page.load)
            continue
        module = page.load()
        tensors = {
            name: None if t is None else t.clone()
            for name, t in page.operation.tensors(step, module.DEVICE).items()
        }
        page.operation.results(page.function(step, module), step, tensors)


def second(page, name):
    """On the current GPU, whichever it is; on another as the page says."""
    module = page.load()
    case = page.operation.usual(function=name)
    function = page.functions[name](module)
    with torch.cuda.device(1):
        run(page, case, module)
    if page.elsewhere == "right":
        page.operation.run(function, case, torch.device("cuda:1"))
    elif page.elsewhere:
        with pytest.raises(ValueError, match=page.elsewhere):
            page.operation.run(function, case, torch.device("cuda:1"))
