"""Read the project's Markdown: its pages, links, sentences and commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def name(page):
    return str(page.relative_to(ROOT))


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


def links(page):
    return LINK.findall(without_code(page.read_text()))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def sentences(page):
    """The sentences of a page's paragraphs and list items; not of tables, headings and code."""
    text = without_code(page.read_text())
    lines = [line for line in text.splitlines() if not re.match(r"\s*[|#]|    |<!--", line)]
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
        words = re.sub(r"`[^`]*`", "CODE", " ".join(words.split()))
        yield from re.split(r"(?<=[.!?:;])\s+", re.sub(r"^(?:[-*]|\d+\.) ", "", words))


def commands(page):
    """The scripts of a page's `sh` blocks, which a reader may copy as they stand."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), flags=re.S | re.M)
