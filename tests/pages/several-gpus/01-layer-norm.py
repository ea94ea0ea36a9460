"""What must hold of the page "Layer norm over several GPUs"."""

import functools
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import ranks as several
import tutorial
from compiled.declared import Kernel, Kernels


def run(page, M, N, dtype):
    x, dy = torch.empty(2, M, N, dtype=dtype, device=page.DEVICE)
    w, b = torch.empty(2, N, dtype=dtype, device=page.DEVICE)
    _, stats = page.forward(x, w, b, 1e-5)
    page.forward(x, w, b, 1e-5, (N,))
    page.backward(dy, x, w, stats)
    page.backward(dy, x, w, stats, (N,))


def also(page, M, N, dtype):
    x, dy = torch.empty(2, 5, 1000, dtype=dtype, device=page.DEVICE)
    w, b = torch.empty(2, 1000, dtype=dtype, device=page.DEVICE)
    parts = torch.empty(2, 2, 5, device=page.DEVICE)
    y, stats = torch.empty_like(x), parts[0]
    given = x, w, b, y, stats, parts, 5, 1e-5, 1000, (1000, 24)
    page._forward[(5,)](*given, **page.lanes(1000))
    page.backward(dy, x, w, stats)


def ask_for_gpus(page):
    """As the script does when it is loaded: see test_kernels_compiled.py."""
    assert torch.cuda.device_count() == 2


PUBLISHED = "2026-11-22"

KERNELS = Kernels(
    run=run,
    also=also,
    M=4096,
    N=[4096, 32768],
    dtype="bfloat16",
    sizes={
        "bfloat16": [1024, 2048, 4096, 8192, 16384, 32768],
        "float16": [4096],
        "float32": [2048, 8192],
    },
    kernels={
        "_part": Kernel(
            look="""
            The row is loaded once, by 16 bytes.
            Threads wait for each other in three sums, and two numbers are
            stored.
            """,
            true=lambda code: [
                code.narrow("load") == 0,
                len(code.lines("shuffle")) == 3,
            ],
            narrow_stores=2,  # mean and M2
        ),
        "_forward": Kernel(
            look="""
            Shown as it merges parts: no thread waits for another, as no sum is
            left.
            """,
            true=lambda code: [code.count("shuffle") == 0],
            narrow_loads=2,  # mean and M2 of a part
            narrow_stores=2,  # mean and rstd
        ),
        "_row_sums": Kernel(
            look="""
            ``dy``, ``w`` and ``x`` are read once, by 16 bytes; two sums are
            stored.
            """,
            true=lambda code: [len(code.lines("shuffle")) == 2],
            narrow_loads=2,  # mean and rstd
            narrow_stores=2,
        ),
        "_backward": Kernel(
            look="""
            Shown with sums that are known: no thread waits for another within
            a row, and loads of the rows that follow are asked for ahead.
            """,
            true=lambda code: [(code.count("copy") > 0) != code.amd],
            true_at={16384: lambda code: [len(code.lines("load")) == 4]},
            copies=True,
            narrow_copies=15,  # w, and four numbers of each row
            spills={2048: 8, 8192: 8},  # in float32
        ),
    },
)


CPU = pytest.mark.cpu
GPUS = pytest.mark.gpu
HALF, SINGLE = torch.float16, torch.float32
ON_GPU = torch.cuda.is_available()
WORLDS = (1, 2, 3)
LIMITS = {SINGLE: 1e-6, HALF: 2**-11, torch.bfloat16: 2**-8}
if ON_GPU:
    WORLDS = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
else:
    # The interpreter cuts bfloat16, and does not round it.
    LIMITS[torch.bfloat16] = 2**-7
EACH = pytest.mark.parametrize("shard", several.SHARDS)


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    found = several.run(request.param, several.everything)
    for said in found:
        assert isinstance(said, dict), said
    return found


def test_all_results(ranks):
    for found in ranks:
        for case, (ours, _, _) in found["errors"].items():
            if case[1] != "mean":
                assert max(ours) <= LIMITS[case[-1]], case


@EACH
def test_a_mean_of_10000(ranks, shard):
    """At most twice the error of PyTorch's on one rank, over all results."""
    pairs = (found["errors"][shard, "mean"][:2] for found in ranks)
    ours, theirs = (
        torch.tensor(errors).square().mean()
        for errors in zip(*pairs, strict=True)
    )
    assert ours <= 4 * theirs


def test_the_same_bits_on_all_ranks(ranks):
    for case in ranks[0]["errors"]:
        bits = {tuple(found["errors"][case][2]) for found in ranks}
        assert len(bits) == 1, case


@GPUS
@EACH
def test_the_same_bits_100_times(ranks, shard):
    assert [found["bits", shard] for found in ranks] == [1] * len(ranks)


@GPUS
@EACH
def test_graphs(ranks, shard):
    assert all(found["graphs", shard] for found in ranks)


@GPUS
def test_peers_compute_the_same(ranks):
    """DTensor where it runs; where not, it says why."""
    for found in ranks:
        assert max(found["peers"]["rows"]) < 1e-6
        dtensor = found["peers"]["dtensor"]
        if isinstance(dtensor, list):
            assert max(dtensor) < 1e-6


ROUGH = "mean = tl.sum(x) / max(N, 1)", "mean = tl.sum(x) / max(N, 1) * {}"


def at_10000(page):
    given = {"how": "uneven", "M": 5, "N": 20, "mean": 1e4}
    return {
        shard: several.errors(page, shard, **given) for shard in several.SHARDS
    }


@CPU
@pytest.mark.parametrize("ulps", [-2, 2])
def test_a_division_as_rough_as_on_a_gpu(ulps):
    """There ``/`` may be off by two units of the last digit."""
    replace = ((ROUGH[0], ROUGH[1].format(1 + ulps * 2**-23)),)
    for found in several.run(2, at_10000, replace=replace):
        assert isinstance(found, dict), found
        for ours, theirs, _ in found.values():
            ours, theirs = map(torch.tensor, (ours, theirs))
            assert ours.square().mean() <= 4 * theirs.square().mean()


def arguments(page):
    """Weights that are missing, gradients that nobody wants, dimensions."""
    x, w, b, dy = several.inputs(page, 4, 6)
    for shard in several.SHARDS:
        for given in (None, None), (w, None), (None, b):
            part = [
                t if t is None else several.cut(t, shard, "uneven")
                for t in (x, *given, dy)
            ]
            leaf = part[0].clone().requires_grad_()
            shape = leaf.shape[1:]
            y = page.layer_norm(leaf, shape, *part[1:3], shard=shard)
            (dx,) = torch.autograd.grad(y, leaf, part[3])
            there = x.double().requires_grad_()
            wide = [None if t is None else t.double() for t in given]
            expected = torch.nn.functional.layer_norm(there, (6,), *wide)
            (exact,) = torch.autograd.grad(expected, there, dy.double())
            for found, value in (y, expected), (dx, exact):
                value = several.cut(value, shard, "uneven")
                assert several.relative(found, value) < 1e-6
    x = torch.randn(2, 3, 2, 4).transpose(0, 1)
    y = page.layer_norm(x, (2, 4))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (2, 4)))
    return True


def promises(page):
    """What uses a gradient waits for it; nobody must ask."""
    x, w, b, dy = several.inputs(page, 4, 6)
    w, b = (torch.nn.Parameter(t) for t in (w, b))
    page.layer_norm(x[dist.get_rank() :: 2], 6, w, b).backward(dy[:2])
    kind = type(w.grad).__name__
    torch.optim.SGD([w, b], lr=1.0).step()
    return kind, w.detach().tolist()


def subgroups(page):
    """The first two of three ranks; the third has one of its own."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    group = alone if dist.get_rank() == 2 else pair
    x, w, b, dy = several.inputs(page, 4, 6)
    given = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = page.layer_norm(given[0], 6, *given[1:], group=group)
    return torch.autograd.grad(y, given[2], dy)[0].tolist(), dy.sum(0).tolist()


def of_two(page):
    return (
        arguments(page),
        promises(page),
        several.bits(page, "rows", 6, 44, 9),
    )


@CPU
def test_arguments_promises_and_bits():
    for found in several.run(2, of_two):
        assert isinstance(found, tuple), found
        right, (kind, stepped), different = found
        assert right and different == 1
        assert kind == "AsyncCollectiveTensor"
        assert isinstance(stepped[0], float)


@CPU
def test_a_group_is_some_of_the_ranks():
    for rank, (db, one) in enumerate(several.run(3, subgroups)):
        times = 1 if rank == 2 else 2
        torch.testing.assert_close(torch.tensor(db), times * torch.tensor(one))


# Taken on each, and not alike.
DIFFERENT = (
    {"x": torch.Tensor.half},
    {"weight": torch.Tensor.half},
    {"weight": None},
    {"bias": lambda t: t.requires_grad_()},
    {"eps": 1e-3},
    {"shard": "columns"},
    {"all": "columns", "x": lambda t: t[:3]},
    {"all": "columns", "weight": torch.Tensor.half},
    {"all": "columns", "x": torch.Tensor.half},
)
# Not taken on one, or not even described; then on both.
REFUSED = (
    {"bias": lambda t: t[:7]},
    {"x": lambda t: t[:, :7]},
    {"x": torch.Tensor.int},
    {"x": torch.Tensor.double},
    {"x": lambda t: t.to("meta")},
    {"x": None},
    {"weight": "ones"},
    {"normalized_shape": (2, 4)},
    {"normalized_shape": ()},
    {"normalized_shape": "8"},
    {"normalized_shape": (4, 2, 4, 8)},
    {"shard": "row"},
    {"on": "all", "x": None},
    {"on": "all", "x": torch.Tensor.double},
    {"on": "all", "shard": "row"},
)


@CPU
def test_ranks_that_disagree():
    """An error on each, that names the rank and what it has."""
    found = several.run(2, several.disagree, *DIFFERENT, *REFUSED)
    said = zip(DIFFERENT + REFUSED, *found, strict=True)
    for change, mine, theirs in said:
        assert mine == theirs
        rank = 0 if change.get("on") == "all" else 1
        assert mine.startswith(f"ValueError: rank {rank} has {{")
        end = ", rank 0 {" if change in DIFFERENT else "}; taken are "
        assert end in mine
    assert "torch.float64" in found[0][-2]


@GPUS
@pytest.mark.skipif(len(WORLDS) == 0, reason="there is one GPU, not two")
def test_gpus_that_disagree():
    changes = (
        {"x": torch.Tensor.half},
        {"weight": None},
        {"shard": "columns"},
        {"eps": 1e-3},
    )
    found = several.run(2, several.disagree, *changes)
    for mine, theirs in zip(*found, strict=True):
        assert mine == theirs
        assert mine.startswith("ValueError: rank 1 has {")


MUTANTS = {
    "no sum over ranks": (
        'functional.all_reduce(sums, "sum", group)', "sums"
    ),
    "a mean in place of the sum": ('(sums, "sum", group)',
                                   '(sums, "avg", group)'),
    "parts count alike": ("share = COUNTS[rank] / max(n + COUNTS[rank], 1)",
                          "share = 1 / (rank + 1)"),
    "M2 without the distance": ("tl.load(at + M) + d * d * n * share",
                                "tl.load(at + M)"),
    "the columns of a rank": ("sum(counts or [N])", "N"),
    "row sums of a rank": ("dist.all_reduce(c, group=group)", "pass"),
    "one rank's part": ("gathered(part, group) if group else part",
                        "torch.stack([part] * len(counts))"),
    "one number short": ("tl.store(c_ptr + M + row, tl.sum(wdy))", "pass"),
    "idle lanes": ("tl.where(tl.arange(0, BLOCK) < N, x - mean, 0)",
                   "x - mean"),
    "no call without rows": ("if not counts and any(",
                             "if not counts and len(x) and any("),
}  # fmt: skip


@CPU
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name, monkeypatch):
    monkeypatch.setattr(several, "LIMIT", 5)  # where one waits for another
    found = several.run(2, several.judge, replace=(MUTANTS[name],))
    assert any(said is not None for said in found)


@CPU
def test_no_mutant_passes():
    assert several.run(2, several.judge) == [None, None]


@CPU
def test_a_rank_that_dies_ends_all(capfd, monkeypatch):
    """One has rows of another size; it says so, and nobody waits for it."""
    one = "x + mean, w[0]"
    bad = tutorial.load(
        several.NAME, [(one, "x[:, dist.get_rank() :] + mean, w[0]")]
    )
    # Once: a rank that has just been started may be reading the file.
    monkeypatch.setattr(bad, "written", functools.cache(bad.written))
    start, ranks = time.monotonic(), bad.Ranks()
    with pytest.raises(RuntimeError, match="a rank has ended"):
        ranks(bad.errors, "rows", 4, 8, 0)
    for process in ranks.all:
        assert process.wait(30)
    assert time.monotonic() - start < 90
    assert "[rank1]: Traceback" in capfd.readouterr().err


@CPU
def test_some_ranks_are_timed_and_the_others_wait():
    """Of two by two of three, and all ways of a figure run."""
    for rank, found in enumerate(several.run(3, several.timed, (2,))):
        assert isinstance(found, dict), found
        assert all((took is None) == (rank == 2) for took in found.values())
        assert found[2, "one"] in (None, [2, 1, 3])


@CPU
@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(world):
    assert several.run(world, several.judge) == world * [None]


@CPU
@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_are_timed(world):
    counts = [count for count in (2, 4, 8) if count <= world]
    for rank, found in enumerate(several.run(world, several.timed, counts)):
        assert isinstance(found, dict), found
        for (ranks, *_), took in found.items():
            assert (took is None) == (rank >= ranks)


@pytest.mark.long
def test_torchrun_says_the_same(tmp_path, output):
    from alone import NO_GPU

    script = shutil.copy(tutorial.script_of(several.NAME), tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | NO_GPU,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == output


def test_script_runs_alone(output):
    assert output.count("Timing needs two GPUs") == 3
    lines = output.splitlines()
    assert sum("errors below" in line for line in lines) == 4


def test_sum_or_mean(output):
    found = {
        line.partition(":")[0]: line.rpartition(": ")[2]
        for line in output.splitlines()
        if ": dw over" in line
    }
    assert found.pop("nobody adds") not in found.values()
    assert found == {
        "DDP": "[1.0, 1.0, 1.0]",
        "ours": "[2.0, 2.0, 2.0]",
        "ours in DDP": "[2.0, 2.0, 2.0]",
    }


def test_exercise(output):
    stub, solution = (
        line.rpartition(": ")[2]
        for line in output.splitlines()
        if line.startswith("dw over what it should be")
    )
    assert (stub, solution) == ("[2.0, 2.0, 2.0]", "[1.0, 1.0, 1.0]")
