"""These checks run on a GPU or not at all."""

import pytest
import torch


def pytest_configure():
    if not torch.cuda.is_available():
        pytest.exit(
            "no GPU here; run make test-gpu on a machine with a GPU "
            "(make test needs none)",
            returncode=2,
        )
