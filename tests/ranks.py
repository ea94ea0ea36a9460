"""Cases of a layer norm whose rows or columns are on several ranks, and the
processes that run them: gloo without a GPU, NCCL with."""

import functools
import importlib
import multiprocessing
import os
import tempfile
import traceback
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tutorial import load

NAME = "several-gpus/01-layer-norm"
LIMIT = 300  # seconds for all that a set of ranks does
SHARDS = ("rows", "columns")
SPLITS = ("even", "uneven", "empty")
WAYS = ("triton", "rows", "gathered", "exchanged", "dtensor", "alone")


@functools.cache
def loaded(replace=()):
    return load(NAME, replace)


def run(world, function, *args, replace=()):
    """What function(page, *args) gives on each rank, or the text of what went
    wrong there."""
    start = "spawn" if torch.cuda.is_available() else "fork"
    context = multiprocessing.get_context(start)
    loaded(replace)  # before a fork: once for all ranks
    importlib.import_module("torch._dynamo")  # collectives import it late

    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            given = rank, world, folder, replace, theirs, function, args
            processes.append(context.Process(target=_be, args=given))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return [
                pipe.recv() if pipe.poll(LIMIT) else "nothing came"
                for pipe in pipes
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _be(rank, world, folder, replace, pipe, function, args):
    torch.set_num_threads(1)
    try:
        page = loaded(replace)
        page.WORLD = world
        page.join(rank, f"file://{folder}/ranks")
        pipe.send(function(page, *args))
        # Who leaves early breaks the connections that others still make: all
        # stay until each has answered, and are ended then.
        pipe.poll(LIMIT)
    except Exception:
        pipe.send(traceback.format_exc())
    pipe.close()
    os._exit(0)  # what ranks share has no order in which it goes


def inputs(page, M, N, dtype=torch.float32, mean=0.0):
    """x, w, b and dy, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    x, dy = torch.randn(2, M, N, generator=generator)
    w, b = torch.rand(2, N, generator=generator)
    return [t.to(dtype).to(page.DEVICE) for t in (x + mean, w, b, dy)]


def sizes(total, how):
    """How much of the rows or columns each rank has."""
    world = dist.get_world_size()
    found = [total // world] * world
    if how == "uneven":  # later ranks have more
        ends = [total * rank**2 // world**2 for rank in range(world + 1)]
        found = [b - a for a, b in pairwise(ends)]
    if how == "empty" and world > 1:
        found = [0] + [total // (world - 1)] * (world - 1)
    found[-1] += total - sum(found)
    return found


def cut(t, shard, how):
    """What this rank has of x, dy or a result like them; or, of fewer
    dimensions, of a weight."""
    if shard == "rows" and t.dim() == 1:
        return t
    dim = 0 if shard == "rows" else -1
    parts = sizes(t.shape[dim], how)
    rank = dist.get_rank()
    start = list(accumulate(parts, initial=0))[rank]
    return t.narrow(dim, start, parts[rank])


def results(function, x, w, b, dy, **more):
    """y, dx, dw and db."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = function(leaves[0], leaves[1].shape, *leaves[1:], **more)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def relative(found, expected):
    if not expected.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()


def errors(page, shard, how, M, N, dtype=torch.float32, mean=0.0):
    """The relative errors of ours, and of PyTorch's on the whole; and the
    bits of what must be alike on all ranks."""
    given = inputs(page, M, N, dtype, mean)
    exact = results(F.layer_norm, *(t.double() for t in given))
    theirs = results(F.layer_norm, *given)
    part = [cut(t, shard, how) for t in given]
    ours = results(page.layer_norm, *part, shard=shard)
    expected = [cut(t, shard, how) for t in exact]
    assert [t.shape for t in ours] == [t.shape for t in expected]
    assert all(t.dtype == dtype for t in ours)
    alike = ours[2:]
    if shard == "columns":
        w, b = (t.contiguous() for t in part[1:3])
        counts = tuple(sizes(N, how))
        whole = part[0].contiguous(), w, b, 1e-5, counts, dist.group.WORLD
        alike = page.forward(*whole)[1]
    return (
        [relative(*pair) for pair in zip(ours, expected, strict=True)],
        [relative(*pair) for pair in zip(theirs, exact, strict=True)],
        [t.float().cpu().numpy().tobytes() for t in alike],
    )


def judge(page, M=5, N=20):
    """Both shards, uneven and with a rank that has nothing."""
    for shard in SHARDS:
        for how in "uneven", "empty":
            found, _, _ = errors(page, shard, how, M, N)
            assert max(found) < 1e-6, (shard, how, found)


def bits(page, shard, M, N, times):
    """How many different results there are in some runs."""
    part = [cut(t, shard, "even") for t in inputs(page, M, N)]
    seen = set()
    for _ in range(times):
        found = results(page.layer_norm, *part, shard=shard)
        seen.add(b"".join(t.cpu().numpy().tobytes() for t in found))
    return len(seen)


def disagree(page, *changes):
    """What each change of rank 1's arguments leads to on this rank."""
    said = []
    for change in changes:
        x, w, b, _ = inputs(page, 4, 8)
        given = {"x": x, "normalized_shape": 8, "weight": w, "bias": b}
        given["shard"] = change.get("all", "rows")
        if dist.get_rank() == 1 or change.get("on") == "all":
            given |= {
                name: value(given[name]) if callable(value) else value
                for name, value in change.items()
                if name not in ("all", "on")
            }
        try:
            page.layer_norm(**given)
            said.append("")
        except ValueError as error:
            said.append(f"ValueError: {error}")
    page.layer_norm(*inputs(page, 4, 8)[:1], 8)  # they can go on
    return said


def timed(page, counts):
    """What is timed, with a clock that runs it once: {(ranks, way): the
    lengths of what it gives}, None on who is not among the ranks."""

    def once(call, group):
        call()
        return 2.0, 1.0, 3.0

    page.time_in_turns = lambda calls, group: {
        way: once(call, group) for way, call in calls.items()
    }
    page.time_together = lambda prepare, group: once(prepare(), group)
    given, found = (8, 64, torch.float32), {}
    for ranks in counts:
        for way in WAYS:
            for mode in "forward", "backward":
                took = page.time_columns(*given, mode, ranks, way)
                found[ranks, mode, way] = took
        calls = page.time_calls(*given, ranks)
        for way in page.CALLS:
            found[ranks, "call", way] = calls and calls[way]
        found[ranks, "one"] = page.time_rows(*given, "backward", ranks, "one")
    return found


def graphs(page, shard, M, N):
    """Whether a graph of both passes gives what an eager call gives, also
    for new numbers."""
    x, w, b, dy = (cut(t, shard, "even") for t in inputs(page, M, N))
    x, w, b = (t.detach().clone().requires_grad_() for t in (x, w, b))

    def step():
        y = page.layer_norm(x, w.shape, w, b, shard=shard)
        dx, dw, db = torch.autograd.grad(y, (x, w, b), dy)
        return y, dx, dw + 0, db + 0  # waits for what is promised

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph,
        stream=torch.cuda.current_stream(),
        capture_error_mode="thread_local",
    ):
        found = step()
    with torch.no_grad():
        x.mul_(0.5).add_(1)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return all(map(torch.equal, found, step()))


def peers(page, M, N):
    """The relative errors of y, dx, dw and db, in each way that the page
    compares; or why a way does not run. Each has some of the whole."""
    group = dist.group.WORLD
    whole = inputs(page, M, N)
    x, w, b, dy = (cut(t, "columns", "even").contiguous() for t in whole)
    exact = results(F.layer_norm, *(t.double() for t in whole))
    of_columns = [cut(t, "columns", "even") for t in exact]
    found = {}
    for way in WAYS[:-1]:  # "alone" has other rows
        try:
            forth, back = page.CALLS_OF[way](x, w, b, dy, group)
            y, (dx, *sums) = forth(), back()
        except RuntimeError as error:
            found[way] = str(error)
            continue
        dw, db = sums[0] if len(sums) == 1 else sums
        found[way] = []
        for one, part, all_of_it in zip(
            (y, dx, dw, db), of_columns, exact, strict=True
        ):
            if hasattr(one, "full_tensor"):
                one = one.full_tensor()
            expected = part if one.shape == part.shape else all_of_it
            assert one.shape == expected.shape, (way, one.shape)
            found[way].append(relative(one, expected))
    dist.barrier(group)
    return found


def copying(page, times=1):
    """A call that copies a matrix, which is larger than L2."""
    x = torch.randn(4096, 8192, device=page.DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)

    def call():
        for _ in range(times):
            y.copy_(x)

    return call


def seconds(page):
    """What the clock of a rank says, in µs: of no call, of a copy, and of
    four copies on rank 1 beside one on rank 0."""
    group = page.group_of(2)
    calls = {
        "nothing": lambda: lambda: None,
        "copy": lambda: copying(page),
        "uneven": lambda: copying(page, 1 + 3 * dist.get_rank()),
    }
    return {
        name: page.time_together(prepare, group)[0]
        for name, prepare in calls.items()
    }


def everything(page):
    """What the ranks of one set try; more on GPUs. Once for all tests, for
    processes start slowly."""
    found = {"errors": {}}
    M, N = (515, 2000) if page.ON_GPU else (5, 20)
    widths = (64, 4096, 16384, 32768) if page.ON_GPU else (N,)
    for shard in SHARDS:
        for how in SPLITS:
            key = shard, how, N, torch.float32
            found["errors"][key] = errors(page, shard, how, M, N)
        split = "even" if page.ON_GPU else "uneven"
        for width in widths:
            for dtype in torch.bfloat16, torch.float16, torch.float32:
                key = shard, split, width, dtype
                given = page, shard, split, M, width, dtype
                found["errors"][key] = errors(*given)
        given = page, shard, "uneven", M, N
        found["errors"][shard, "mean"] = errors(*given, mean=1e4)
    if page.ON_GPU:
        for shard in SHARDS:
            found["graphs", shard] = graphs(page, shard, 512, 4096)
            found["bits", shard] = bits(page, shard, 512, 4096, 100)
        found["wide peers"] = peers(page, 512, 32768)
    # As many rows and columns as all worlds divide.
    found["peers"] = peers(page, *((512, 4096) if page.ON_GPU else (6, 24)))
    return found
