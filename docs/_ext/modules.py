"""Modules of what pages define, to import.

A module has some functions of a page, or of several, and all that these need
there, to the byte. What a script does beside that is left out: prose,
drawings, checks, clocks. Of the first cells only what is used stays: no stream
is set, and no switch of the interpreter.

Pages use one name for different things. In a module of several, such a name
gets the word of its page: of the page ``linear``, ``forward`` becomes
``linear_forward``, and ``_load`` becomes ``_linear_load``.

Nothing is imported that make cells has not: it needs Python alone.
"""

import ast
import builtins
import re
import symtable
import sys
from collections import Counter, defaultdict

IN_ONE_PROCESS = """One kind of GPU a process. To try it without a GPU, set \
TRITON_INTERPRET=1."""
ABOUT = f'''"""Functions of the pages of Both Passes, with their kernels.

{{functions}}

Both passes run in Triton. A name that several pages have begins with the word
of its page.

{IN_ONE_PROCESS}
"""
'''
# Of each page: its word, and what is wanted of it. Some pages give nothing.
# Functions of an earlier page, such as softmax of page 03 and layer norm of
# pages 01 to 09, are here in the form of the page that takes all widths. The
# pages of into-pytorch tell of other things with an RMS norm, which can do
# less than that of norms-and-losses/02.
BOTH_PASSES = {
    "layer-norm/11-every-width": ("every_width", "layer_norm"),
    "fused/01-add-layer-norm": ("stream", "add_layer_norm"),
    "fused/02-dropout": ("dropout", "dropout_add_layer_norm"),
    "fused/03-activation": ("activation", "activation_layer_norm"),
    "norms-and-losses/05-wide-softmax": ("softmax", "softmax log_softmax"),
    "attention/04-rotary": (
        "rotary",
        "tables rotary_embedding rotary_embedding_ rotate_query_and_key",
    ),
    "norms-and-losses/02-rms-norm-16-bits": ("norm", "rms_norm add_rms_norm"),
    "attention/07-programs-that-stay": ("attention", "attention"),
    "matrix-products/01-linear": ("linear", "linear"),
    "matrix-products/02-swiglu": ("gate", "swiglu geglu gated"),
    "norms-and-losses/04-cross-entropy": ("loss", "cross_entropy"),
    "matrix-products/03-linear-cross-entropy": (
        "head",
        "linear_cross_entropy",
    ),
}
# What scripts import from beside them: make cells writes it.
WRITTEN = {"model/both_passes": BOTH_PASSES}


class Statement:
    """A statement of a script, with the comment above it."""

    def __init__(self, node, lines):
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
        while re.match(r"# (?!%%)", lines[first - 1]):
            first -= 1
        self.node = node
        self.first = first
        self.last = node.end_lineno
        self.text = "\n".join(lines[first : self.last])
        table = symtable.symtable(self.text, "", "exec")
        self.binds = {
            each.get_name()
            for each in table.get_symbols()
            if each.is_assigned() or each.is_imported()
        }
        self.uses = set(global_names(table))

    def serves(self, names):
        """Whether it makes some of these names, or tells more of them."""
        if isinstance(self.node, ast.Import | ast.ImportFrom):
            return bool(self.binds & names)
        told = re.findall(r"^(?:@|\w+ = )(\w+)\.register_", self.text, re.M)
        return bool((self.binds - {"_"}) & names or names.intersection(told))


def global_names(table):
    """What a scope and those in it find outside of functions."""
    for each in table.get_symbols():
        if table.get_type() == "module" or each.is_global():
            yield each.get_name()
    for child in table.get_children():
        yield from global_names(child)


def needed(script, wanted):
    """The statements of a script that some functions need."""
    lines = script.split("\n")
    every = [Statement(node, lines) for node in ast.parse(script).body]
    names = set(wanted.split())
    taken = []
    while more := [s for s in every if s not in taken and s.serves(names)]:
        taken += more
        names |= set().union(*(s.uses for s in more))
    missing = set(wanted.split()) - set().union(*(s.binds for s in taken))
    if missing:
        raise LookupError(f"no page has {', '.join(sorted(missing))}")
    return [s for s in every if s in taken]


def shared(pages):
    """The names that pages have for different things."""
    texts = defaultdict(lambda: defaultdict(list))
    users = defaultdict(set)
    for page, statements in pages.items():
        for each in statements:
            for name in each.binds - {"_"}:
                texts[name][page].append(each.text)
                users[name] |= each.uses
    several = {name: each for name, each in texts.items() if len(each) > 1}
    found = {
        name
        for name, each in several.items()
        if len({tuple(text) for text in each.values()}) > 1
    }
    # Who uses such a name is different, too, though it looks the same.
    while more := {n for n in several if n not in found and users[n] & found}:
        found |= more
    return found


def own(name, word):
    """A name, behind the word of its page."""
    begin = "_" if name.startswith("_") else ""
    word = word.upper() if name.isupper() else word
    return f"{begin}{word}_{name.removeprefix('_')}"


class Places(ast.NodeVisitor):
    """Where global names stand in a statement: (line, column, name)."""

    def __init__(self, names):
        self.names = names
        self.found = []
        self.depth = 0

    def visit_Name(self, node):
        if node.id in self.names:
            self.found.append((node.lineno, node.col_offset, node.id))

    def visit_JoinedStr(self, node):
        """Python 3.11 does not know where names stand in these."""

    def visit_Global(self, node):
        """Python knows where the statement begins, and not its names."""
        for name in self.names.intersection(node.names):
            self.found.append((node.lineno, None, name))

    def visit_FunctionDef(self, node):
        at_top = self.depth == 0
        if at_top and node.name in self.names:
            column = len("class " if type(node) is ast.ClassDef else "def ")
            self.found.append((node.lineno, column, node.name))
        self.depth += 1
        names = self.names
        if type(node) is not ast.ClassDef:
            inside = [*ast.walk(node)]
            local = {each.arg for each in inside if type(each) is ast.arg}
            local |= {
                each.id
                for each in inside
                if type(each) is ast.Name and type(each.ctx) is ast.Store
            }
            local |= {
                each.name
                for each in inside[1:]
                if hasattr(each, "args") and hasattr(each, "name")
            }
            for each in inside:
                if type(each) is ast.Global:
                    local -= {*each.names}
            for each in (*node.decorator_list, node.args):
                self.visit(each)
            self.names = names - local
            for each in node.body:
                self.visit(each)
        else:
            self.generic_visit(node)
        self.names = names
        self.depth -= 1

    visit_ClassDef = visit_FunctionDef  # noqa: N815


def renamed(statement, names, word):
    """The text of a statement in which some names have the page's word."""
    places = Places(names)
    tree = ast.parse(statement.text)
    places.visit(tree)
    lines = statement.text.split("\n")
    told = [place for place in places.found if place[1] is None]
    for row, _, name in told:
        line = lines[row - 1]
        lines[row - 1] = re.sub(rf"\b{name}\b", own(name, word), line)
    found = [place for place in places.found if place not in told]
    for row, column, name in sorted(found, reverse=True):
        line = lines[row - 1].encode()  # columns are counted in bytes
        before, after = line[:column], line[column + len(name) :]
        lines[row - 1] = (before + own(name, word).encode() + after).decode()
    text = "\n".join(lines)
    for node in ast.walk(tree):
        if type(node) is ast.FormattedValue:
            code = ast.unparse(node.value)
            for name in names & {
                each.id for each in ast.walk(node.value) if hasattr(each, "id")
            }:
                new = re.sub(rf"\b{name}\b", own(name, word), code)
                text = text.replace(f"{{{code}", f"{{{new}")
    return text


def both_passes(gathered, read):
    """The text of a module of several pages; read(page) gives a script."""
    functions = "\n".join(
        f"    {', '.join(wanted.split())}" for _, wanted in gathered.values()
    )
    return text(ABOUT.format(functions=functions), gathered, read)


def text(about, gathered, read):
    """The text of a module, which begins with what it is about."""
    pages = {page: needed(read(page), of[1]) for page, of in gathered.items()}
    different = shared(pages)
    imports, written, body = [], set(), ""
    for page, statements in pages.items():
        word, wanted = gathered[page]
        if len(pages) > 1:
            rule = f"# {page} " + "-" * (77 - len(page))
            body += f"\n\n{rule}\n# Gives {', '.join(wanted.split())}.\n"
        last = 0
        for each in statements:
            if isinstance(each.node, ast.Import | ast.ImportFrom):
                imports.append(each.text)
                continue
            new = renamed(each, different, word)
            if new not in written:
                # Lines that follow each other still do.
                body += "\n" * min(each.first - last, 2) + f"{new}\n"
            written.add(new)
            last = each.last
    result = "\n".join([about, *in_order(imports), body])
    check(result)
    return result


def in_order(imports):
    """Each import once, Python's own before all others."""

    def key(line):
        theirs = line.split()[1].split(".")[0] not in sys.stdlib_module_names
        return theirs, line.startswith("from"), line

    before = None
    for line in sorted({*imports}, key=key):
        if before is False and key(line)[0]:
            yield ""
        before = key(line)[0]
        yield line


def check(result):
    """Raise an error if a name is missing, or made twice."""
    tree = ast.parse(result)
    statements = [Statement(node, result.split("\n")) for node in tree.body]
    bound = set().union(*(each.binds for each in statements))
    used = set().union(*(each.uses for each in statements))
    if missing := used - bound - {*vars(builtins)}:
        raise LookupError(f"a module lacks {', '.join(sorted(missing))}")
    counts = Counter(
        each.node.name for each in statements if hasattr(each.node, "name")
    )
    twice = {name for name, count in counts.items() if count > 1} - {"_"}
    if twice:
        raise LookupError(f"a module has {', '.join(sorted(twice))} twice")
