"""What a piece of a script can reach: names resolved, nothing executed.

A script is a list of statements at its top level. A statement reaches another
by a global name that it uses, now or in a function that it defines. Which
names are global is decided by scopes: a parameter or a local variable hides
the global of that name.

Where text cannot tell, too much is reached rather than too little:

- every statement that binds a reached name is reached, not the last alone;
- so is what may change its value: ``X[...] = ...``, ``X.a = ...``, any call
  of a method of X but known readers, ``@X.register``, a function that does so
  and who calls it, and a call that is handed X and whose result is thrown
  away (except print and assertions of torch.testing);
- settings of imported modules (``os.environ[...] = ...``, ``torch.set_...``)
  belong to everything, and so does ``from x import *``;
- a script that looks names up at run time (``globals``, ``eval``, ``exec``,
  ``torch.ops`` and the like) is reached as a whole.

The state of random generators is not followed: a measurement seeds its own.
"""

import ast
import io
import tokenize
from dataclasses import dataclass, field

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

# Methods that leave their object as it is.
CONTAINERS = {"get", "items", "keys", "values"}
READERS = CONTAINERS | {"apply", "copy", "count", "format", "index", "join"}
# Functions that leave their arguments as they are, called for their effect.
HARMLESS = ("print", "plt.", "torch.testing.", "assert_")
# How a function of a module begins that changes a setting.
SETTERS = (
    *("set", "use_", "enable", "disable", "allow", "register", "update"),
    *("pop", "putenv", "unsetenv", "load_library", "filterwarnings"),
)
# What looks names up at run time.
DYNAMIC = {
    *("eval", "exec", "compile", "globals", "locals", "vars", "__import__"),
}
DYNAMIC_PARTS = {"__globals__", "__dict__"}
DYNAMIC_MEMBERS = {("sys", "modules"), ("torch", "ops")}
# But these are PyTorch's, whatever a script registers.
OWN_OPERATORS = ("torch", "ops", "aten")


@dataclass
class Names:
    """The global names of a statement."""

    used: set = field(default_factory=set)
    bound: set = field(default_factory=set)
    # roots of what it changes in place: X of X[...] = ..., X.append(...)
    changed: set = field(default_factory=set)
    # what it changes when a function is called that it defines
    changed_later: set = field(default_factory=set)
    # the same for attributes and items that are stored, and for setters
    settings: set = field(default_factory=set)
    settings_later: set = field(default_factory=set)
    called: set = field(default_factory=set)  # now, by their plain name
    # calls made now: (function, its text, {position or keyword: what it is
    # handed}, whether the result is thrown away)
    calls: list = field(default_factory=list)
    aliases: set = field(default_factory=set)  # (name, what it stands for)
    # Of the function that it defines:
    params: set = field(default_factory=set)
    positional: list = field(default_factory=list)
    changed_params: set = field(default_factory=set)
    # the last part of the name of every function that it calls, ever
    functions: set = field(default_factory=set)
    used_now: set = field(default_factory=set)  # not in a function's body
    dynamic: bool = False


def names(*nodes):
    """The global names of some statements or expressions."""
    visitor = _Visitor()
    for node in nodes:
        visitor.visit(node)
    return visitor.found


def bound_by(node):
    """The name that a node binds by itself, or None."""
    if isinstance(node, ast.Name):
        return None if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.alias):
        return node.asname or node.name.split(".")[0]
    if isinstance(node, ast.MatchMapping):
        return node.rest
    named = FUNCTIONS | ast.ClassDef | ast.ExceptHandler
    if isinstance(node, named | ast.MatchAs | ast.MatchStar):
        return node.name
    return None


def chain(node):
    """The name at the root of ``X.a[b].c``, and the parts that follow it."""
    parts = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
        elif isinstance(node, ast.Call) and _reads_container(node.func):
            node = node.func
            continue
        elif isinstance(node, ast.Starred):
            pass
        elif not isinstance(node, ast.Subscript):
            return None, parts
        node = node.value
    return node.id, parts


def last_name(function):
    """``perf_report`` of ``triton.testing.perf_report``."""
    return getattr(function, "attr", getattr(function, "id", None))


def _reads_container(function):
    return isinstance(function, ast.Attribute) and function.attr in (
        CONTAINERS | {"setdefault"}
    )


class _Visitor(ast.NodeVisitor):
    def __init__(self):
        self.found = Names()
        # From the outermost: {name: whether it is local}, None for a class.
        self.scopes = []
        self.depth = 0  # of functions whose body is visited

    def is_global(self, name):
        for scope in reversed(self.scopes):
            # A class binds names that its methods cannot see, and reads a
            # name from outside until it binds it: never hidden.
            if scope is not None and name in scope:
                return not scope[name]
        return True

    def bind(self, name):
        in_class = self.scopes and self.scopes[-1] is None
        if name and not in_class and self.is_global(name):
            self.found.bound.add(name)

    def change(self, name, setting):
        found = self.found
        if self.depth and name in found.params:
            found.changed_params.add(name)
        if name is None or not self.is_global(name):
            return
        (found.changed_later if self.depth else found.changed).add(name)
        if setting:
            later = found.settings_later if self.depth else found.settings
            later.add(name)

    def generic_visit(self, node):
        self.bind(bound_by(node))
        if isinstance(node, COMPREHENSIONS):
            self.comprehension(node)
        else:
            super().generic_visit(node)

    def visit_Name(self, node):
        if node.id in DYNAMIC and self.is_global(node.id):
            self.found.dynamic = True
        if not isinstance(node.ctx, ast.Load):
            self.bind(node.id)
        elif self.is_global(node.id):
            self.found.used.add(node.id)
            if not self.depth:
                self.found.used_now.add(node.id)

    def visit_Attribute(self, node):
        root, parts = chain(node)
        if (root, *parts[:2]) == OWN_OPERATORS:
            self.visit(ast.Name(root, ast.Load()))
            return
        member = (root, *parts) in DYNAMIC_MEMBERS
        if member or node.attr in DYNAMIC_PARTS:
            self.found.dynamic = True
        self.stored(node)

    def visit_Subscript(self, node):
        self.stored(node)

    def stored(self, node):
        if not isinstance(node.ctx, ast.Load):
            self.change(chain(node)[0], setting=True)
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        name = getattr(node.target, "id", None)
        if name and self.is_global(name):  # it is read as well
            self.found.used.add(name)
        self.generic_visit(node)

    def visit_Call(self, node):
        self.found.functions.add(last_name(node.func))
        root, parts = chain(node.func)
        if parts and parts[-1] not in READERS:
            self.change(root, setting=parts[-1].startswith(SETTERS))
        if not self.depth:
            self.call(node, thrown_away=False)
            if isinstance(node.func, ast.Name):
                self.found.called.add(root)
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and not self.depth:
            self.call(node.value, thrown_away=True)
        self.generic_visit(node)

    def call(self, node, thrown_away):
        given = {i: chain(part)[0] for i, part in enumerate(node.args)}
        given |= {k.arg: chain(k.value)[0] for k in node.keywords}
        if any(isinstance(part, ast.Starred) for part in node.args):
            given[None] = given[0]  # it may be any of them
        self.found.calls.append(
            (chain(node.func)[0], ast.unparse(node.func), given, thrown_away)
        )

    def visit_Assign(self, node):
        for target in node.targets:
            self.alias(target, node.value)
        self.generic_visit(node)

    def visit_For(self, node):
        self.alias(node.target, node.iter)
        self.generic_visit(node)

    def alias(self, target, value):
        root = chain(value)[0]
        if root and not self.depth:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    self.found.aliases.add((part.id, root))

    def visit_FunctionDef(self, node):
        self.bind(node.name)
        for part in node.decorator_list:
            # A decorator is called, and given the function.
            if not isinstance(part, ast.Call):
                root, parts = chain(part)
                self.found.called.add(root)
                if parts and parts[-1] not in READERS:
                    self.change(root, setting=False)
            self.visit(part)
        if node.returns:
            self.visit(node.returns)
        self.function(node, node.body)

    def visit_AsyncFunctionDef(self, node):
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node):
        self.function(node, [node.body])

    def function(self, node, body):
        given = [
            *node.args.posonlyargs,
            *node.args.args,
            *node.args.kwonlyargs,
            *filter(None, (node.args.vararg, node.args.kwarg)),
        ]
        for part in given:
            if part.annotation:
                self.visit(part.annotation)
        for part in (*node.args.defaults, *node.args.kw_defaults):
            if part:
                self.visit(part)
        if not self.scopes:
            self.found.params |= {a.arg for a in given}
            positional = [*node.args.posonlyargs, *node.args.args]
            self.found.positional += [a.arg for a in positional]
        self.scopes.append(_locals(body) | {a.arg: True for a in given})
        self.depth += 1
        for part in body:
            self.visit(part)
        self.depth -= 1
        self.scopes.pop()

    def visit_ClassDef(self, node):
        self.bind(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.scopes.append(None)
        for part in node.body:
            self.visit(part)
        self.scopes.pop()

    def comprehension(self, node):
        first = node.generators[0]
        self.visit(first.iter)
        targets = [_locals([g.target]) for g in node.generators]
        self.scopes.append(
            {k: v for scope in targets for k, v in scope.items()}
        )
        for part in ast.iter_child_nodes(node):
            if part is not first:
                self.visit(part)
        for part in first.ifs:
            self.visit(part)
        self.scopes.pop()


def _locals(body):
    """{name: whether it is local} of what the body of a function binds."""
    bound, declared = set(), {}
    left = list(body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Global):
            declared |= dict.fromkeys(node.names, False)
        elif isinstance(node, ast.Nonlocal):
            # of a function around this one, which knows it
            declared |= dict.fromkeys(node.names)
        bound.add(bound_by(node))
        if isinstance(node, COMPREHENSIONS):
            # Only ``:=`` in it binds a name of the function.
            bound |= {
                part.target.id
                for part in ast.walk(node)
                if isinstance(part, ast.NamedExpr)
            }
        elif not isinstance(node, FUNCTIONS | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    known = dict.fromkeys(bound - {None}, True) | declared
    return {name: local for name, local in known.items() if local is not None}


class Script:
    """A script whose statements are followed from name to name."""

    def __init__(self, text):
        self.tree = ast.parse(text)
        self.body = self.tree.body
        self.lines = code_lines(text, self.tree)
        self.names = [names(node) for node in self.body]
        self.imported = set()
        for node in self.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                drawing = ast.unparse(node).split()[1].startswith("matplotlib")
                if not drawing:
                    self.imported |= names(node).bound
        self.defined = {
            node.name: found
            for node, found in zip(self.body, self.names, strict=True)
            if isinstance(node, FUNCTIONS | ast.ClassDef)
        }
        self.dynamic = any(found.dynamic for found in self.names)
        self.aliases = set().union(*(found.aliases for found in self.names))

    def reached(self, root):
        """The statements that a node reaches, itself not included."""
        if self.dynamic:
            return list(self.body)
        in_time = range(self.end_of(root))
        reached = {i for i in in_time if self.always(self.names[i])}
        known = set(names(root).used)
        before = None
        while before != (len(reached), len(known)):
            before = len(reached), len(known)
            # What may be changed in place: no module, but also what else
            # stands for the same thing.
            values = known - self.imported
            values |= {a for a, name in self.aliases if name in values}
            for i in in_time:
                found = self.names[i]
                if (
                    i in reached
                    or found.bound & known
                    or self.changes(found, values)
                ):
                    reached.add(i)
                    known |= found.used
        return [self.body[i] for i in sorted(reached)]

    def end_of(self, root):
        """How many statements may run before a node is used for the last time.

        It is used where it stands, and wherever a name is mentioned that may
        hold it. What stands below that comes too late to reach it.
        """
        end, holders = 0, set()
        for i, (node, found) in enumerate(
            zip(self.body, self.names, strict=True)
        ):
            stands = node.lineno <= root.lineno <= node.end_lineno
            if stands or found.used & holders:
                end = i + 1
                holders |= found.bound
        return end

    def always(self, found):
        """Whether a statement changes what belongs to everything."""
        return (
            "*" in found.bound
            or found.settings & self.imported
            or found.settings_later & self.imported
            or any(
                self.defined[name].settings_later & self.imported
                for name in found.called & self.defined.keys()
            )
        )

    def changes(self, found, known):
        """Whether a statement may change something known in place."""
        if (found.changed | found.changed_later) & known:
            return True
        if any(
            self.defined[name].changed_later & known - {name}
            for name in found.called & self.defined.keys()
        ):
            return True
        return any(self.changes_given(*call, known) for call in found.calls)

    def changes_given(self, function, text, given, thrown_away, known):
        """Whether a call may change something known that it is handed."""
        given = {at: name for at, name in given.items() if name in known}
        if not given:
            return False
        if function not in self.defined:
            return thrown_away and not text.startswith(HARMLESS)
        its = self.defined[function]
        # None: ``*given``, ``**given``, or more than the function has places.
        places = dict(enumerate(its.positional)) | {n: n for n in its.params}
        params = {places.get(at) for at in given}
        return bool(
            its.changed_params
            if None in params
            else its.changed_params & params
        )

    def text(self, nodes):
        """The code of some nodes: no comment, docstring or blank line."""
        rows = set()
        for node in nodes:
            first = [node.lineno]
            first += [d.lineno for d in getattr(node, "decorator_list", [])]
            rows.update(range(min(first), node.end_lineno + 1))
        return "".join(self.lines[row] for row in sorted(rows))


def code_lines(text, tree):
    """The code of each row, from 1: "" where there is none.

    The text is taken rather than a syntax tree or tokens, whose forms differ
    between versions of Python.
    """
    lines = [line + "\n" for line in text.split("\n")]
    open_rows = set()  # rows that end within a string: blanks count there
    strings, cuts = [], []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            cuts.append((token.start, token.end))
        elif kind == "STRING":
            open_rows.update(range(token.start[0], token.end[0]))
        elif kind in ("FSTRING_START", "TSTRING_START"):  # Python 3.12, 3.14
            strings.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            open_rows.update(range(strings.pop(), token.end[0]))
    documented = ast.Module | ast.ClassDef | FUNCTIONS
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, False):
            doc = node.body[0]
            cuts.append(
                (
                    (doc.lineno, _column(lines, doc.lineno, doc.col_offset)),
                    (
                        doc.end_lineno,
                        _column(lines, doc.end_lineno, doc.end_col_offset),
                    ),
                )
            )
    for (row, column), (end_row, end_column) in sorted(cuts, reverse=True):
        rest = lines[end_row - 1][end_column:]
        for between in range(row, end_row):
            lines[between] = ""
        open_rows -= set(range(row, end_row))
        lines[row - 1] = lines[row - 1][:column] + rest
    return [""] + [
        line
        if number in open_rows or number - 1 in open_rows
        else line.rstrip() + "\n" * bool(line.strip())
        for number, line in enumerate(lines, start=1)
    ]


def _column(lines, row, offset):
    """The syntax tree counts bytes, a text characters."""
    return len(lines[row - 1].encode()[:offset].decode())
