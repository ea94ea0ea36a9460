"""Numbers in the prose: bound to recordings, or declared, or found."""

import re

import checks_of_translations as checks
import pytest
from project import ENVIRONMENT

import tutorial
from measurements import claims, record, recording
from measurements.figure import measured_in, unmarked
from translation import words

NAME = "sums/01-double"
SCRIPT = '''r"""
Double
======

How fast?
"""

# %%
# On the H200 our kernel reaches 90% of a copy
# at 4096 columns, and between 50% and 90% over all widths. Tiles have 16 KB.
# A product of 3 × 4 is no ratio.


def double(x):
    """median, 20 % and 80 % quantiles."""
    print(f"{x:.2f} times as fast, {x:5%}")
    return 2 * x  # 10% of the elements are dropped
'''
CLAIMS = """
def CLAIMS(figure):
    double = figure("double", "H200")
    shares = double.shares("triton")
    yield (
        f"On the H200 our kernel reaches {double.share('triton', 4096)}% of a "
        f"copy at 4096 columns, and between {shares.least}% and "
        f"{shares.most}% over all widths"
    )


FACTS = {f"{1 / 10:.0%} of the elements": "p of the call"}
"""
SPEEDS = {1024: (500, 250, 1000), 4096: (1800, 1200, 2000)}
README = "# Both Passes\n\nTutorials of GPU kernels.\n"


class Site:
    """A few files as the project has them, and a recording."""

    def __init__(self, root):
        self.root = root
        self.write(f"tutorials/{NAME}.py", SCRIPT)
        self.write(f"tests/pages/{NAME}.py", CLAIMS)
        self.write("tutorials/index.rst", "   sums/index\n")
        self.write("tutorials/sums/index.rst", "Sums\n====\n\nOf rows.\n")
        self.write("README.md", README)
        self.write("conf.py", 'project = "Both Passes"\n')
        self.write("docs/index.rst", "Both passes\n")
        self.write(
            "tests/pages/site.py",
            'EVERYWHERE = {"20 % and 80 % quantiles": "of the clock"}\n',
        )
        self.record()

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def edit(self, path, old, new):
        text = (self.root / path).read_text(encoding="utf-8")
        assert text.count(old) == 1
        self.write(path, text.replace(old, new))
        tutorial.loaded.cache_clear()

    def claim(self, old, new):
        self.edit(f"tests/pages/{NAME}.py", old, new)

    def record(self, gpu="NVIDIA H200", name=NAME, unit="GB/s", **speeds):
        """Write a recording; speeds are those of our kernel."""
        rows = [
            {"N": x, "provider": provider} | dict.fromkeys(VALUES, value)
            for x, values in SPEEDS.items()
            for provider, value in zip(
                ("triton", "torch", "copy"), values, strict=True
            )
        ]
        for row in rows:
            if row["provider"] == "triton" and speeds:
                row.update(dict.fromkeys(VALUES, speeds[f"at_{row['N']}"]))
        benchmark = {
            "unit": unit,
            "args": {"M": 1000, "dtype": "float16", "mode": "forward"},
            "method": "By hand.",
            "x_names": ["N"],
            "rows": rows,
        }
        data = {"code": "0", "environment": ENVIRONMENT | {"gpu": gpu}}
        data |= {"benchmarks": {"double": benchmark}}
        recording.save(recording.sealed(data), recording.slug(gpu), name)

    def problems(self):
        return [p for name in claims.names() for p in claims.problems(name)]

    def figure(self, card="H200", name="double"):
        return claims.figures(NAME)(name, card)


VALUES = recording.VALUES


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(tutorial, "ROOT", tmp_path)
    monkeypatch.setattr(tutorial, "TUTORIALS", tmp_path / "tutorials")
    monkeypatch.setattr(tutorial, "FILES", tmp_path / "tests/pages")
    monkeypatch.setattr(recording, "STORE", tmp_path / "docs/measurements")
    tutorial.loaded.cache_clear()
    yield Site(tmp_path)
    tutorial.loaded.cache_clear()


def test_what_is_bound_or_declared_is_let_pass(site):
    assert site.problems() == []


PAGE = f"tutorials/{NAME}.py"


@pytest.mark.parametrize(
    ("path", "old", "new", "typed"),
    [
        (PAGE, "How fast?", "How fast? 4200 GB/s.", "5: 4200 GB/s"),
        (PAGE, "no ratio.", "no ratio. It takes 12 µs.", "11: 12 µs"),
        (PAGE, "no ratio.", "no ratio: 1.9\n# times as fast.",
         "11: 1.9 times as"),
        (PAGE, "are dropped", "are dropped, 1.3x faster", "17: 1.3 x"),
        (PAGE, "{x:.2f} times", "{x:.2f}, and 1.9 × PyTorch: times",
         "16: 1.9 ×"),
        (PAGE, "median, 20 %", "92% of a copy, 20 %", "15: 92 %"),
        (PAGE, "Tiles have", "On the H100 92%, tiles have", "10: 92 %"),
        (f"tests/pages/{NAME}.py", "FACTS",
         'KERNEL = dict(look="Its 4 GB\\ntake 5 ms.")\nFACTS', "12: 4 GB"),
        ("README.md", "of GPU", "for 3.35 TB/s GPU", "3: 3.35 TB/s"),
        ("docs/index.rst", "passes", "passes, 1.5 times PyTorch's",
         "1: 1.5 times PyTorch's"),
        ("conf.py", "Passes", "Passes: thirty or 40 percent",
         "1: 40 percent"),
        ("tutorials/sums/index.rst", "Of rows.", "In two rows of **92**%.",
         "4: 92 %"),
    ],
)  # fmt: skip
def test_a_typed_speed_is_found(site, path, old, new, typed):
    site.edit(path, old, new)
    first, *_ = site.problems()
    assert first.startswith(f"{path}:{typed} is typed: bind it in CLAIMS of ")


@pytest.mark.parametrize("language", ["README.ja.md", "README.zh-CN.md"])
def test_a_typed_speed_is_found_in_a_readme_of_any_language(site, language):
    site.write(language, "它比 PyTorch 快 1.9 倍，达到 4200 GB/s，3 秒\n")
    assert len(site.problems()) == 3


@pytest.mark.parametrize(
    "words",
    [
        "An instruction loads 16 bytes, a warp 2 KB.",
        "Tiles of 64 × 64, a loop of 4 x 3, ``M`` × 4 and 2 × N.",
        "Each runs 100 times on the same input.",
        "At 4096 columns, 132 SMs and two H200s.",
        "Speed in GB/s is what the figure shows.",
        "位置为 16 的倍数",
        "4 分の 3",
        "0x1F and float32 and 2**31",
    ],
)
def test_what_is_no_claim_is_let_pass(words):
    assert not list(claims.numbers(words))


@pytest.mark.parametrize(
    "words",
    [
        *("92 % of it", "92\xa0% of it", "``92`` %", "92 percent"),
        *("4,200 GB/s", "4.2 TB/s", "4200 GB per second", "989 TFLOP/s"),
        *("12 us", "30 ns", "5 s.", "2 minutes", "141 GB", "at 1.19 bytes"),
        *("2x faster", "1.9 x PyTorch", "3 × slower", "×1.9", "a 3-fold gain"),
        *("1.9 times the copy", "16 times as fast", "eleven times as fast"),
        *("1.9 倍", "12 マイクロ秒"),
    ],
)
def test_a_number_with_a_unit_is_found(words):
    assert len(list(claims.numbers(words))) == 1


def test_a_claim_covers_what_it_computes_and_nothing_else(site):
    site.claim("{shares.least}% and", "50% and")
    (typed,) = site.problems()
    assert ": 50 % is typed" in typed
    claim = f"{site.figure().share('triton', 4096)}% of 4096"
    assert unmarked(claim) == "90% of 4096"
    assert list(measured_in(claim)) == [0, 1]


def test_a_claim_of_new_numbers_is_told_with_place_and_right_text(
    site, capsys
):
    site.record(at_1024=600, at_4096=1900)
    (told,) = claims.wrong(NAME)
    place, stands = re.fullmatch(
        r"(.*): there stands '(.*)', and right is '.*'", told
    ).groups()
    assert place == f"{PAGE}:9"
    assert "reaches 90% of a copy at 4096 columns, and between 50%" in stands
    assert told.endswith("reaches 95% of a copy at 4096 columns, and between "
                         "60% and 95% over all widths'")  # fmt: skip
    # It is the same sentence that fails the test, and that make record says.
    assert told in site.problems()
    record.say_what_is_wrong()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("make record: what was measured is kept, and ")
    assert said[1:] == [f"  {told}"]
    site.record()
    record.say_what_is_wrong()
    assert not capsys.readouterr().err


def test_of_two_sentences_of_one_form_the_wrong_one_is_named(site):
    site.edit(PAGE, "no ratio.", "no ratio. It has 50% here. It has 90% here.")
    site.claim("    yield (\n", """    for x in 1024, 4096:
        yield f"It has {double.share('triton', x)}% here"
    yield (
""")  # fmt: skip
    assert site.problems() == []
    site.record(at_1024=600, at_4096=1800)
    told = [each for each in claims.wrong(NAME) if "It has" in each]
    assert told == [
        f"{PAGE}:11: there stands 'It has 50% here', and right is 'It has "
        "60% here'"
    ]


def test_make_record_says_the_rest_where_one_file_cannot_be_read(site):
    site.write("tests/pages/site.py", "import nothing_of_that_name")
    site.record(at_1024=600, at_4096=1900)
    first, second = claims.all_wrong()
    assert first.startswith("tests/pages/site.py cannot be read: ModuleNot")
    assert second.startswith(f"{PAGE}:9: there stands ")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"H200"', '"H300"', "H300 is no card that anything was recorded on; "
         "those are nvidia-h100-80gb-hbm3, nvidia-h200"),
        ('"H200"', '"H100"', f"there is no recording of {NAME} on an H100"),
        ('("double"', '("triple"', f"the recording nvidia-h200/{NAME}.json "
         "has no benchmark triple; it has double"),
        ('shares("triton"', 'shares("liger"', "double on the H200 has no "
         "provider liger; it has triton, torch, copy"),
        ("'triton', 4096", "'triton', 2048", "double on the H200 has no "
         "number of triton at 2048; it has them at 1024, 4096"),
        ('shares("triton"', 'at(4096, 2048).shares("triton"', "double on the "
         "H200 has no 2048; it has 1024, 4096"),
        ("shares.least", "shares.lest", "AttributeError"),
    ],
)  # fmt: skip
def test_what_a_claim_lacks_is_said_in_one_sentence(site, old, new, sentence):
    site.record("NVIDIA H100 80GB HBM3", name="sums/02-other")
    site.claim(old, new)
    (problem,) = site.problems()
    begin = f"tests/pages/{NAME}.py: a claim cannot be computed: "
    assert problem.startswith(begin + sentence)
    assert list(claims.all_wrong()) == [problem]


def test_a_claim_or_a_fact_that_stands_nowhere(site):
    site.edit(PAGE, "our kernel reaches", "our kernel has")
    site.edit(PAGE, "10% of the elements are", "elements are")
    stands, fact, *typed = site.problems()
    assert "On the H200 our kernel reaches 90%" in stands
    assert "stands nowhere: write it, or take it out of CLAIMS" in stands
    assert "the fact '10% of the elements' stands nowhere" in fact
    assert len(typed) == 3


def test_numbers_of_a_figure(site):
    figure = site.figure()

    def say(number):
        return unmarked(f"{number}")

    assert say(figure.median("torch", 1024)) == "250"
    assert say(figure.ratio("triton", "torch", 4096)) == "1.5"
    assert unmarked(f"{figure.ratio('triton', 'torch', 4096):.2f}") == "1.50"
    ratios = figure.ratios("triton", ["torch", "copy"])
    assert [say(each) for each in ratios] == ["0.5", "0.9"]
    assert say(ratios.median) == "0.7"
    assert say(figure.between(2000).shares("torch").most) == "60"
    assert say(100 - figure.share("torch", 4096)) == "40"
    # 2 matrices of 1000 rows of 4096 columns of 2 bytes, at 1800 GB/s.
    assert say(figure.us("triton", 4096, matrices=2)) == "9.1"
    site.record(unit="µs")
    assert say(site.figure().ratio("torch", "triton", 4096)) == "1.5"
    assert say(site.figure().us("torch", 4096)) == "1200.0"


SOURCE = "It reaches 92% of a copy, three times as much as before."


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("达到复制的 92%，是以前的三倍。", []),
        ("达到复制的 92%，是以前的 3 倍。", []),
        ("コピーの 92% に達し、3 倍です。", []),
        ("达到复制的 92%，快 1.9 倍。", ["1.9 倍"]),
        ("达到复制的 92%，达到 4200 GB/s。", ["4200 GB/s"]),
        ("达到复制的 92%，4 倍。", ["4 倍"]),
        ("达到复制的 92%，快五倍。", ["五倍"]),
        ("92 µs。", ["92 µs"]),
        ("コピーの 92% に達し、12 マイクロ秒です。", ["12 マイクロ秒"]),
    ],
)
def test_a_speed_that_only_a_translation_has(said, typed):
    found = [
        problem
        for problem in checks.problems(SOURCE, said)
        if "only the translation" in problem
    ]
    assert [p.split(":")[0] for p in found] == typed


# The project's own texts.


@pytest.mark.parametrize("name", claims.names())
def test_every_number_with_a_unit_is_bound_or_declared(name):
    assert not list(claims.problems(name))


def test_the_words_of_the_mechanism_hold_no_speed():
    facts = claims.everywhere()
    for text, _note, file in words.messages():
        bare = text
        for fact in facts:
            bare = bare.replace(fact, "")
        if file.startswith("docs/measurements"):
            continue  # docstrings of the pages
        assert not list(claims.numbers(bare)), (file, text)
