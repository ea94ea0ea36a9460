"""What a benchmark can reach, and that nothing else makes it stale."""

import ast
import functools
import textwrap

import pytest

import tutorial
from measurements import benchmarks
from measurements.reach import Script, names

START = """
import os
import torch
import triton

@triton.jit
def kernel(x):
    return helper(x)

@triton.jit
def helper(x):
    return x + SIZE

SIZE = 4
OTHER = 5
TABLE = {"a": 1}
BARE = {}
NAMES = ["triton"]

def wrapper(x, OTHER=3):
    kernel[(1,)](x)
    return TABLE["a"], [BARE for BARE in x], OTHER

def unrelated(x):
    return OTHER
"""
BENCHMARK = """
@triton.testing.perf_report(
    triton.testing.Benchmark(
        ["N"], [8, 16], "provider", NAMES, ["Triton"], "double",
        {"M": 4}, ylabel="GB/s",
    )
)
def measure(M, N, provider):
    '''By hand.'''
    return wrapper(N)

measure.run()
"""


def code(start=START, between="", after=""):
    between, after = map(textwrap.dedent, (between, after))
    text = f"{start}\n{between}\n{BENCHMARK}\n{after}"
    return benchmarks.hashes_of(text)["double"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return helper(x)", "return helper(-x)"),
        ("return x + SIZE", "return x - SIZE"),
        ("SIZE = 4", "SIZE = 8"),
        ('{"a": 1}', '{"a": 2}'),
        ("OTHER=3", "OTHER=4"),
        ('NAMES = ["triton"]', 'NAMES = ["triton", "torch"]'),
        ("import triton", "import triton.testing as triton"),
        ("@triton.jit\ndef helper", "@triton.jit(debug=True)\ndef helper"),
    ],
)
def test_what_is_reached_counts(old, new):
    assert START.count(old) == 1
    assert code(START.replace(old, new)) != code()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("OTHER = 5", "OTHER = 6"),  # a parameter hides it
        ("BARE = {}", "BARE = {1}"),  # the loop of a comprehension hides it
        ("return OTHER", "return -OTHER"),
    ],
)
def test_what_is_not_reached_does_not_count(old, new):
    assert START.count(old) == 1
    assert code(START.replace(old, new)) == code()


@pytest.mark.parametrize(
    "change",
    [
        "SIZE = 8",
        "SIZE += 1",
        "SIZE: int = 8",
        "for SIZE in 1, 2: pass",
        "with open('x') as SIZE: pass",
        "(SIZE, y) = 8, 9",
        "[y, *SIZE] = 8, 9",
        "if OTHER: SIZE = 8",
        "try:\n    import nothing as SIZE\nexcept ImportError: SIZE = 1",
        "match OTHER:\n    case SIZE: pass",
        "print(SIZE := 8)",
        "print([SIZE := x for x in (1, 2)])",
        "del SIZE",
        "def wrapper(x): return 2",
        "class SIZE: x = 1",
        "def change():\n    global SIZE\n    SIZE = 8",
        "from torch import *",
        'TABLE["a"] = unrelated',
        'TABLE["b"]["c"] = unrelated',
        "TABLE.a = unrelated",
        "TABLE |= {1: 2}",
        "TABLE.update(a=unrelated)",
        'TABLE.setdefault("a", []).append(unrelated)',
        "del TABLE['a']",
        "T = TABLE\nT['a'] = unrelated",
        "for t in TABLE.values(): t.append(unrelated)",
        "setattr(kernel, 'fn', unrelated)",
        "def change(t): t['a'] = 1\n\nchange(TABLE)",
        "def change(x, *, t): t['a'] = 1\n\nchange(1, t=TABLE)",
        "def change(f): TABLE['a'] = f\n\nchange(unrelated)",
        "def register(f): TABLE['a'] = f\n\n@register\ndef more(): return 1",
        "@wrapper.register\ndef _(x): return 2",
        "@kernel.register_fake\ndef _(x): return 2",
        "import random\nrandom.shuffle(TABLE)",
        "os.environ['TRITON_X'] = '1'",
        "if OTHER:\n    os.environ['TRITON_X'] = '1'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "def tf32(): torch.backends.x = True\n\ntf32()",
        "globals()['SIZE'] = 8",
        "exec('SIZE = 8')",
        "unrelated.__globals__['SIZE'] = 8",
    ],
)
def test_whatever_may_change_a_reached_name_counts(change):
    assert code(between=change) != code()


@pytest.mark.parametrize(
    "harmless",
    [
        "print(TABLE, SIZE)",
        "assert SIZE == 4",
        "torch.testing.assert_close(wrapper(1), 1)",
        "import matplotlib.pyplot as plt\nplt.rcParams['x'] = 1\n"
        "plt.plot(SIZE)",
        "y = wrapper(SIZE)\ny.grad = 1\nkernel[(1,)](y)",
        "for name in TABLE: print(TABLE.get(name), TABLE[name])",
        "def check(f, t):\n    t = {}\n    t['a'] = f(1)\n\ncheck(wrapper, 1)",
        "def exercise():\n    SIZE, TABLE = 3, {}\n    TABLE['a'] = SIZE\n"
        "\nexercise()",
        "class Check:\n    SIZE = 3\n    def check(self): return SIZE",
        "OTHER = lambda SIZE: SIZE",
        "print([SIZE for SIZE in range(3)])",
        "torch.manual_seed(0)",
    ],
)
def test_a_check_does_not_count(harmless):
    assert code(between=harmless) == code()


@pytest.mark.parametrize("late", ["SIZE = 8", "TABLE['a'] = unrelated"])
def test_what_runs_later_does_not_count(late):
    assert code(after=late) == code()
    assert code(after=f"{late}\nmeasure.run()") != code()
    assert code(after=f"again = measure\n{late}\nagain.run()") != code()


def test_what_reads_names_at_run_time_reaches_everything():
    text = START.replace("return OTHER", "return eval('OTHER')")
    assert code(text) != code(text.replace("OTHER = 5", "OTHER = 6"))


@pytest.mark.parametrize(("library", "everything"), [("aten", 0), ("my", 1)])
def test_an_operator_of_a_script_reaches_everything(library, everything):
    text = START.replace("x + SIZE", f"torch.ops.{library}.add(x, SIZE)")
    for old, new, counts in (
        ("OTHER = 5", "OTHER = 6", everything),
        ("import torch", "import math as torch", True),
    ):
        assert (code(text) != code(text.replace(old, new))) == counts


@pytest.mark.parametrize(
    "text",
    [
        "def kernel(x):  # why\n    '''Doc.'''\n\n    return helper(x)  # !",
        "# Prose.\ndef kernel(x):\n    return helper(x)\n\n\n# More.",
        "def kernel(x):\n    '''Doc.\n\n    More. # of it\n    '''\n"
        "    # a comment\n    return helper(x)",
    ],
)
def test_prose_does_not_count(text):
    old = "def kernel(x):\n    return helper(x)"
    assert START.count(old) == 1
    assert code(START.replace(old, text)) == code()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # code on the line of a docstring
        ("'''Doc.'''", "'''Doc.'''; x = 1"),
        ("'''Doc.''' ; y = 1", "'''Doc.''' ; y = 2"),
        # blanks in a string
        ("y = '''a\nb'''", "y = '''a\n\nb'''"),
        ("y = '''a\nb'''", "y = '''a  \nb'''"),
        ("y = f'''{1}a\nb'''", "y = f'''{1}a\n\nb'''"),
        # what only looks like a comment
        ("y = '# one'", "y = '# two'"),
        ("y = '''\n# one'''", "y = '''\n# two'''"),
        ("y = f'{1:#x}'", "y = f'{1:#o}'"),
        ("y = 'é'  # é\n    z = 'é'; z = 1", "y = 'é'\n    z = 'é'; z = 2"),
    ],
)
def test_all_code_counts(one, other):
    start = "def kernel(x):\n    "
    assert START.count(start) == 1
    assert code(START.replace(start, f"{start}{one}\n    ")) != code(
        START.replace(start, f"{start}{other}\n    ")
    )


def test_the_hash_is_the_same_on_every_python():
    """Python 3.12 cuts f-strings into tokens, 3.11 does not."""
    text = START.replace("SIZE = 4", "SIZE = f'{1 + 1:>{3}} # {2}'  # gone")
    assert code(text) == "a4d276b77e0672d8"


def resolved(text):
    found = names(*ast.parse(textwrap.dedent(text)).body)
    return found.used, found.bound


@pytest.mark.parametrize(
    ("text", "used", "bound"),
    [
        ("def f(a, *b, c=D, **e): a, b, c, e, g", "D g", "f"),
        ("def f():\n    x = y\n    def g(): x, z\n", "y z", "f"),
        ("def f():\n    global x\n    x = 1", "", "f x"),
        ("def f(x):\n    def g():\n        global x\n        x", "x", "f"),
        ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2"
         , "", "f"),
        ("class A(B):\n    x = y\n    def f(self): return x", "B x y", "A"),
        ("class A:\n    x = x", "x", "A"),
        ("[x for x in x]", "x", ""),
        ("[x for y in z for x in y if x]", "z", ""),
        ("def f():\n    [x for x in y]\n    return x", "x y", "f"),
        ("def f():\n    [y := x for x in z]\n    return y", "z", "f"),
        ("lambda x, y=z: x + y + w", "w z", ""),
        ("import a.b, c as d", "", "a d"),
        ("def f():\n    import a\n    return a", "", "f"),
        ("try: x\nexcept E as e: e", "E e x", "e"),
        ("def f(x: T) -> R: y: U = 1", "R T U", "f"),
        ("match a:\n    case {'k': v, **r}: v", "a v", "r v"),
        ("match a:\n    case [b, *c] | P(d): pass", "P a", "b c d"),
        ("f'{x!r:>{y}}'", "x y", ""),
        ("x += 1", "x", "x"),
        ("@deco(a)\nasync def f(): await b", "a b deco", "f"),
    ],
)  # fmt: skip
def test_scopes(text, used, bound):
    assert resolved(text) == (set(used.split()), set(bound.split()))


def made(text):
    return list(
        benchmarks.hashes_of("import triton\n" + textwrap.dedent(text))
    )


MAKER = """
def speed(mode, more="", wide=False):
    names = lines() | {"copy": "Copy"}
    benchmark = triton.testing.Benchmark(
        x_names=["N"], x_vals=SIZES, line_arg="p", line_vals=list(names),
        line_names=list(names.values()), x_log=SIZES[-1] > 100,
        plot_name=f"{'wide-' * wide}{more}{mode}", args={"mode": mode},
    )
    return triton.testing.perf_report(benchmark)(measure)

"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run(speed('a'))", ["a"]),
        ("run(speed('a', wide=True))\nx = speed(more='b', mode='c')",
         ["wide-a", "bc"]),
        ("for mode in 'a', 'b': run(speed(mode))", ["a", "b"]),
        ("MODES = ['a', 'b']\nm = [speed(f'{m}-x') for m in MODES]",
         ["a-x", "b-x"]),
        ("def all_of(modes):\n    return [speed(m) for m in modes]\n"
         "for m in all_of(['a', 'b']): run(m)", ["a", "b"]),
        ("def bench(name):\n    return triton.testing.perf_report("
         "triton.testing.Benchmark([], [], '', [], [], plot_name=name, "
         "args={}))\n\n@bench('a')\ndef f(): pass\n\n@bench('b')\n"
         "def g(): pass", ["a", "b"]),
        ("b = triton.testing.Benchmark([], [], '', [], [], 'a', {})\n"
         "run(triton.testing.perf_report([b])(f))", ["a"]),
    ],
)  # fmt: skip
def test_benchmarks_are_found(text, expected):
    makes = "" if "Benchmark(" in text else MAKER
    assert made(makes + text) == expected


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("run(speed(torch.name))", 12, "plot_name"),
        ("if x: run(speed('a'))", 10, "does not show which"),
        ("run(speed('a'))\nrun(speed('a'))", 13, "two benchmarks"),
        ("run(speed(1, 2, 3, 4, 5))", 12, "does not show which"),
        ("", 10, "does not show which"),
    ],
)
def test_what_cannot_be_found_is_named(text, line, said):
    with pytest.raises(benchmarks.UnclearError, match=said) as error:
        made(MAKER + text)
    assert str(error.value).startswith(f"line {line}:")


def test_what_ncu_counts_is_found(tmp_path):
    script = tmp_path / "script.py"
    text = MAKER.replace('"mode": mode', '"mode": mode, **more')
    text = text.replace('more="", wide=False', "wide=False, **more")
    text = text.replace("{more}", "")
    asks = "run(speed('a', counter=METRIC))\nrun(speed('b'))\n"
    script.write_text(f"METRIC = 'x.sum'\n{text}{asks}")
    assert benchmarks.counters(script) == {"a": "x.sum"}
    script.write_text(text + asks)
    with pytest.raises(benchmarks.UnclearError, match="show the counter"):
        benchmarks.counters(script)


def test_nothing_is_run_to_find_them(tmp_path):
    file = tmp_path / "written"
    made(
        f"x = open({str(file)!r}, 'w')\n"
        f"import pathlib\npathlib.Path({str(file)!r}).touch()\n"
        + MAKER.replace("names =", f"open({str(file)!r}, 'w')\n    names =")
        + "run(speed('a'))"
    )
    assert not file.exists()


def test_a_benchmark_does_not_reach_another():
    two = MAKER + "run(speed('a'))\nrun(speed('b'))\n"
    before = benchmarks.hashes_of(two)
    after = benchmarks.hashes_of(two.replace("speed('b')", "speed('b', '-')"))
    assert before["a"] == after["a"]
    assert "b" not in after
    assert before["a"] != before["b"]


# The tutorials -------------------------------------------------------------

TUTORIALS = [tutorial.name_of(script) for script in tutorial.scripts()]
EVERY = pytest.mark.parametrize("name", TUTORIALS)


@functools.cache
def script_of(name):
    """Text, script and {benchmark: the lines of what it reaches}."""
    text = tutorial.script_of(name).read_text(encoding="utf-8")
    script = Script(text)
    reached = {
        plot: {root.lineno, *(node.lineno for node in script.reached(root))}
        for plot, root in benchmarks.made_by(script).items()
    }
    return text, script, reached


def edited(text, node):
    """The text with one more statement in a function."""
    lines = text.splitlines(keepends=True)
    last = node.body[-1]
    lines.insert(last.lineno - 1, f"{' ' * last.col_offset}edited = 1\n")
    return "".join(lines)


def stale(name, text):
    before = benchmarks.hashes_of(script_of(name)[0])
    after = benchmarks.hashes_of(text)
    assert before.keys() == after.keys()
    return {plot for plot in before if before[plot] != after[plot]}


@EVERY
def test_new_prose_needs_no_new_hash(name):
    """What is kept of the code alone is what the whole script gives."""
    text = script_of(name)[0]
    code = tutorial.packed(text)
    assert benchmarks.hashes_of(code) == benchmarks.hashes_of(text)
    more = text.replace("\n# %%\n", "\n# %%\n# More of it.\n#\n")
    assert more != text and tutorial.packed(more) == code
    rows, lines = tutorial.rows(more), more.splitlines()
    assert [lines[row - 1] for row in rows] == code.splitlines()


@EVERY
def test_a_kernel_makes_stale_who_reaches_it(name):
    text, script, reached = script_of(name)
    tried = set()
    for node in script.body:
        if not any(
            ast.unparse(decorator) == "triton.jit"
            for decorator in getattr(node, "decorator_list", [])
        ):
            continue
        mine = frozenset(
            p for p, lines in reached.items() if node.lineno in lines
        )
        if mine not in tried:  # one kernel for each set of benchmarks
            tried.add(mine)
            assert stale(name, edited(text, node)) == mine, node.name
    assert any(tried)


# Kernels and which benchmarks they make stale, found by reading the pages.
READ = {
    "layer-norm/01-layer-norm": {
        "_layer_norm_fwd": "all",
        "_layer_norm_bwd": "-backward",
    },
    "layer-norm/02-summing-rows": {
        "_layer_norm_bwd_columns": "all",
        "_layer_norm_bwd": "-designs -bits -dram",
        "_add_to_few": "none",
    },
    "layer-norm/03-lock": {
        "_add_behind_lock": "all",
        "_layer_norm_fwd": "all but -race",
        "_one_launch": "none",  # the stub of an exercise
    },
    "layer-norm/04-loads-in-flight": {
        "_read": "-knee",
        "_layer_norm_bwd": "all",  # the knee too: more than a reader says
        "_layer_norm_fwd": "-loads-backward",  # the others call no function
        "_read_two": "none",
    },
    "layer-norm/05-chunks": {
        "_load_chunks": "all",
        "_layer_norm_bwd_chunks": "all but -chunks-forward -lanes",
        "_row_sums": "none",
    },
    "layer-norm/06-unaligned-rows": {
        "_sum_of_row": "-requests",
        "_load_lanes": "all but -requests",
        "_gradients": "-backward",
        "distance": "none",  # the stub of an exercise
    },
    "layer-norm/07-two-sweeps": {
        "_welford": "all",
        "_rstd_by_squares": "-variance",
        "_layer_norm_bwd_means": "-backward -traffic",
        "_rstd_shifted": "none",
    },
    "layer-norm/08-shared-rows": {
        "_publish": "all",
        "_layer_norm_bwd_shared": "all but -exchange",
        "add": "none",  # the stub of an exercise
    },
    "layer-norm/09-two-passes": {
        "_layer_norm_bwd_columns": "all but -dx",
    },
    "layer-norm/10-host-time": {
        "_layer_norm_bwd": "-ladder",
    },
    "layer-norm/11-every-width": {
        "_welford": "all",
    },
    "fused/01-add-layer-norm": {
        "_add_layer_norm_fwd": "all",
        "_forget": "-backward -wide -sectors",  # both passes
        "_layer_norm_bwd_means": "-backward -wide",  # both call the function
        "_sum_of_three": "none",  # the stub of an exercise
    },
    "fused/02-dropout": {
        "_dropout": "all",
        "_dropout_only": "-only",
        "_add_up": "all but -only",
        "kept": "none",  # a check
    },
    "fused/03-activation": {
        "_activation_layer_norm_fwd": "all but -alone",
        "_apply": "-alone",
        "_gelu_tanh": "-backward",  # in a dict of functions
        "_squared_relu": "none",  # the stub of an exercise
    },
    "norms-and-losses/01-rms-norm": {
        "_rms_norm_fwd": "all",
        "_rms_norm_bwd": "all but -dram",
        "_move": "all but -dram",
        "gradient": "none",  # the stub of an exercise
    },
    "norms-and-losses/02-rms-norm-16-bits": {
        "_rounded": "all",
        "_rms_norm_bwd": "all but -casting",
        "in_torch": "all",  # more than a reader says
        "_add_norm": "none",
    },
    "norms-and-losses/03-softmax": {
        "_exp": "all",
        "_softmax_fwd_streaming": "all",
        "_softmax_fwd": "all but -pairs",
        "_softmax_bwd": "-backward",
        "pair": "none",  # in PyTorch
        "gradient": "none",  # the stub of an exercise
    },
    "norms-and-losses/04-cross-entropy": {
        "_online": "all but -theirs",
        "_read": "-theirs -loss",
        "_scale": "-step -memory -layer",
        "in_chunks": "-step -memory -layer",  # more than a reader says
        "check": "none",
        "factor": "none",  # the stub of an exercise
    },
    "norms-and-losses/05-wide-softmax": {
        "_softmax_fwd": "all",
        "_softmax_fwd_shared": "all but -sweeps-forward",
        "_softmax_bwd_shared": "softmax-forward softmax-backward",
        "merge_logs": "none",  # the stub of an exercise
    },
    "several-gpus/01-layer-norm": {
        "_mean_m2": "all",
        "_row_sums": "all but -dram",
        "clock": "all but -dram",
        "as_rows": "-columns-forward -columns-backward",
        "divisor": "none",  # the stub of an exercise
    },
}


@EVERY
def test_who_is_stale_as_a_reader_would_say(name):
    text, script, reached = script_of(name)
    if name not in READ:
        pytest.fail(f"read {name} and say which kernels reach what")
    for kernel, said in READ[name].items():
        (node,) = (n for n in script.body if getattr(n, "name", "") == kernel)
        ends = said.removeprefix("all but").split()
        expected = {p for p in reached if p.endswith(tuple(ends))}
        if said.startswith("all"):
            expected = set(reached) - (expected if "but" in said else set())
        assert stale(name, edited(text, node)) == expected, kernel


@EVERY
def test_nothing_else_makes_a_benchmark_stale(name):
    """Every statement that none reaches, changed at once; then prose."""
    text, script, reached = script_of(name)
    lines = text.splitlines(keepends=True)
    everyone = set().union(*reached.values())
    rest = [
        node
        for node in script.body
        if not any(node.lineno <= line <= node.end_lineno for line in everyone)
    ]
    checks = [n for n in rest if "assert" in ast.unparse(n)]
    exercises = [n for n in rest if "exercise" in ast.unparse(n)]
    assert checks and exercises
    for node in reversed(rest):
        if isinstance(node, ast.FunctionDef):
            lines = edited("".join(lines), node).splitlines(keepends=True)
        else:
            lines.insert(node.lineno - 1, "edited = 1\n")
    changed = "".join(lines).replace("\n# %%", "\n# Prose.\n\n# %%")
    assert changed.count("edited = 1") == len(rest)
    assert not stale(name, changed)


def last_measured_by_one_function(name):
    """The last benchmark with a measuring function of its own, and that."""
    made = benchmarks.made_by(script_of(name)[1]).items()
    own = [(p, r) for p, r in made if isinstance(r, ast.FunctionDef)]
    return own[-1] if own else None


@pytest.mark.parametrize(
    "name", filter(last_measured_by_one_function, TUTORIALS)
)
def test_a_benchmark_makes_no_other_stale(name):
    plot, root = last_measured_by_one_function(name)
    assert stale(name, edited(script_of(name)[0], root)) == {plot}
