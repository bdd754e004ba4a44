#!/usr/bin/env python3
"""Draw docs/images/system.svg: the controller, the four actors, and what travels between them."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "images" / "system.svg"
WIDTH, HEIGHT = 760, 520
INK, DATA, WEIGHTS = "#1f2430", "#3b6ea8", "#b3541e"
BOXES = {  # name: (left, top, width, height, fill, second line)
    "controller": (40, 20, 680, 64, "#eceff4", "tickets, policy lag, ledger, metrics"),
    "generator": (40, 190, 180, 84, "#dbe7f5", "embedded, vLLM, SGLang"),
    "logprob": (290, 190, 180, 84, "#dbe7f5", "scores groups"),
    "trainer": (540, 190, 180, 84, "#dbe7f5", "GRPO, FSDP2"),
    "draft adapter": (290, 400, 180, 84, "#f5e3d6", "trains the draft"),
}


def box(name: str) -> str:
    left, top, width, height, fill, note = BOXES[name]
    middle = left + width / 2
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="10" fill="{fill}" stroke="{INK}"/>'
        f'<text x="{middle}" y="{top + height / 2 - 4}" class="name">{name}</text>'
        f'<text x="{middle}" y="{top + height / 2 + 20}" class="note">{note}</text>'
    )


def arrow(points: str, color: str, label: str, x: float, y: float, anchor: str = "middle") -> str:
    kind = "data" if color == DATA else "weights"
    return (
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="3" marker-end="url(#{kind})"/>'
        f'<text x="{x}" y="{y}" class="label" fill="{color}" text-anchor="{anchor}">{label}</text>'
    )


def marker(kind: str, color: str) -> str:
    return (
        f'<marker id="{kind}" markerWidth="10" markerHeight="8" refX="7" refY="4" orient="auto" '
        f'markerUnits="userSpaceOnUse"><path d="M0,0 L9,4 L0,8 Z" fill="{color}"/></marker>'
    )


def drawing() -> str:
    arrows = [
        arrow("130,84 130,186", DATA, "ticket", 140, 140, "start"),
        arrow("220,222 286,222", DATA, "group", 253, 212),
        arrow("470,222 536,222", DATA, "group", 503, 212),
        arrow("630,186 630,88", DATA, "step done", 620, 140, "end"),
        arrow("380,274 380,396", DATA, "supervision", 390, 366, "start"),
        arrow("660,274 660,325 160,325 160,278", WEIGHTS, "policy version v + 1", 550, 350),
        arrow("440,325 440,278", WEIGHTS, "", 0, 0),
        arrow("290,442 100,442 100,278", WEIGHTS, "draft version", 195, 432),
    ]
    style = (
        "text{font-family:Helvetica,Arial,sans-serif}.name{font-size:21px;font-weight:bold;text-anchor:middle;"
        f"fill:{INK}}}.note{{font-size:16px;text-anchor:middle;fill:{INK}}}.label{{font-size:17px}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="The controller sends tickets to generators; groups go through logprob to the trainer; '
        'weights come back by broadcast">'
        f"<style>{style}</style><defs>{marker('data', DATA)}{marker('weights', WEIGHTS)}</defs>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        + "".join(arrows)
        + "".join(map(box, BOXES))
        + f'<text x="500" y="432" class="label" fill="{DATA}">blue: ZeroMQ queues</text>'
        + f'<text x="500" y="460" class="label" fill="{WEIGHTS}">orange: NCCL or gloo</text>'
        + "</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(drawing())
