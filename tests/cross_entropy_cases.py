"""Cases and checks that a cross-entropy must pass."""

import dataclasses

import torch
import torch.nn.functional as F

from layer_norm_cases import guarded_allocations

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    M: int = 3
    N: int = 37
    dtype: torch.dtype = torch.float32
    weight: bool = False
    ignored: int = -100
    reduction: str = "mean"
    smooth: float = 0.0
    z: float = 0.0
    ahead: bool = False
    begin: int = 0  # columns before the first row, in memory
    shift: float = 0.0  # of all logits
    upstream: float = 3.0

    def tensors(self, device):
        """Logits, targets, every third ignored, weights and upstream."""
        generator = torch.Generator().manual_seed(self.N)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        flat = 3 * normal(self.M * self.N + self.begin) + self.shift
        x = flat.to(device, self.dtype)[self.begin :].view(self.M, self.N)
        target = torch.randint(self.N, (self.M,), generator=generator)
        target[::3] = self.ignored
        w = normal(self.N).abs().to(device, self.dtype)
        g = torch.tensor(self.upstream, device=device)
        if self.reduction == "none":
            g = g * normal(self.M).to(device)
        w = w if self.weight else None
        return x, target.to(device), w, g.to(self.dtype)


def exact(case, x, target, w, g):
    """Loss and gradient in float64."""
    x = x.detach().double().requires_grad_()
    more = {"ignore_index": case.ignored, "label_smoothing": case.smooth}
    w = None if w is None else w.double()
    losses = F.cross_entropy(x, target, w, reduction="none", **more)
    live = target != case.ignored
    losses = losses + live * case.z * x.logsumexp(1) ** 2
    count = live.sum() if w is None else (w[target * live] * live).sum()
    loss = losses if case.reduction == "none" else losses.sum()
    loss = loss / count if case.reduction == "mean" else loss
    (dx,) = torch.autograd.grad(loss, x, g.double())
    return loss.detach(), dx


def run(page, case):
    """Run one case between guard bands and check everything about it."""
    x, target, w, g = tensors = case.tensors(page.DEVICE)
    copies = [None if t is None else t.clone() for t in tensors]
    leaf = x.detach().requires_grad_()
    with guarded_allocations():
        loss = page.cross_entropy(
            leaf, target, w, case.ignored, case.reduction, case.smooth,
            case.z, ahead=case.ahead,
        )  # fmt: skip
        (dx,) = torch.autograd.grad(loss, leaf, g)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert tensor is None or torch.equal(tensor, copy), "input written"
    expected = exact(case, *tensors)
    rounding = torch.finfo(case.dtype).eps / 2
    if case.dtype == torch.bfloat16 and page.DEVICE.type == "cpu":
        rounding *= 2  # the interpreter cuts bfloat16, not rounds it
    if case.ahead:
        rounding *= 2  # once before the factor, once after it
    spread = 32 + case.N**0.5 + 4 * abs(case.shift) ** 0.5
    # Terms may cancel, of one class entirely: eight roundings of their size.
    w_most = 1 if w is None or case.reduction == "mean" else w.max().item()
    size = 8 * 2.0**-24 * case.M * max(w_most, 1)
    sizes = size * x.abs().max().item(), size * g.abs().max().item()
    for name, got, want, floor in zip(
        ("loss", "dx"), (loss, dx), expected, sizes, strict=True
    ):
        assert got.shape == want.shape and got.dtype == case.dtype, name
        allowed = (rounding + spread * 2.0**-24) * want.norm() + floor
        if case.dtype == torch.float16:
            allowed += 2.0**-24 * want.numel() ** 0.5  # subnormal numbers
        error = (got.double() - want).norm()
        assert error <= allowed, f"{name}: error {error:.1e} > {allowed:.1e}"
    assert not dx[target == case.ignored].any()
