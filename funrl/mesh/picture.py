"""A picture of what moves: every kind of tensor on every rank, with the pieces that arrive and where they come from."""

from __future__ import annotations

from xml.sax.saxutils import escape

from funrl.mesh.buckets import program
from funrl.mesh.mesh import MeshError
from funrl.mesh.plan import Box, Plan, held, volume
from funrl.mesh.rules import Layout

MOST_RANKS = 16
_CELL = 76
_GAP = 14
_LEFT = 170
_TOP = 64


def plan_picture(plan: Plan, leaves: list[int], names: list[str]) -> str:
    """An SVG with a row for each of the leaves and a column for each rank.

    A square is the whole tensor, seen along the two dims that are split. Light: what the rank held and lets go. Dark:
    what it held and keeps. Coloured: what arrives, with the number of the rank that sends it. White: never there.

    Raises:
      MeshError: there are too many ranks for a picture.
    """
    if plan.world > MOST_RANKS:
        raise MeshError(f"a picture shows at most {MOST_RANKS} devices, there are {plan.world}")
    width = _LEFT + plan.world * (_CELL + _GAP)
    height = _TOP + len(leaves) * (_CELL + _GAP) + 10
    shapes = [
        _text(_LEFT + i * (_CELL + _GAP) + _CELL / 2, 52, f"rank {i}", size=13, anchor="middle")
        for i in range(plan.world)
    ]
    shapes.append(
        _text(14, 24, "light: held before, let go; dark: kept; coloured: arrives, from the rank shown", size=13)
    )
    for row, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        y = _TOP + row * (_CELL + _GAP)
        shapes.append(_text(14, y + _CELL / 2, name, size=13))
        shapes.append(_text(14, y + _CELL / 2 + 17, plan.route(leaf).way, size=12, colour="#666"))
        for rank in range(plan.world):
            shapes += _square(plan, leaf, rank, x=_LEFT + rank * (_CELL + _GAP), y=y)
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">\n<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def _square(plan: Plan, leaf: int, rank: int, x: float, y: float) -> list[str]:
    route = plan.route(leaf)
    has = held(plan, rank)[leaf]
    dims = _dims(route.src, route.dst)

    def part(box: Box, fill: str) -> str:
        (top, bottom), (left, right) = (_span(box, dim, route.src.shape) for dim in dims)
        return (
            f'<rect x="{x + left * _CELL:.1f}" y="{y + top * _CELL:.1f}" width="{(right - left) * _CELL:.1f}" '
            f'height="{(bottom - top) * _CELL:.1f}" fill="{fill}" stroke="white" stroke-width="0.8"/>'
        )

    shapes = [part(has.old, "#d4d8de")] if has.old is not None and volume(has.old) else []
    if has.stays is not None:
        shapes.append(part(has.stays, "#5b6573"))
    for step in program(plan, rank, 1 << 60):
        for message in step.receives:
            for _, box in (part for part in message.parts if part.leaf == leaf):
                shapes.append(part(box, f"hsl({message.peer * 360 // plan.world}, 65%, 68%)"))
                (top, bottom), (left, right) = (_span(box, dim, route.src.shape) for dim in dims)
                middle = x + (left + right) / 2 * _CELL, y + (top + bottom) / 2 * _CELL + 4
                shapes.append(_text(*middle, str(message.peer), 11, "middle"))
    shapes.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="none" stroke="#333"/>')
    return shapes


def _dims(src: Layout, dst: Layout) -> tuple[int | None, int | None]:
    """The dims to show downwards and to the right: split dims first, then any."""
    split = [dim for dim in range(len(src.shape)) if src.spec[dim] or dst.spec[dim]]
    chosen = sorted((split + [dim for dim in range(len(src.shape)) if dim not in split])[:2])
    first, second, *_ = [*chosen, None, None]
    return first, second


def _span(box: Box, dim: int | None, shape: tuple[int, ...]) -> tuple[float, float]:
    """The box's begin and end in a dim, from 0 to 1."""
    return (0.0, 1.0) if dim is None else (box[dim][0] / shape[dim], box[dim][1] / shape[dim])


def _text(x: float, y: float, content: str, size: int, anchor: str = "start", colour: str = "#111") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(content)}</text>"
