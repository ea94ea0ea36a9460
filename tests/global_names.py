"""The global names that a statement of a script binds and uses."""

import ast
import symtable

COMPREHENSIONS = {"listcomp", "setcomp", "dictcomp", "genexpr"}


def table_of(text):
    return symtable.symtable(text, "script", "exec")


def globals_of(scope):
    """The global names that a scope uses, or one inside it."""
    found = {s.get_name() for s in scope.get_symbols() if s.is_global()}
    return found.union(*map(globals_of, scope.get_children()))


def bound_by(text):
    return {
        symbol.get_name()
        for symbol in table_of(text).get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }


def names_of(statement):
    """What one at the top level binds, uses at once, and uses later, when a
    function runs that it defines."""
    text = ast.unparse(statement)
    table = table_of(text)
    binds, later = bound_by(text), set()
    reads = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    for scope in table.get_children():
        at_once = scope.get_name() in COMPREHENSIONS
        (reads if at_once else later).update(globals_of(scope))
    if isinstance(statement, ast.For | ast.With):
        reads -= binds  # bound where it begins
    return binds, reads, later
