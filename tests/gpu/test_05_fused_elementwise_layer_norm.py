"""Page 05 on a GPU, at full size."""

import pytest
import torch
import torch.nn.functional as F

import layer_norm_cases as cases
import sanitizer
from layer_norm_cases import Case
from tutorial import load

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NAME = "05-fused-elementwise-layer-norm"
page = load(NAME)
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
ADD = page.add_results, page.add_layer_norm, page.add_chain
SILU = (
    page.activation_results,
    page.activation_layer_norm,
    page.activation_chain,
)


def plain(x, shape, w, b, eps):
    """The forms of the page that are a plain layer norm."""
    residual = torch.zeros_like(x)
    return page.add_layer_norm(x, residual, shape, w, b, eps)[0]


def run(case):
    cases.run(plain, case, page.DEVICE)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
def test_shapes(shape):
    for dtype in cases.DTYPES:
        run(Case(shape[:1], shape[1:], dtype))


LIMITS = (256, 512, 1024, 4096, 5120, 11264, 12288, 14336, 24576)


@pytest.mark.parametrize("limit", LIMITS)
def test_both_sides_of_each_limit(limit):
    for N in limit - 1, limit, limit + 1:
        for dtype in SIXTEEN_BITS:
            run(Case((37,), (N,), dtype))
    run(Case((37,), (limit // 2,), torch.float32))


@pytest.mark.parametrize("N", [1, 65536, 100003, 2**20])
def test_wide_rows(N):
    for dtype in cases.DTYPES:
        run(Case((3,), (N,), dtype))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "parameters"])
def test_layouts(which, layout):
    for shape in ((40, 25), (130, 127)):
        run(Case((20, 3), shape, torch.float16, **{which: layout}))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight_dtype", cases.DTYPES)
def test_mixed_dtypes(dtype, weight_dtype):
    for N in 650, 12288:
        run(Case((70,), (N,), dtype, weight_dtype))


@pytest.mark.parametrize("N", [65, 20000])
def test_only_some_gradients(N):
    for number in range(32):
        *wanted, weight, bias = (bool(number >> i & 1) for i in range(5))
        run(Case((5,), (N,), weight=weight, bias=bias, wanted=tuple(wanted)))


@pytest.mark.parametrize("N", [1000, 1024, 4608, 8192, 12288, 15872, 32768])
@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32])
@pytest.mark.parametrize("form", [ADD, SILU], ids=["add", "silu"])
def test_error_no_larger_than_pytorch(form, N, dtype):
    results, ours, theirs = form
    M = 1024
    mine = page.errors(results, ours, theirs, M, N, dtype)
    other = page.errors(results, theirs, theirs, M, N, dtype)
    # In float32 both are near the noise of a few sums.
    factor = 2 if dtype == torch.float32 else 1.5
    for a, b in zip(mine, other, strict=True):
        assert a <= factor * b


@pytest.mark.parametrize("N", [1000, 4096, 10240, 12288, 15872, 32768])
def test_dropout(N):
    """Against autograd in float64, with the mask of the forward pass."""
    p, seed = 0.25, 2**40 + 1
    x, residual, w, b, dy, ds = page.inputs(512, N, torch.float16)
    leaves = x, residual, w, b
    y, s = page.add_layer_norm(x, residual, (N,), w, b, 1e-5, p, seed)
    found = y, s, *torch.autograd.grad((y, s), leaves, (dy, ds))
    mask = page.kept(512, N, p, seed)
    share = mask.double().mean().item()
    assert abs(share - 0.75) < 4 * (p * (1 - p) / mask.numel()) ** 0.5
    wide = [t.detach().double().requires_grad_() for t in leaves]
    s = wide[0] * mask / (1 - p) + wide[1]
    y = F.layer_norm(s, (N,), *wide[2:])
    expected = (
        y,
        s,
        *torch.autograd.grad((y, s), wide, (dy.double(), ds.double())),
    )
    assert not found[2][~mask].any()
    assert not (found[3][mask] != 0)[found[2][mask] == 0].any()
    for a, e in zip(found, expected, strict=True):
        assert (a - e).norm() <= 2**-10 * e.norm()


def check_activation(name, M, N, dtype, weight=None, bias=None):
    """Against autograd in float64; the types of w and b, None for that of x,
    False for no parameter."""
    given = page.inputs(M, N, dtype)
    x, w, b, dy = given[0], *given[2:5]
    w, b = (
        None if kind is False else t.detach().to(kind or dtype)
        for t, kind in ((w, weight), (b, bias))
    )
    leaves = [t for t in (x, w, b) if t is not None]
    for t in leaves:
        t.requires_grad_()
    y = page.activation_layer_norm(x, (N,), w, b, 1e-5, name)
    found = y, *torch.autograd.grad(y, leaves, dy)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    rest = iter(wide[1:])
    w, b = (None if t is None else next(rest) for t in (w, b))
    y = F.layer_norm(page.TORCH[name](wide[0]), (N,), w, b)
    expected = y, *torch.autograd.grad(y, wide, dy.double())
    most = 2**-8 if dtype == torch.bfloat16 else 2**-10
    for a, e in zip(found, expected, strict=True):
        assert (a - e).norm() <= most * e.norm(), (name, N)


@pytest.mark.parametrize("name", page.TORCH)
@pytest.mark.parametrize("N", [1000, 10240, 15872, 32768])
def test_activations(name, N):
    check_activation(name, 300, N, torch.bfloat16)


@pytest.mark.parametrize("name", page.TORCH)
def test_activations_far_out(name):
    """Any number, also beside one that is none, or far from it."""
    near = torch.linspace(-50, 50, 64, dtype=torch.float64)
    far = torch.tensor([-3e38, -1e30, -1e4, -90.0, 90.0, 1e4, 1e30])
    far = torch.cat([far, torch.full((1,), torch.nan)]).double()
    x = torch.stack([near, far.repeat(8)], dim=1).flatten().requires_grad_()
    expected = page.TORCH[name](x)
    slope = torch.autograd.grad(expected.sum(), x)[0].nan_to_num(0, 0, 0)
    expected = torch.stack([expected.detach(), slope])
    given = x.detach().float().cuda()
    found = torch.empty(2, len(x), device="cuda")
    page._apply[(1,)](
        given, found, len(x), ACT=page.ACTIVATIONS[name], BLOCK=len(x),
        num_warps=1,
    )  # fmt: skip
    found = found.cpu().double()
    none = x.isnan()
    assert found[0][none].isnan().all()
    torch.testing.assert_close(
        found[:, ~none], expected[:, ~none], rtol=1e-5, atol=1e-6
    )


# Rows for several rounds of the programs that load ahead.
@pytest.mark.parametrize(
    "limit", [1024, 6144, *(plan[0] for plan in page.ACTIVATION_PLANS)]
)
def test_activations_on_both_sides_of_each_limit(limit):
    for N in limit - 1, limit, limit + 1:
        for name in page.TORCH:
            check_activation(name, 1101, N, torch.float16)
    check_activation("silu", 1101, limit // 2, torch.float32)


@pytest.mark.parametrize("N", [1000, 3072, 7680, 9000, 10240])
def test_activations_with_other_parameters(N):
    for weight, bias in (
        (torch.float32, torch.float32),
        (torch.float32, None),
        (False, False),
        (False, None),
        (None, False),
    ):
        check_activation("silu", 600, N, torch.float16, weight, bias)


def same_bits(call):
    first = call()
    for _ in range(99):
        assert all(map(torch.equal, first, call()))


@pytest.mark.parametrize("N", [1000, 3072, 7680, 10240, 15872])
def test_activations_same_bits_100_times(N):
    x, _, w, b, dy, _ = page.inputs(1101, N, torch.float16)

    def call():
        y = page.activation_layer_norm(x, (N,), w, b)
        return y, *torch.autograd.grad(y, (x, w, b), dy)

    same_bits(call)


@pytest.mark.parametrize("N", [256, 1000, 8192, 15872, 32768])
def test_same_bits_100_times(N):
    x, residual, w, b, dy, ds = page.inputs(512, N, torch.float16)
    w, b = (t.detach().float().requires_grad_() for t in (w, b))
    leaves = x, residual, w, b

    def call():
        y, s = page.add_layer_norm(x, residual, (N,), w, b, 1e-5, 0.1, 3)
        return y, s, *torch.autograd.grad((y, s), leaves, (dy, ds))

    same_bits(call)


def test_more_than_2_31_elements():
    M, N = 2**31 // 8192 + 5, 8192
    x = torch.empty(M, N, dtype=torch.float16, device="cuda").normal_()
    residual = torch.empty_like(x).normal_()
    y, s, mean, rstd = page.forward(
        x, residual, None, None, 1e-5, None, 0.5, 9
    )
    dr, dx = page.backward(
        y, x, s, None, mean, rstd, [True, True, False, False],
        ["float16"] * 4, None, 0.5, 9,
    )  # fmt: skip
    for rows in slice(0, 64), slice(M - 64, M):
        mask = (s[rows] - residual[rows]) != 0
        assert 0.49 < mask.double().mean() < 0.51
        exact = 2 * x[rows].double() * mask + residual[rows]
        assert (s[rows] - exact).norm() <= 2**-11 * exact.norm()
        expected = F.layer_norm(s[rows].double(), (N,))
        assert (y[rows] - expected).norm() <= 2**-11 * expected.norm()
        # dy is y, so that nothing comes back through the norm: ds = x is left.
        assert (dr[rows] - x[rows]).abs().max() < 2e-2
        scaled = 2 * dr[rows] * mask
        assert (dx[rows] - scaled).norm() <= 2**-10 * scaled.norm()
    first, last = (
        s[rows] != residual[rows] for rows in (slice(5), slice(-5, None))
    )
    assert not torch.equal(first, last)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_torch_compile(p):
    x, residual, w, b, dy, ds = page.inputs(148, 1000, torch.float16)

    def both(x, residual, w, b):
        y, s = page.add_layer_norm(x, residual, (1000,), w, b, 1e-5, p, 5)
        return y, page.activation_layer_norm(s, (1000,), w, b, 1e-5, "gelu")

    found = []
    for f in both, torch.compile(both, fullgraph=True):
        out = f(x, residual, w, b)
        grads = torch.autograd.grad(out, (x, residual, w, b), (dy, ds))
        found.append((*out, *grads))
    assert all(map(torch.equal, *found))


def test_cuda_graph_with_a_new_seed():
    """A graph repeats an integer seed; the tensor may change in between."""
    x, residual, w, b, dy, ds = page.inputs(512, 1000, torch.float16)
    leaves = x, residual, w, b
    seed = torch.tensor(1, device="cuda")
    stream = torch.cuda.Stream()

    def call(seed):
        y, s = page.add_layer_norm(x, residual, (1000,), w, b, 1e-5, 0.5, seed)
        return y, s, *torch.autograd.grad((y, s), leaves, (dy, ds))

    with torch.cuda.stream(stream):
        call(seed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = call(seed)
    for number in 1, 2, 2**35:
        seed.fill_(number)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, call(number)))


class Block(torch.nn.Module):
    """Two pre-norm layers; the addition at the end of one is in the next."""

    def __init__(self, fused, N=192):
        super().__init__()
        self.fused = fused
        self.first, self.second = (
            torch.nn.Sequential(
                torch.nn.Linear(N, 4 * N),
                torch.nn.GELU(),
                torch.nn.Linear(4 * N, N),
            )
            for _ in range(2)
        )
        self.w = torch.nn.Parameter(torch.ones(2, N))
        self.b = torch.nn.Parameter(torch.zeros(2, N))

    def norm(self, x, stream, i):
        f = page.add_layer_norm if self.fused else page.add_chain
        return f(x, stream, x.shape[-1:], self.w[i], self.b[i], 1e-5)

    def forward(self, x):
        y, stream = self.norm(x, torch.zeros_like(x), 0)
        y, stream = self.norm(self.first(y), stream, 1)
        return self.second(y) + stream


def _losses(fused, steps=200):
    torch.manual_seed(0)
    model = Block(fused).to(page.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(1024, 192, device=page.DEVICE)
    target = x.roll(1, dims=1).cumsum(dim=1) / 8
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_two_layers_train_like_pytorch():
    """200 steps: the two loss curves differ by at most 1 %."""
    ours, theirs = _losses(True), _losses(False)
    assert theirs[-1] < 0.5 * theirs[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)


SANITIZED = f"""
import sys
import torch
from tutorial import load
page = load({NAME!r})
# Where slices wait for each other, warps store the same word more than once.
for N in (1001, 4096, 20000)[: 2 if sys.argv[1] == 'racecheck' else 3]:
    for dtype in torch.float16, torch.float32:
        x, residual, w, b, dy, ds = page.inputs(33, N, dtype)
        y, s = page.add_layer_norm(x, residual, (N,), w, b, 1e-5, 0.1, 1)
        torch.autograd.grad((y, s), (x, residual, w, b), (dy, ds))
        y = page.activation_layer_norm(x, (N,), w, b)
        torch.autograd.grad(y, (x, w, b), dy)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    sanitizer.run(tool, SANITIZED)
