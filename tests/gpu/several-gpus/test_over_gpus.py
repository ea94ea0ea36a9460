"""Layer norm over several GPUs: on two of them, on four and on eight."""

import pytest
import torch

import sharded_norm_cases as cases

WORLDS = [n for n in (2, 4, 8) if n <= torch.cuda.device_count()]
if not WORLDS:
    pytest.skip("needs two GPUs", allow_module_level=True)

LIMITS = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    found = cases.run(request.param, cases.on_gpus)
    for said in found:
        assert isinstance(said, dict), said
    return found


def test_all_results(ranks):
    for found in ranks:
        for case, (ours, _, _) in found["errors"].items():
            if case[1] != "mean":
                assert max(ours) <= LIMITS[case[-1]], case


@pytest.mark.parametrize("shard", cases.SHARDS)
def test_a_mean_of_10000(ranks, shard):
    """At most twice the error of PyTorch's on one GPU, over all results."""
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


@pytest.mark.parametrize("shard", cases.SHARDS)
def test_the_same_bits_100_times(ranks, shard):
    assert [found["bits"][shard] for found in ranks] == [1] * len(ranks)


@pytest.mark.parametrize("shard", cases.SHARDS)
def test_graphs(ranks, shard):
    assert all(found["graphs"][shard] for found in ranks)


def test_peers_compute_the_same(ranks):
    """DTensor where it runs; where not, it says why."""
    for found in ranks:
        assert max(found["peers"]["rows"]) < 1e-6
        dtensor = found["peers"]["dtensor"]
        if isinstance(dtensor, list):
            assert max(dtensor) < 1e-6


def test_ranks_that_disagree():
    changes = (
        {"x": torch.Tensor.half},
        {"weight": None},
        {"shard": "columns"},
        {"eps": 1e-3},
    )
    found = cases.run(2, cases.disagree, *changes)
    for mine, theirs in zip(*found, strict=True):
        assert mine == theirs
        assert mine.startswith("ValueError: rank 1 has {")
