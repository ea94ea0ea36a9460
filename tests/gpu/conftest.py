"""These checks run on a GPU or not at all."""

import pytest
import torch

LONG = "2_31", "sanitizer", "memcheck", "100_times"


def pytest_configure():
    if not torch.cuda.is_available():
        pytest.exit(
            "no GPU here; run make test-gpu on a machine with a GPU "
            "(make test needs none)",
            returncode=2,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What takes long starts first; what takes much memory runs in turn."""
    for item in items:
        if "2_31" in item.name:
            item.add_marker(pytest.mark.xdist_group("memory"))
    items.sort(key=lambda item: not any(what in item.name for what in LONG))


@pytest.fixture(autouse=True)
def memory():
    """Leave the memory to the checks that run beside this one."""
    yield
    torch.cuda.empty_cache()
