"""Fills the HTML templates of this folder. All pages extend base.html, and need no network."""

from __future__ import annotations

from pathlib import Path


def render(template: str, **values: object) -> str:
    """Return a page.

    Args:
        template: a file of this folder.
        values: by the names that the template uses. Text among them is escaped.
    """
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(template).render(**values)
