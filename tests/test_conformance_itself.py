"""The suite notices faults that are planted in results, not in kernels."""

import pytest
import torch

from conformance import (
    AddNorm,
    AnyAttention,
    Attention,
    AttentionCase,
    CrossEntropy,
    Gate,
    LayerNorm,
    LayerNormCase,
    Linear,
    LinearCase,
    LinearCrossEntropy,
    LinearCrossEntropyCase,
    RmsNorm,
    Rotary,
    RotaryCase,
    Softmax,
    SoftmaxCase,
    guarded_allocations,
)
from conformance.bounds import Expected, compare
from conformance.pairs import table

CPU = torch.device("cpu")
HALF, SINGLE = torch.float16, torch.float32


def layer_norm(x, shape, *parameters):
    """PyTorch's, beside a buffer that torch.empty gave."""
    torch.empty(1)
    return torch.nn.functional.layer_norm(x, shape, *parameters)


def right(case, operation=None):
    """The exact results, each rounded to its type."""
    operation = operation or LayerNorm()
    tensors, found = operation.tensors(case, CPU), {}
    empty = torch.empty(case.shape)  # for y, which dx belongs to
    for _ in "twice":
        expected = operation.exact(case, tensors, found or {"y": empty})
        found = {n: e.value.to(e.dtype) for n, e in expected.items()}
    return operation, tensors, found


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE])
def test_what_is_right_passes(dtype):
    for case, of in (
        (LayerNormCase(lead=(40,), dtype=dtype), LayerNorm()),
        (SoftmaxCase(dtype=dtype), Softmax()),
        (SoftmaxCase(dtype=dtype, function="log_softmax"), Softmax()),
    ):
        operation, tensors, found = right(case, of)
        operation.judge(case, tensors, found)


def zero(t):
    t[(t.numel() // 2)] = 0


def few_units(t):
    """Four in the last place; of float32 a thousandth of the largest."""
    off = 1e-3 * t.abs().max() if t.dtype == SINGLE else 2.0**-8 * t[7]
    t[7] += off


def swap(t):
    t[[3, 5]] = t[[5, 3]]


def nan(t):
    t[-1] = float("nan")


@pytest.mark.parametrize("fault", [zero, few_units, swap, nan])
@pytest.mark.parametrize("name", ["y", "dx", "dweight", "dbias"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_one_element_shows(name, fault, dtype):
    """As in a matrix of the size that the first page checks on a GPU, where
    it would be lost in the norm of the whole."""
    case = LayerNormCase(lead=(151,), shape=(1024,), dtype=dtype)
    operation, tensors, found = right(case)
    fault(found[name].view(-1))
    with pytest.raises(AssertionError, match=rf"{name}: (error|inf).* at "):
        operation.judge(case, tensors, found)


@pytest.mark.parametrize("fault", [zero, few_units, swap, nan])
@pytest.mark.parametrize("name", ["y", "dx"])
@pytest.mark.parametrize("log", ["", "log_"])
def test_one_element_of_a_softmax_shows(name, fault, log):
    case = SoftmaxCase(shape=(151, 1000), function=f"{log}softmax")
    operation, tensors, found = right(case, Softmax())
    fault(found[name].view(-1))
    with pytest.raises(AssertionError, match=rf"{name}: error .* at "):
        operation.judge(case, tensors, found)


@pytest.mark.parametrize("fault", [zero, swap, nan])
@pytest.mark.parametrize(
    "operation",
    [
        AddNorm(),
        RmsNorm(),
        RmsNorm(alone=True),
        CrossEntropy(),
        Rotary(),
        Gate(),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_one_element_of_any_result_shows(operation, fault):
    case = operation.usual(dtype=HALF)
    tensors = operation.tensors(case, CPU)
    residual = tensors.get("residual")
    found = {}
    if residual is not None:
        full = tensors["x" if "x" in tensors else "input"]
        found = {"s": residual + full}
    expected = operation.exact(case, tensors, found)
    found = {n: e.value.to(e.dtype) for n, e in expected.items()}
    operation.judge(case, tensors, found)
    for name, whole in found.items():
        if whole.numel() > 7:
            wrong = found | {name: whole.clone()}
            fault(wrong[name].view(-1)[-30:])  # of a row that counts
            with pytest.raises(AssertionError, match=r": (error|inf)"):
                operation.judge(case, tensors, wrong)


def right_attention(case, operation):
    """Tensors, and the exact results, each rounded to its type."""
    tensors = operation.tensors(case, CPU)
    found = {"y": torch.zeros_like(tensors["query"])}
    for _ in "twice":  # the gradients belong to y
        expected = operation.exact(case, tensors, found)
        found = {n: e.value.to(e.dtype) for n, e in expected.items()}
    operation.judge(case, tensors, found)
    return tensors, found


@pytest.mark.parametrize("fault", [zero, swap, nan])
@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        (Attention(), {"dtype": HALF}),
        (Attention(), {"dtype": torch.bfloat16}),
        (AnyAttention(), {"dtype": HALF, "causal": True, "group": 2}),
        (AnyAttention(), {"dtype": SINGLE, "causal": True}),
    ],
    ids=["float16", "bfloat16", "causal groups", "float32"],
)
def test_one_element_of_attention_shows(operation, fields, fault):
    case = AttentionCase(queries=60, keys=40, **fields)
    tensors, found = right_attention(case, operation)
    for name, whole in found.items():
        wrong = found | {name: whole.clone()}
        fault(wrong[name].view(-1)[-30:])
        with pytest.raises(AssertionError, match=rf"{name}: (error|inf)"):
            operation.judge(case, tensors, wrong)


@pytest.mark.parametrize("name", ["y", "dx"])
@pytest.mark.parametrize("fault", ["pairs", "sign", "position", "head"])
def test_another_rotation_shows(name, fault):
    """Each of these gives numbers of the right size."""
    case = RotaryCase(dtype=HALF)
    operation = Rotary()
    tensors = operation.tensors(case, CPU)
    other, turned = case, dict(tensors)
    if fault == "pairs":
        other = RotaryCase(dtype=HALF, interleaved=True)
    if fault == "sign":
        turned["sin"] = -tensors["sin"]
    if fault == "position":
        for table in ("cos", "sin"):
            turned[table] = tensors[table].roll(1, 0)
    if fault == "head":
        for t in ("x", "dy"):
            turned[t] = tensors[t].roll(1, 1)
    right, wrong = (
        {n: e.value.to(e.dtype) for n, e in operation.exact(*given).items()}
        for given in ((case, tensors, {}), (other, turned, {}))
    )
    operation.judge(case, tensors, right)
    with pytest.raises(AssertionError, match=rf"{name}: error"):
        operation.judge(case, tensors, right | {name: wrong[name]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, SINGLE])
def test_powers_that_a_gpu_flushes_may_be_lost(dtype):
    """Powers below the normal numbers count as 0 there, and all that is
    multiplied by them."""
    fields = {"causal": True, "large": 30.0, "scale": 2.0, "seed": 10}
    case = AttentionCase((1, 2), 40, 40, 32, dtype=dtype, **fields)
    operation = AnyAttention()
    tensors, found = right_attention(case, operation)
    small = found["dkey"].abs() < 5e-36
    assert (found["dkey"][small] != 0).any()
    found["dkey"] = found["dkey"].masked_fill(small, 0)
    operation.judge(case, tensors, found)


def other_corner(q, k, v):
    """The last query sees all keys, and not the first query one."""
    unseen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    unseen = unseen.triu(1 + k.shape[2] - q.shape[2])
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(unseen, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def interleaved(q, k, v):
    """Neighboring heads of queries have different heads of keys."""
    k, v = (t.repeat(1, 2, 1, 1) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True
    )


def one_of_a_group(q, k, v):
    """A key gets the gradient of one head of its group."""
    first, second = (t.repeat_interleave(2, 1) for t in (k, v))
    for t in first, second:
        t.register_hook(lambda g: g * (torch.arange(4) % 2)[:, None, None])
    return torch.nn.functional.scaled_dot_product_attention(
        q, first, second, is_causal=True
    )


@pytest.mark.parametrize("keys", [20, 40])
@pytest.mark.parametrize(
    "function", [other_corner, interleaved, one_of_a_group]
)
def test_other_masks_and_groups_show(function, keys):
    case = AttentionCase(queries=30, keys=keys, causal=True, group=2)
    operation = AnyAttention()
    tensors, found = right_attention(case, operation)
    given = [t.double().requires_grad_() for t in tensors.values()][:3]
    y = function(*given)
    grads = torch.autograd.grad(y, given, tensors["dy"].double())
    wrong = {
        name: t.detach().to(HALF)
        for name, t in zip(found, (y, *grads), strict=True)
    }
    with pytest.raises(AssertionError, match=r"(y|dkey): error"):
        operation.judge(case, tensors, wrong)


@pytest.mark.parametrize("fault", [zero, swap, nan])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_one_element_of_a_linear_layer_shows(activation, dtype, fault):
    case = LinearCase(lead=(60,), outs=50, dtype=dtype, activation=activation)
    operation, found = Linear(), {}
    tensors = operation.tensors(case, CPU)
    for _ in "twice":  # the slope of ReLU belongs to y
        empty = {"y": torch.zeros_like(tensors["dy"])}
        expected = operation.exact(case, tensors, found or empty)
        found = {n: e.value.to(e.dtype) for n, e in expected.items()}
    operation.judge(case, tensors, found)
    for name, whole in found.items():
        wrong = found | {name: whole.clone()}
        flat = wrong[name].view(-1)
        some = flat.nonzero()[-30:, 0]  # ReLU has many zeros
        part = flat[some]
        fault(part)
        flat[some] = part
        with pytest.raises(AssertionError, match=r": (error|inf)"):
            operation.judge(case, tensors, wrong)


@pytest.mark.parametrize("fault", [zero, swap, nan])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smooth", [0.0, 0.1])
def test_one_element_of_a_linear_loss_shows(reduction, smooth, fault):
    """In float32: in 16 bits, powers and gradients are rounded before they
    are summed, and a small element may be worth no more than that."""
    case = LinearCrossEntropyCase(
        dtype=SINGLE, reduction=reduction, smooth=smooth, ignores="none"
    )
    operation = LinearCrossEntropy()
    tensors = operation.tensors(case, CPU)
    expected = operation.exact(case, tensors, {})
    found = {n: e.value.to(e.dtype) for n, e in expected.items()}
    operation.judge(case, tensors, found)
    for name, whole in found.items():
        if whole.numel() == 1 and fault is swap:
            continue  # with what?
        wrong = found | {name: whole.clone()}
        fault(wrong[name].view(-1))
        with pytest.raises(AssertionError, match=r": (error|inf)"):
            operation.judge(case, tensors, wrong)


def test_many_small_errors_show_in_norm():
    value = torch.full((10_000,), 1.5, dtype=torch.float64)
    got = (value + 1.2e-6).float()
    expected = Expected(value, value, SINGLE, count=100)
    with pytest.raises(AssertionError, match="in norm"):
        compare("y", got, expected, SINGLE)


def test_infinity_must_be_where_it_belongs():
    value = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    expected = Expected(value, torch.ones(2).double(), SINGLE)
    compare("y", value.float(), expected, SINGLE)
    for wrong in [1.0, -1e30], [1.0, torch.inf], [-torch.inf, -torch.inf]:
        with pytest.raises(AssertionError, match="y: "):
            compare("y", torch.tensor(wrong), expected, SINGLE)


@pytest.mark.parametrize("name", ["dx", "dweight"])
def test_a_result_of_another_type_or_shape_or_none_shows(name):
    case = LayerNormCase(lead=(5,))
    for change in torch.Tensor.half, torch.Tensor.unsqueeze, None:
        operation, tensors, found = right(case)
        more = (0,) if change is torch.Tensor.unsqueeze else ()
        found[name] = change(found[name], *more) if change else None
        with pytest.raises(AssertionError, match=rf"{name}.*(type|shape|No)"):
            operation.judge(case, tensors, found)


def test_a_gradient_that_is_missing_shows():
    case = LayerNormCase(lead=(5,))
    operation, tensors, found = right(case)
    del found["dbias"]
    with pytest.raises(AssertionError, match="dbias"):
        operation.judge(case, tensors, found)


@pytest.mark.parametrize("at", [-1, 100])
@pytest.mark.parametrize(
    "empty",
    [lambda: torch.empty(100), lambda: torch.ones(1).new_empty(100)],
    ids=["empty", "new_empty"],
)
def test_a_write_beside_a_buffer_shows(empty, at):
    with (
        pytest.raises(AssertionError, match=r"written (before|behind)"),
        guarded_allocations(),
    ):
        t = empty()
        whole = torch.as_strided(t, (300,), (1,), t.storage_offset() - 100)
        whole[100 + at] = 1.0


def test_an_allocation_that_a_page_has_kept_is_guarded_each_time():
    with guarded_allocations():
        kept = torch.empty
        kept(3)
    assert kept(3).untyped_storage().nbytes() == 3 * 4
    with (
        pytest.raises(AssertionError, match="written behind"),
        guarded_allocations(),
    ):
        t = kept(3)
        torch.as_strided(t, (4,), (1,), t.storage_offset())[3] = 1.0


@pytest.mark.parametrize("layout", ["contiguous", "columns", "every second"])
def test_a_read_beside_an_input_shows(layout):
    """A sum over one column more than there is."""

    def reads_too_far(x, shape, *parameters):
        x = x.as_strided((*x.shape[:-1], x.shape[-1] + 1), x.stride())
        w, b, eps = parameters
        y = layer_norm(x, x.shape[-1:], None, None, eps)
        return y[..., :-1].contiguous() * w + b

    case = LayerNormCase(lead=(1,), x=layout)
    with pytest.raises((AssertionError, RuntimeError)):
        LayerNorm().run(reads_too_far, case, CPU)


def test_an_input_that_is_written_shows():
    def writes(x, *args):
        y = layer_norm(x, *args)
        with torch.no_grad():
            args[2].zero_()
        return y

    case = LayerNormCase(lead=(5,), wanted=(False, False, False))
    with pytest.raises(AssertionError, match="bias was written"):
        LayerNorm().run(writes, case, CPU)


def test_the_table_has_all_pairs():
    axes = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 7, 8), "d": (9, 10)}
    rows = table(axes)
    assert len(rows) < 12
    for one in axes:
        for other in set(axes) - {one}:
            pairs = {(row[one], row[other]) for row in rows}
            assert len(pairs) == len(axes[one]) * len(axes[other])
    assert rows == table(axes)
    assert not [
        row
        for row in table(axes, lambda row: (row["a"], row["c"]) != (1, 6))
        if (row["a"], row["c"]) == (1, 6)
    ]


@pytest.mark.parametrize(
    ("test", "alone", "on_gpu"),
    [
        ("pages/a-b/01-c.py::test_x[2:3]", "a-b/01-c", None),
        ("test_conformance.py::test_case[a-b/01-c:x=1,y]", "a-b/01-c", None),
        ("test_words.py::test_x[a:b]", "tests/test_words.py", None),
        ("pages/a-b/01-c.py::test_more_than_2_31", "a-b/01-c", "memory"),
        ("pages/several-gpus/01-c.py::test_x", *2 * ["several-gpus/01-c"]),
    ],
)
def test_what_shares_something_runs_together(test, alone, on_gpu):
    from conftest import together

    assert together(f"tests/{test}", False) == alone
    assert together(f"tests/{test}", True) == (on_gpu or f"tests/{test}")
