"""What an actor would refuse is refused before anything starts.

Each `raise` that an actor can reach stands in one of two tables: it has a twin at the start, which a test shows, or it
says something that only a running system can find out.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from asyncspec.launch.roles import CLASSES, MOCKED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncspec"
# What every launcher calls before it starts a process.
ROOTS = (
    "config.load:load",
    "config.check:check",
    "launch.preflight:check_inputs",
    "launch.preflight:check_host",
    "launch.roles:devices",
)


# The syntax tree.
@cache
def tree(module: str) -> ast.Module:
    return ast.parse(path(module).read_text())


def path(module: str) -> Path:
    file = PACKAGE.joinpath(*module.split("."))
    return file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py"


@cache
def imported(module: str) -> frozenset[str]:
    """Modules of the package that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("asyncspec"):
            base = node.module.removeprefix("asyncspec").removeprefix(".")
            names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
            found |= {name for name in [base, *names] if name and path(name).is_file()}
    return frozenset(found)


def reachable() -> set[str]:
    """Modules that an actor can import."""
    waiting = [module.removeprefix("asyncspec.") for module, _ in [*CLASSES.values(), *MOCKED.values()]]
    found = set()
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += imported(module)
    return found


def functions(module: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, node) of every function of a module. One inside another belongs to the outer one."""

    def inside(node: ast.AST, names: tuple[str, ...]):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from inside(child, (*names, child.name))
            elif isinstance(child, ast.FunctionDef):
                yield ".".join((*names, child.name)), child

    yield from inside(tree(module), ())


def raised(function: ast.AST) -> set[str]:
    """Types that a function raises; "again" for an exception that was raised or kept before."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise):
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = error.id if isinstance(error, ast.Name) else "again"
            found.add(name if name[:1].isupper() else "again")
    return found


def raises() -> dict[str, set[str]]:
    """Every function of an actor's modules that raises -> the types, without those of RUNNING_TYPES."""
    found = {}
    for module in sorted(reachable()):
        for name, node in functions(module):
            if types := raised(node) - set(RUNNING_TYPES):
                found[f"{module}:{name}"] = types
    return found


RUNNING_TYPES = {
    "again": "it was raised before, and counts there",
    "StopRequested": "the run is ending",
    "WireError": "a message from the network is malformed",
    "BroadcastError": "a member of a broadcast group is gone",
    "PeersLost": "a rank is gone",
    "LagError": "an invariant of the running system is broken",
    "ImpossibleTransition": "an invariant of the running system is broken",
    "TimeoutError": "another process did not answer in time",
    "FloatingPointError": "a gradient is not finite",
    "ServerError": "an SGLang server does not answer, or refuses what it accepted at the start",
    "RunFailed": "the controller ends the run, for a reason that is raised elsewhere",
    "RewardError": "too many calls of the user's function failed",
    "NotStarted": "a process did not start",
}
