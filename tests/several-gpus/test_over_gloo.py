"""Layer norm over several ranks: gloo and Triton's interpreter."""

import functools
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import sharded_norm_cases as cases
import tutorial
from alone import NO_GPU
from tutorial import load

NAME = cases.NAME
page = cases.loaded()


def everything(page):
    """What the ranks of one set try."""
    found = {}
    for shard in cases.SHARDS:
        for how in cases.SPLITS:
            found[shard, how] = cases.errors(page, shard, how, 5, 20)
        for what, more in TYPES.items():
            given = page, shard, "uneven", 5, 20
            found[shard, what] = cases.errors(*given, **more)
    return found


TYPES = {
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "mean": {"mean": 1e4},
}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request):
    found = cases.run(request.param, everything)
    for said in found:
        assert isinstance(said, dict), said
    return found


@pytest.mark.parametrize("how", cases.SPLITS)
@pytest.mark.parametrize("shard", cases.SHARDS)
def test_all_results(ranks, shard, how):
    for found in ranks:
        assert max(found[shard, how][0]) <= 1e-6


@pytest.mark.parametrize("shard", cases.SHARDS)
def test_types(ranks, shard):
    for found in ranks:
        assert max(found[shard, "float16"][0]) <= 2**-11
        # The interpreter cuts bfloat16, and does not round it.
        assert max(found[shard, "bfloat16"][0]) <= 2**-7


@pytest.mark.parametrize("shard", cases.SHARDS)
def test_a_mean_of_10000(ranks, shard):
    """At most twice the error of PyTorch's on one rank, over all results."""
    both = zip(*(found[shard, "mean"][:2] for found in ranks), strict=True)
    ours, theirs = (torch.tensor(errors).square().mean() for errors in both)
    assert ours <= 4 * theirs


ROUGH = "mean = tl.sum(x) / max(N, 1)", "mean = tl.sum(x) / max(N, 1) * {}"


def at_10000(page):
    given = {"how": "uneven", "M": 5, "N": 20, "mean": 1e4}
    return {
        shard: cases.errors(page, shard, **given) for shard in cases.SHARDS
    }


@pytest.mark.parametrize("ulps", [-2, 2])
def test_a_division_as_rough_as_on_a_gpu(ulps):
    """There ``/`` may be off by two units of the last digit."""
    replace = ((ROUGH[0], ROUGH[1].format(1 + ulps * 2**-23)),)
    for found in cases.run(2, at_10000, replace=replace):
        assert isinstance(found, dict), found
        for ours, theirs, _ in found.values():
            ours, theirs = map(torch.tensor, (ours, theirs))
            assert ours.square().mean() <= 4 * theirs.square().mean()


def test_the_same_bits_on_all_ranks(ranks):
    for case in ranks[0]:
        assert len({tuple(found[case][2]) for found in ranks}) == 1, case


def arguments(page):
    """Weights that are missing, gradients that nobody wants, dimensions."""
    x, w, b, dy = cases.inputs(page, 4, 6)
    for shard in cases.SHARDS:
        for given in (None, None), (w, None), (None, b):
            part = [
                t if t is None else cases.cut(t, shard, "uneven")
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
                value = cases.cut(value, shard, "uneven")
                assert cases.relative(found, value) < 1e-6
    x = torch.randn(2, 3, 2, 4).transpose(0, 1)
    y = page.layer_norm(x, (2, 4))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (2, 4)))
    return True


def promises(page):
    """What uses a gradient waits for it; nobody must ask."""
    x, w, b, dy = cases.inputs(page, 4, 6)
    w, b = (torch.nn.Parameter(t) for t in (w, b))
    page.layer_norm(x[dist.get_rank() :: 2], 6, w, b).backward(dy[:2])
    kind = type(w.grad).__name__
    torch.optim.SGD([w, b], lr=1.0).step()
    return kind, w.detach().tolist()


def subgroups(page):
    """The first two of three ranks; the third has one of its own."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    group = alone if dist.get_rank() == 2 else pair
    x, w, b, dy = cases.inputs(page, 4, 6)
    given = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = page.layer_norm(given[0], 6, *given[1:], group=group)
    return torch.autograd.grad(y, given[2], dy)[0].tolist(), dy.sum(0).tolist()


def some(page):
    return arguments(page), promises(page), cases.bits(page, "rows", 6, 44, 9)


def test_arguments_promises_and_bits():
    for found in cases.run(2, some):
        assert isinstance(found, tuple), found
        right, (kind, stepped), different = found
        assert right and different == 1
        assert kind == "AsyncCollectiveTensor"
        assert isinstance(stepped[0], float)


def test_a_group_is_some_of_the_ranks():
    for rank, (db, one) in enumerate(cases.run(3, subgroups)):
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


def test_ranks_that_disagree():
    """An error on each, that names the rank and what it has."""
    found = cases.run(2, cases.disagree, *DIFFERENT, *REFUSED)
    said = zip(DIFFERENT + REFUSED, *found, strict=True)
    for change, mine, theirs in said:
        assert mine == theirs
        rank = 0 if change.get("on") == "all" else 1
        assert mine.startswith(f"ValueError: rank {rank} has {{")
        end = ", rank 0 {" if change in DIFFERENT else "}; taken are "
        assert end in mine
    assert "torch.float64" in found[0][-2]


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


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name, monkeypatch):
    monkeypatch.setattr(cases, "LIMIT", 5)  # where one waits for another
    found = cases.run(2, cases.judge, replace=(MUTANTS[name],))
    assert any(said is not None for said in found)


def test_no_mutant_passes():
    assert cases.run(2, cases.judge) == [None, None]


def test_a_rank_that_dies_ends_all(capfd, monkeypatch):
    """One has rows of another size; it says so, and nobody waits for it."""
    one = "x + mean, w[0]"
    bad = load(NAME, [(one, "x[:, dist.get_rank() :] + mean, w[0]")])
    # Once: a rank that has just been started may be reading the file.
    monkeypatch.setattr(bad, "written", functools.cache(bad.written))
    start, ranks = time.monotonic(), bad.Ranks()
    with pytest.raises(RuntimeError, match="a rank has ended"):
        ranks(bad.errors, "rows", 4, 8, 0)
    for process in ranks.all:
        assert process.wait(30)
    assert time.monotonic() - start < 90
    assert "[rank1]: Traceback" in capfd.readouterr().err


def test_some_ranks_are_timed_and_the_others_wait():
    """Of two by two of three, and all ways of a figure run."""
    for rank, found in enumerate(cases.run(3, cases.timed, (2,))):
        assert isinstance(found, dict), found
        assert all((took is None) == (rank == 2) for took in found.values())
        assert found[2, "one"] in (None, [2, 1, 3])


@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks(world):
    assert cases.run(world, cases.judge) == world * [None]


@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_are_timed(world):
    counts = [count for count in (2, 4, 8) if count <= world]
    for rank, found in enumerate(cases.run(world, cases.timed, counts)):
        assert isinstance(found, dict), found
        for (ranks, *_), took in found.items():
            assert (took is None) == (rank >= ranks)


@pytest.mark.long
def test_torchrun_says_the_same(tmp_path, output):
    script = shutil.copy(tutorial.script_of(NAME), tmp_path)
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
