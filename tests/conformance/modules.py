"""Modules of pages take the place of PyTorch's."""

import torch


def takes_the_place(theirs, ours, *args, **options):
    """A module loads what PyTorch's has saved, and gives the same, with a
    residual, too."""
    theirs, ours = theirs(*args, **options), ours(*args, **options)
    for parameter in theirs.parameters():
        torch.nn.init.uniform_(parameter)
    ours.load_state_dict(theirs.state_dict())
    shape, device = theirs.normalized_shape, theirs.weight.device
    x, residual = torch.randn(2, 3, *shape, device=device)
    torch.testing.assert_close(ours(x), theirs(x))
    y, s = ours(x, residual)
    torch.testing.assert_close(y, theirs(x + residual))
    assert torch.equal(s, x + residual)
