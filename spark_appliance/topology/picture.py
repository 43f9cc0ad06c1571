"""Draw a cluster's cabling: as SVG for a wall, as text for a terminal."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from spark_appliance.model.plan import CablePlan
from spark_appliance.topology.drawing import Drawing, DrawnNode
from spark_appliance.topology.hardware import CAGES

_WIDTH: Final = 330
_HEAD: Final = 50
_CAGE: Final = 58
_GAP: Final = 150
_MARGIN: Final = 40
_BEND: Final = 90
_COLOURS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#7f7f7f",
    "#444444",
)
"""Okabe-Ito colours, told apart by colour-blind readers too."""


@dataclass(frozen=True, slots=True)
class _Box:
    node: DrawnNode
    x: float
    y: float

    @property
    def height(self) -> float:
        return _HEAD + _CAGE * len(CAGES)

    @property
    def middle(self) -> float:
        return self.x + _WIDTH / 2

    def anchor(self, cage: str, *, right: bool) -> tuple[float, float]:
        """Return where a cable leaves: the right or left end of the cage's row."""
        row = list(CAGES).index(cage) if cage in CAGES else 0
        return self.x + (_WIDTH if right else 0), self.y + _HEAD + _CAGE * row + _CAGE / 2


def svg(drawing: Drawing) -> str:
    """Return an SVG document with cages, cables, interface names, addresses and ranks."""
    boxes = {box.node.name: box for box in _place(drawing)}
    switch = any(cable.b is None for cable in drawing.topology.cables)
    width = max(box.x + _WIDTH for box in boxes.values()) + _side(drawing)
    height = max(box.y + box.height for box in boxes.values()) + _MARGIN + 30
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="DejaVu Sans, sans-serif" '
            'font-size="12">'
        ),
        f"<title>{escape(drawing.name)}: {drawing.topology.kind} of {len(drawing.nodes)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    if switch:
        lines += _switch(width)
    for box in boxes.values():
        lines += _box(drawing, box)
    for number, cable in enumerate(drawing.topology.cables):
        lines += _cable(drawing, boxes, cable, number, width)
    lines.append(
        f'<text x="{_MARGIN}" y="{height - 14:g}" fill="#444444">{escape(_caption(drawing))}</text>'
    )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def text(drawing: Drawing) -> str:
    """Return the same for a terminal: one line a cable, then one line a rail."""
    lines = [_caption(drawing), ""]
    for number, cable in enumerate(drawing.topology.cables, 1):
        other = "switch" if cable.b is None else f"{cable.b.node} {cable.b.cage}"
        left = f"{cable.a.node} {cable.a.cage}"
        lines.append(f"  cable {number}: {left} ────────── {other}")
    if not drawing.topology.cables:
        lines.append("  no cables")
    for node in drawing.nodes:
        lines += ["", f"  {node.name}  rank {node.rank} ({node.role})  {node.address}"]
        for cage in CAGES.values():
            rails = [rail for rail in node.rails if rail.cage == cage.name]
            state = "" if rails else "  (free)"
            lines.append(f"    {cage.name}, {cage.position}{state}")
            for rail in rails:
                peers = ", ".join(f"{peer.node} {peer.address}" for peer in rail.peers)
                lines.append(
                    f"      {rail.netdev:<14} {rail.rdma:<14} {rail.address:<18} → {peers}"
                )
    return "\n".join(lines) + "\n"


def _caption(drawing: Drawing) -> str:
    kind = drawing.topology.kind
    mtu = f", MTU {drawing.topology.mtu}" if drawing.topology.cables else ""
    return f"{drawing.name}: {kind} of {len(drawing.nodes)}, TP {len(drawing.nodes)}{mtu}"


def _place(drawing: Drawing) -> Iterator[_Box]:
    """Put the nodes where their cables are short: a triangle, a square, or rows below a switch."""
    step_x, step_y = _WIDTH + _GAP, _HEAD + _CAGE * 2 + 90
    kind = drawing.topology.kind
    top = _MARGIN
    if kind == "triangle":
        cells = [(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)]
    elif kind == "ring":
        cells = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    elif kind == "switch":
        top += 110
        columns = min(len(drawing.nodes), 4)
        cells = [(i % columns * 0.85, float(i // columns)) for i in range(len(drawing.nodes))]
    else:
        cells = [(float(i), 0.0) for i in range(len(drawing.nodes))]
    for node, (x, y) in zip(drawing.nodes, cells, strict=True):
        yield _Box(node, _side(drawing) + x * step_x, top + y * step_y)


def _side(drawing: Drawing) -> int:
    """Return the margin left and right; cables between rows run through it."""
    return _MARGIN + 80 if drawing.topology.kind in ("triangle", "ring") else _MARGIN


def _box(drawing: Drawing, box: _Box) -> Iterator[str]:
    node = box.node
    yield (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{_WIDTH}" height="{box.height:g}" rx="8" '
        'fill="#f7f7f7" stroke="#333333"/>'
    )
    yield (
        f'<text x="{box.x + 12:g}" y="{box.y + 21:g}" font-size="15" font-weight="bold">'
        f"{escape(node.name)}</text>"
    )
    yield (
        f'<text x="{box.x + _WIDTH - 12:g}" y="{box.y + 21:g}" text-anchor="end">'
        f"rank {node.rank} · {node.role}</text>"
    )
    yield (
        f'<text x="{box.x + 12:g}" y="{box.y + 39:g}" fill="#444444">'
        f"{escape(node.lan_interface)} {escape(node.address)}</text>"
    )
    for row, cage in enumerate(CAGES.values()):
        y = box.y + _HEAD + _CAGE * row
        rails = [rail for rail in node.rails if rail.cage == cage.name]
        colour = _colour(drawing, node.name, cage.name)
        yield (
            f'<rect x="{box.x + 8:g}" y="{y:g}" width="{_WIDTH - 16}" height="{_CAGE - 6}" rx="4" '
            f'fill="#ffffff" stroke="{colour or "#bbbbbb"}" stroke-width="{2 if rails else 1}"/>'
        )
        yield (
            f'<text x="{box.x + 16:g}" y="{y + 16:g}" font-weight="bold">{cage.name}'
            f'<tspan font-weight="normal" fill="#666666"> {cage.position}'
            f"{'' if rails else ' · free'}</tspan></text>"
        )
        for index, rail in enumerate(rails):
            yield (
                f'<text x="{box.x + 16:g}" y="{y + 31 + 15 * index:g}" font-size="11" '
                f'font-family="DejaVu Sans Mono, monospace">{escape(rail.netdev):<14} '
                f"{escape(rail.address)}</text>"
            )


def _cable(
    drawing: Drawing, boxes: dict[str, _Box], cable: CablePlan, number: int, width: float
) -> Iterator[str]:
    first = boxes[cable.a.node]
    colour = _COLOURS[number % len(_COLOURS)]
    if cable.b is None:
        # up the side of the box, so that a second row does not cross the first
        x, y = first.anchor(cable.a.cage, right=False)
        path = f"M {x:g} {y:g} H {x - 14 - 4 * (number // 4):g} V {_MARGIN + 50}"
        label = (x + 40, first.y - 10)
    else:
        second = boxes[cable.b.node]
        if first.y == second.y:
            right_1, right_2 = first.x < second.x, second.x < first.x
        else:
            # between rows: around the outside, where no box is in the way
            lower = max(first, second, key=lambda box: (box.y, box.x))
            right_1 = right_2 = lower.middle >= width / 2
        x1, y1 = first.anchor(cable.a.cage, right=right_1)
        x2, y2 = second.anchor(cable.b.cage, right=right_2)
        out_1, out_2 = x1 + (_BEND if right_1 else -_BEND), x2 + (_BEND if right_2 else -_BEND)
        if right_1 == right_2:
            out_1 = out_2 = max(out_1, out_2) if right_1 else min(out_1, out_2)
        path = f"M {x1:g} {y1:g} C {out_1:g} {y1:g} {out_2:g} {y2:g} {x2:g} {y2:g}"
        # the point of a cubic curve half-way along
        label = ((x1 + x2 + 3 * (out_1 + out_2)) / 8, (y1 + y2) / 2)
    yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="4"/>'
    words = [f"cable {number + 1}", *_subnets(drawing, cable)]
    half = max(map(len, words)) * 3.6 + 4
    x, y = min(max(label[0], half + 4), width - half - 4), label[1]
    top = y - 7.5 * len(words)
    yield (
        f'<rect x="{x - half:g}" y="{top:g}" width="{2 * half:g}" '
        f'height="{15 * len(words)}" rx="3" fill="#ffffff"/>'
    )
    for line, word in enumerate(words):
        yield (
            f'<text x="{x:g}" y="{top + 12 + 15 * line:g}" text-anchor="middle" '
            f'fill="{colour}" font-size="11">{escape(word)}</text>'
        )


def _subnets(drawing: Drawing, cable: CablePlan) -> list[str]:
    """Return the subnets of a direct cable, one a twin."""
    if cable.b is None:
        return []
    rails = [
        rail
        for node in drawing.nodes
        for rail in node.rails
        if (node.name, rail.cage) == (cable.a.node, cable.a.cage)
    ]
    return [str(ipaddress.IPv4Interface(rail.address).network) for rail in rails]


def _colour(drawing: Drawing, node: str, cage: str) -> str | None:
    for number, cable in enumerate(drawing.topology.cables):
        for end in (cable.a, cable.b):
            if end is not None and (end.node, end.cage) == (node, cage):
                return _COLOURS[number % len(_COLOURS)]
    return None


def _switch(width: float) -> Iterator[str]:
    yield (
        f'<rect x="{_MARGIN - 20}" y="{_MARGIN}" width="{width - 2 * _MARGIN + 20:g}" height="50" '
        'rx="8" fill="#e8e8e8" stroke="#333333"/>'
    )
    yield (
        f'<text x="{width / 2:g}" y="{_MARGIN + 30}" text-anchor="middle" font-size="15" '
        'font-weight="bold">switch (one bridge, 200G, autoneg off)</text>'
    )
