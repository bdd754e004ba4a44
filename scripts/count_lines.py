#!/usr/bin/env python3
"""Count the lines of code of each room in two revisions, without blank lines, comments and docstrings.

scripts/count_lines.py BEFORE AFTER [ROOM ...]    also prints the sum of the named rooms
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter

SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(found)


def git(*command: str) -> str:
    return subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout


def rooms(revision: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", revision, "asyncspec").splitlines():
        if path.endswith(".py"):
            parts = path.split("/")
            counts[parts[1] if len(parts) > 2 else "(root)"] += code_lines(git("show", f"{revision}:{path}"))
    return counts


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    before, after, chosen = rooms(sys.argv[1]), rooms(sys.argv[2]), sys.argv[3:]
    for room in sorted(before | after):
        print(f"{room:14}{before[room]:8}{after[room]:8}")
    for name, of in (("all", sorted(before | after)), (" + ".join(chosen), chosen)):
        if of:
            old, new = (sum(counts[room] for room in of) for counts in (before, after))
            print(f"{name}: {old} to {new} ({new / old - 1:+.1%})")


if __name__ == "__main__":
    main()
