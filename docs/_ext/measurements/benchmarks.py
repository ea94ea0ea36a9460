"""The benchmarks of a script, found in its text, and a hash of each.

A benchmark is a function handed to ``perf_report(Benchmark(...))``, as a
decorator or by a call, perhaps in a function of the script that makes several
of them. Its hash covers the code that it can reach (`reach`), so prose,
drawings, checks, exercises and other benchmarks do not matter to it.

To learn the names, only the lines that make benchmarks are executed, and the
constants that they use. Everything else is Unknown: nothing is imported,
launched or measured.
"""

import ast
import builtins
import copy
import functools
import hashlib
import sys
from pathlib import Path

import joblib

from measurements.reach import FUNCTIONS, Script, last_name, names
from tutorial import CACHE, packed

# What a hash depends on beside the script: these modules, and Python.
MADE_BY = (
    *(path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py")),
    sys.version_info[:2],
)

MAKERS = {"perf_report", "Benchmark"}
# What args of a benchmark say to the mechanism, and its type.
TOLD = {"counter": str, "ranks": int}
# What the constants of a script are made with.
SAFE = (
    *("abs", "bool", "dict", "enumerate", "float", "int", "isinstance", "len"),
    *("list", "map", "max", "min", "range", "reversed", "round"),
    *("set", "sorted", "str", "sum", "tuple", "zip"),
)


class UnclearError(Exception):
    """What cannot be read from the text of a script, and at which line."""


def hashes(path):
    """{plot_name: hash} of a script's benchmarks, in their order."""
    return _kept(Path(path).read_text(encoding="utf-8"), MADE_BY)


@functools.lru_cache(maxsize=64)
@joblib.Memory(CACHE, verbose=0).cache
def _kept(text, made_by):
    """Between builds as well: what else a small one does takes less time."""
    try:
        return _of_code(packed(text), made_by)  # new prose is no new code
    except UnclearError:
        return hashes_of(text)  # the message names a line


@joblib.Memory(CACHE, verbose=0).cache
def _of_code(code, made_by):
    return hashes_of(code)


def hashes_of(text):
    script = Script(text)
    return {
        name: hashlib.sha256(
            script.text([root, *script.reached(root)]).encode()
        ).hexdigest()[:16]
        for name, root in made_by(script).items()
    }


def counters(path):
    """{plot_name: what ncu counts for it} of the benchmarks it counts for."""
    return _told(path, "counter")


def gpus(path):
    """How many GPUs a script is measured with at a time, at least."""
    return max([1, *_told(path, "ranks").values()])


def _told(path, key):
    """{plot_name: what its args say under a key}, where they do."""
    made = _made(Script(Path(path).read_text(encoding="utf-8"))).items()
    return {name: args[key] for name, (_, args) in made if key in args}


def made_by(script):
    """{plot_name: the statement or the expression that makes it}."""
    return {name: root for name, (root, _) in _made(script).items()}


def _made(script):
    """{plot_name: (what makes it, what its args say to the mechanism)}."""
    makers = _makers(script)
    constants = _needed(script, makers)
    space, found = _Namespace(), {}
    for node, its in zip(script.body, script.names, strict=True):
        if isinstance(node, FUNCTIONS) and node.name not in makers:
            its_decorators = names(*node.decorator_list)
            makes = _makes(its_decorators, makers)
        else:
            makes = _makes(its, makers)
        assigns = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        if not makes and not (assigns and its.bound & constants):
            space.forget(its.bound)
            continue
        try:
            exec(_compiled(node), space)
        except Exception as error:
            if makes:
                raise UnclearError(
                    f"line {node.lineno}: the text does not show which "
                    f"benchmarks this makes ({error})"
                ) from None
            space.forget(its.bound)
        for benchmark in space.take():
            name, args = benchmark.plot_name, benchmark.told
            if name in found:
                raise UnclearError(
                    f"line {node.lineno}: two benchmarks are called {name}"
                )
            _require_clear(node, "plot_name", name)
            for key, value in args.items():
                _require_clear(node, key, value, TOLD[key])
            found[name] = _root(node, makers), args
    for node in ast.walk(script.tree):
        if _is_maker(node, {"perf_report"}) and node.lineno not in space.lines:
            raise UnclearError(
                f"line {node.lineno}: the text does not show which benchmarks "
                "this perf_report makes; call it at the top level of the "
                "script, or in a function that is called there"
            )
    return found


def _require_clear(node, what, value, kind=str):
    if not isinstance(value, kind) or Unknown.TEXT in str(value):
        raise UnclearError(
            f"line {node.lineno}: the text does not show the {what} of this "
            "benchmark; make it of constants"
        )


def _makers(script):
    """The functions of a script that make benchmarks when they are called."""
    bodies = {
        node.name: names(*node.body)
        for node in script.body
        if isinstance(node, FUNCTIONS)
    }
    makers, before = set(), None
    while before != len(makers):
        before = len(makers)
        makers |= {name for name in bodies if _makes(bodies[name], makers)}
    return makers


def _makes(its, makers):
    """Whether some code makes benchmarks, itself or by functions that do."""
    return bool(its.functions & MAKERS or its.used & makers)


def _is_maker(node, functions=MAKERS):
    """Whether a node calls one of these functions of triton.testing."""
    return isinstance(node, ast.Call) and last_name(node.func) in functions


def _root(statement, makers):
    """The expression of a statement that makes its one benchmark.

    What is done with the benchmark afterwards is not measured: in
    ``table = run(speed("forward"))`` the root is ``speed("forward")``.
    """
    if isinstance(statement, FUNCTIONS):
        return statement
    outermost, left = [], [statement]
    while left:
        node = left.pop()
        if isinstance(node, ast.Call) and (
            _is_maker(node)
            or _is_maker(node.func)
            or getattr(node.func, "id", None) in makers
        ):
            outermost.append(node)
        else:
            left += ast.iter_child_nodes(node)
    return outermost[0] if len(outermost) == 1 else statement


def _needed(script, makers):
    """The names that the making of benchmarks may ask for."""
    needed, before = set(makers), None
    for its in script.names:
        if _makes(its, makers):
            needed |= its.used
    while before != len(needed):
        before = len(needed)
        for its in script.names:
            if its.bound & needed:
                needed |= its.used
    return needed


class Unknown:
    """A value that the text does not tell: all that is done gives another."""

    TEXT = "\0unknown\0"

    def __str__(self):
        return self.TEXT

    def __format__(self, _):
        return self.TEXT

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __hash__(self):
        return 0


def _unknown(*args, **kwargs):
    return Unknown()


for _name in (
    *("call", "getattr", "getitem", "enter", "neg", "invert", "abs"),
    *(
        side + operation
        for operation in (
            *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod"),
            *("pow", "and", "or", "xor", "lshift", "rshift"),
        )
        for side in ("", "r")
    ),
    *("eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(Unknown, f"__{_name}__", _unknown)
for _name in ("setitem", "delitem", "exit"):
    setattr(Unknown, f"__{_name}__", lambda *_: None)


class _Benchmark(Unknown):
    def __init__(
        self, x_names=0, x_vals=0, line_arg=0, line_vals=0, line_names=0,
        plot_name=None, args=None, *more, **kwargs,
    ):  # fmt: skip
        self.plot_name = plot_name
        args = dict(args) if isinstance(args, dict) else {}
        if x_names == ["ranks"]:  # more of them are measured where they are
            args["ranks"] = min(x_vals)
        self.told = {key: args[key] for key in TOLD if key in args}


class _Namespace(dict):
    """The names of a script while its benchmarks are made."""

    def __init__(self):
        self.lines = set()  # where perf_report was called
        self.made = []
        super().__init__(
            __builtins__={},
            Benchmark=_Benchmark,
            perf_report=self.perf_report,
        )

    def __missing__(self, name):
        return getattr(builtins, name) if name in SAFE else Unknown()

    def forget(self, bound):
        self.update({name: Unknown() for name in bound - MAKERS})

    def perf_report(self, line, benchmarks):
        self.lines.add(line)
        if not isinstance(benchmarks, list | tuple):
            benchmarks = [benchmarks]

        def measures(_):
            self.made += benchmarks
            return Unknown()

        return measures

    def take(self):
        made, self.made = self.made, []
        return made


class _Standing(ast.NodeTransformer):
    """Let the namespace's functions stand for those of triton.testing."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if _is_maker(node):
            name = getattr(node.func, "attr", None) or node.func.id
            node.func = ast.Name(name, ast.Load())
            if name == "perf_report":
                node.args.insert(0, ast.Constant(node.lineno))
        return node


def _compiled(node):
    module = ast.Module([_Standing().visit(copy.deepcopy(node))], [])
    return compile(ast.fix_missing_locations(module), "<script>", "exec")
