"""What is there is asked of torch, not of the machine's files."""

import pytest
from measurable import HERE
from project import Project

# An old driver, a container without one, WSL: torch says no to all of them.
MACHINES = {
    "no driver": {},
    "device files, no driver": {"STAND_IN_NODES": "1"},
    "hidden": {"STAND_IN_GPUS": "1", "CUDA_VISIBLE_DEVICES": "nonsense"},
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_recorded_figures_are_shown(tmp_path, machine):
    project = Project(tmp_path / "site")
    env = MACHINES[machine] | {
        "PYTHONPATH": str(HERE / "stand_in"),
        "TRITON_INTERPRET": "",  # the build must set it itself
    }
    done = project.build("auto", **env)
    assert done.returncode == 0, done.stdout[-3000:]
    says_why = "CUDA_VISIBLE_DEVICES is nonsense" in done.stdout
    assert says_why == (machine == "hidden")
    page = project.page()
    assert "Recorded 2026-01-02." in page
    assert "Measured on this machine" not in page
