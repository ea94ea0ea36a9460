"""The file of exact versions fits what the requirements ask for."""

import re
from importlib.metadata import packages_distributions

import pytest
from four_packages import FOUR
from packaging.requirements import Requirement
from project import ROOT

FILES = ("requirements.txt", "tests/requirements.txt")


def read(file):
    for line in (ROOT / file).read_text().splitlines():
        if text := line.partition("#")[0].strip():
            yield Requirement(text)


WANTED = [wanted for file in FILES for wanted in read(file)]
EXACT = list(read("constraints.txt"))


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_each_requirement_has_an_exact_version_that_fits(wanted):
    found = [exact for exact in EXACT if exact.name == wanted.name]
    assert found, "run make lock"
    for exact in found:
        (one,) = exact.specifier
        assert one.operator == "=="
        assert wanted.specifier.contains(one.version), "run make lock"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_a_package_has_one_version_for_a_python(python):
    """Also where markers choose among versions."""
    full = {"python_version": python, "python_full_version": f"{python}.9"}
    names = [
        exact.name
        for exact in EXACT
        if exact.marker is None or exact.marker.evaluate(full)
    ]
    assert len(set(names)) == len(names)
    assert {wanted.name for wanted in WANTED} <= set(names)


def test_the_exact_versions_name_no_index_and_no_build():
    """So that any index will do, and a torch for the CPU as well."""
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"--|://|sha256|\+|^(nvidia|cuda)", text, re.M)


def test_make_asks_for_what_builds_the_site():
    """Where it installs nothing: what it imports, and what it says to run."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    modules = re.search(r"-c 'import (sphinx,[^']*)'", text)[1].split(",")
    pattern = re.search(r"grep -iE '([^']*)' requirements.txt", text)[1]
    owners = packages_distributions()
    asked = {
        owner.lower().replace("_", "-")
        for module in modules
        for owner in owners[module.strip().partition(".")[0]]
    }
    builds = {
        wanted.name
        for wanted in read("requirements.txt")
        if wanted.name not in FOUR
    }
    assert asked == builds
    assert builds == {
        wanted.name
        for wanted in read("requirements.txt")
        if re.search(pattern, str(wanted), re.IGNORECASE)
    }
