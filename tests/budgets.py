"""What the tests cost: the slowest files, and no page beyond its budget.

Counted are seconds of processor time, of pytest and of the processes that it
starts, at the pace of the machine on which the budgets were set: a busy or a
slow machine gives about the same answer as a quiet one. A page pays for its
own files, fused/test_01_*.py for fused/01-*.py, and for every test elsewhere
that has its name among the parameters. The report names a page beyond its
budget; a run fails where no busy machine explains it.
"""

import collections
import re
import resource
import time
from pathlib import Path

import builds
import pytest

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
SHOWN = 12  # files at the end of a run
PAGE = 25
EXPLAINED = 2  # times the budget: busy machines took 1.5 times
# What lap() takes on a quiet core of the machine that the budgets are of.
LAP = 0.0041


def page_of(stem):
    """fused/02-dropout is page fused/02."""
    return re.match(r"(.*/)?\d\d", stem)[0]


def pages():
    scripts = TUTORIALS.rglob("[0-9][0-9]-*.py")
    stems = [s.relative_to(TUTORIALS).with_suffix("") for s in scripts]
    return {stem.as_posix(): page_of(stem.as_posix()) for stem in stems}


def payer(nodeid, known):
    """The page that a test is of; None if of none, of all, or on a GPU."""
    file, _, test = nodeid.partition("::")
    folders = Path(file).parts[:-1]
    if "gpu" in folders:
        return None
    of_file = re.match(r"test_(\d\d)_", Path(file).name)
    section = [folder for folder in folders if folder != "tests"]
    if (
        of_file
        and (page := "/".join([*section, of_file[1]])) in known.values()
    ):
        return page
    named = {page for stem, page in known.items() if stem in test}
    return named.pop() if len(named) == 1 else None


def used():
    """Seconds of processor time, of this process and those it has ended.

    The processes that compile kernels stay to the end and are left out: with
    Triton's cache they take a tenth of what they take without.
    """
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    usage = [resource.getrusage(which) for which in who]
    own = sum(part.ru_utime + part.ru_stime for part in usage)
    return own + builds.spent


def lap():
    """Processor time of a little work, always the same."""
    start, kept = time.process_time(), {}
    for i in range(40_000):
        kept[i & 255] = isinstance(i, (str, int))
    return time.process_time() - start


def over_budget(spent, times=1):
    """A line for each page that costs more than it may."""
    for page, seconds in sorted(spent.items()):
        if seconds > PAGE * times:
            yield (
                f"page {page}: its tests take {seconds:.0f} s of a core, "
                f"its budget is {PAGE} s (tests/budgets.py)"
            )


class Budgets:
    """The plugin that counts, adds up and tells."""

    def __init__(self, config):
        self.config = config
        self.last = used()
        self.lap, self.lap_at = LAP, 0
        self.files = collections.Counter()
        self.pages = collections.Counter()
        self.known = pages()

    # Where tests run: each report says what its phase has used.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self):
        self.restart()

    def restart(self):
        self.last = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = used()
        if now - self.lap_at > 1:  # the pace changes as others come and go
            self.lap, self.lap_at = lap(), now
        report.processor_time = (now - self.last) * LAP / self.lap
        self.last = used()
        return report

    # Where reports come together.

    def pytest_runtest_logreport(self, report):
        seconds = getattr(report, "processor_time", 0)
        self.files[report.nodeid.partition("::")[0]] += seconds
        # What ends with the last test, such as a browser, is of no page.
        ends = report.when == "teardown"
        page = None if ends else payer(report.nodeid, self.known)
        self.pages[page] += seconds

    def exceeded(self, times=1):
        if self.config.option.markexpr != "not long":
            return []  # make test-all takes its time
        spent = {page: s for page, s in self.pages.items() if page}
        return list(over_budget(spent, times))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.exceeded(EXPLAINED) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        tell = terminalreporter.write_line
        total = sum(self.files.values())
        terminalreporter.section(f"processor time: {total:.0f} s")
        for file, seconds in self.files.most_common(SHOWN):
            tell(f"{seconds:6.1f} s  {file}")
        tell(
            "by page: "
            + ", ".join(
                f"{page or 'none'} {seconds:.0f} s"
                for page, seconds in sorted(
                    self.pages.items(), key=lambda item: item[0] or ""
                )
            )
        )
        for line in self.exceeded():
            tell(line, red=True)
