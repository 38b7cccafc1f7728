"""Page of `moe_ft report --html`: one file, with drawings as inline SVG, that needs no network and no script.

presets/report.html has its text, presets/report.js what moves with the pointer. The drawings have one pixel
for each bucket of time, so that their size does not depend on the length of the log.
"""

import html
import math
import re
import struct
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

from markupsafe import Markup

from moe_ft.commands.pages import LEFT, ROW, fill_page, html_table, key_of_colours, label, svg
from moe_ft.commands.report_run import ReportedRun
from moe_ft.commands.report_sums import MOST_ENDS, NUM_BUCKETS, Frame, JobHistory, TimelineRow
from moe_ft.config.fields import size_text
from moe_ft.event_lines import Mark, SnapshotTier
from moe_ft.loop.event_fold import TierMoves
from moe_ft.planning.time_shares import Spent, TimeShares

Cells = tuple[Sequence[str], Sequence[Sequence[object]]]  # headers, and rows
_MOST_LAYERS = 8
_MOST_EVENTS = 500  # recoveries and repairs, of which the last ones are shown
_CHART_ROWS = 7
_LEVELS = 4  # of opacity
_TIMES = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)
_MEANINGS = {
    SnapshotTier.MEMORY: "snapshot in host memory",
    SnapshotTier.PEERS: "sent to peers",
    SnapshotTier.STORAGE: "written to storage",
    Mark.FAULT: "fault",
    Mark.REPAIR: "repaired in place",
    Mark.RECOVERY: "recovered",
    Mark.TROUBLE: "degraded or skipped",
}
# By kind: corners of the symbol, from its middle.
_SYMBOLS = {
    Mark.FAULT: "-4,-5 0,-1 4,-5 5,-4 1,0 5,4 4,5 0,1 -4,5 -5,4 -1,0 -5,-4",
    Mark.REPAIR: "0,-5 5,0 0,5 -5,0",
    Mark.RECOVERY: "-4,-5 5,0 -4,5",
    Mark.TROUBLE: "-3,-3 3,-3 3,3 -3,3",
}
# Colours of loads by log2 of their share of the mean, from a quarter of it to four times; the mean has none.
_LOW, _HIGH, _STEPS = (55, 126, 184), (217, 95, 2), 8


def as_html(run: ReportedRun, tables: Mapping[str, Cells]) -> str:
    """Return the report as a page; it has the tables of the text, and those in it have the same numbers."""
    total = run.total
    peak = max(each.peak_bytes for each in run.folds.values())
    return fill_page(
        "report.html",
        facts=html_table(*tables["facts"]),
        shares=_draw_shares(run.shares),
        share_table=html_table(
            ("time", "share"),
            [*((use, f"{run.shares[use]:.2%}") for use in Spent), ("all", "100.00%")],
        ),
        uses=key_of_colours([*Spent]),
        keys=[(kind, _MEANINGS[kind]) for kind in (*SnapshotTier, *Mark)],
        timeline=_draw_timeline(run.rows, run.frame),
        sampled=run.frame.every,
        loss=_draw_loss(run.history, run.frame),
        tiers=html_table(
            ("to", "times", "bytes", "an iteration", "mean s", "longest s", "bytes/s"),
            [*_tier_rows(run.tiers, run.num_iterations)],
        ),
        traffic=_draw_curves(
            {
                tier: [*accumulate(total.moved[tier])]
                for tier in SnapshotTier
                if tier in total.moved
            },
            run.frame,
        ),
        read=", ".join(f"{size_text(num)} from {tier}" for tier, num in run.read_bytes.items()),
        recoveries=_event_table(tables, "recoveries"),
        repairs=_event_table(tables, "repairs"),
        lost=_draw_lost(run.history),
        loads=[*_draw_loads(total)],
        num_layers=len({layer for layers in total.loads.values() for layer in layers}),
        memory=_draw_curves(
            {kind: total.memory[kind] for kind in ("resident", "device")}, run.frame
        ),
        peak=size_text(peak) if peak else "",
        ranks=html_table(*tables["ranks"]),
        left_out=run.left_out,
    )


def _event_table(tables: Mapping[str, Cells], name: str) -> Markup:
    headers, rows = tables.get(name, ((), ()))
    return html_table(headers, rows[-_MOST_EVENTS:]) if rows else Markup()


def _path(kind: str, moves: str, **attributes: object) -> str:
    words = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<path class="{kind}"{words} d="{moves}"/>' if moves else ""


def _level(share: float) -> int:
    """Return a share in quarters, 1 for any that is seen at all."""
    return min(_LEVELS, math.ceil(_LEVELS * share)) if share > 1e-3 else 0


def _height(share: float) -> int:
    """Return how many of 10 pixels a share takes, 1 for any above half a percent."""
    return min(10, math.ceil(10 * share)) if share > 0.005 else 0


def _band(kinds: Sequence[str | None], levels: Sequence[int], y: float, height: float) -> str:
    """Return rectangles over equal buckets: one path for each kind and level."""
    moves: dict[tuple[str, int], list[str]] = defaultdict(list)
    x = LEFT
    for (kind, level), same in groupby(zip(kinds, levels, strict=True)):
        width = len([*same])
        if kind is not None and level:
            moves[kind, level].append(f"M{x} {y}h{width}v{height}h-{width}z")
        x += width
    return "".join(
        _path(kind, "".join(steps), fill_opacity=0.3 + 0.7 * level / _LEVELS)
        for (kind, level), steps in moves.items()
    )


def _draw_shares(shares: TimeShares) -> Markup:
    """Return one bar whose parts are the shares of the time."""
    x, parts = 0.0, []
    for use in Spent:
        width = 760 * shares[use]
        text = f"{use} {shares[use]:.2%}"
        parts.append(
            f'<rect class="{use}" x="{x:.2f}" y="4" width="{width:.2f}" height="20">'
            f"<title>{text}</title></rect>"
        )
        x += width
    return svg(1, "".join(parts), aria_label="where the time went")


def _draw_timeline(rows: Sequence[TimelineRow], frame: Frame) -> Markup:
    """Return the rows: training above, checkpoints under it, marks on both."""
    parts = [_time_axis(frame, len(rows))]
    for number, row in enumerate(rows):
        parts.append(label(0, number, row.name if len(row.name) < 34 else f"{row.name[:33]}…"))
        parts.append(_draw_row(row, ROW * number))
    names = "\n".join(row.name for row in rows)
    return svg(
        len(rows) + 1,
        "".join(parts),
        aria_label="timeline of ranks",
        data_rows=names,
        **_of_time(frame),
    )


def _of_time(frame: Frame) -> dict[str, str]:
    return {"data_from": "0", "data_to": f"{NUM_BUCKETS * frame.bucket_s:.6g}", "data_unit": "s"}


def _draw_row(row: TimelineRow, top: int) -> str:
    num, parts = max(1, len(row.ranks)), []
    shown = [use for use in Spent if use in row.busy and use is not Spent.BLOCKED]
    main = [
        max(((row.busy[use][bucket], use) for use in shown), default=(0.0, None))
        for bucket in range(NUM_BUCKETS)
    ]
    kinds = [use for _, use in main]
    parts.append(_band(kinds, [_level(each / num) for each, _ in main], top + 3, 10))
    if Spent.BLOCKED in row.busy:
        heights = [_height(each / num) for each in row.busy[Spent.BLOCKED]]
        for height in sorted({*heights} - {0}):
            stalls = [Spent.BLOCKED if each == height else None for each in heights]
            parts.append(_band(stalls, [_LEVELS] * NUM_BUCKETS, top + 13 - height, height))
    for lane, tier in enumerate(SnapshotTier):
        if tier in row.busy:
            levels = [_level(each / num) for each in row.busy[tier]]
            parts.append(_band([tier] * NUM_BUCKETS, levels, top + 15 + 3 * lane, 2))
    if len(row.ends) <= MOST_ENDS:
        parts.append(_path("end", "".join(f"M{LEFT + at:.1f} {top + 3}v10" for at in row.ends)))
    for (bucket, mark), (count, text) in sorted(
        row.marks.items(), key=lambda each: -_ORDER[each[0][1]]
    ):
        more = f" and {count - 1} more" if count > 1 else ""
        parts.append(
            f'<polygon class="{mark}" transform="translate({LEFT + bucket},{top + 8})" '
            f'points="{_SYMBOLS[mark]}"><title>{_text(text + more)}</title></polygon>'
        )
    return "".join(parts)


_ORDER = {mark: number for number, mark in enumerate(Mark)}


def _text(text: str) -> str:
    """Return text as XML can hold it."""
    return html.escape(re.sub(r"[\x00-\x1f\ufffe\uffff]", " ", text))


def _soft(x: float, y: float, text: str) -> str:
    """Return the name of a place on an axis, which stays inside at its end."""
    anchor = ' text-anchor="end"' if x > LEFT + NUM_BUCKETS - 30 else ""
    return f'<text class="soft" x="{x:.1f}" y="{y:.0f}"{anchor}>{_text(text)}</text>'


def _time_axis(frame: Frame, rows: float) -> str:
    """Return lines at round times, with their seconds, minutes or hours below."""
    span_s = NUM_BUCKETS * frame.bucket_s
    step = next((each for each in _TIMES if span_s / each <= 8), span_s / 8)
    unit, name = (3600, "h") if step >= 3600 else (60, "min") if step >= 60 else (1, "s")
    parts = []
    for number in range(int(span_s / step) + 1):
        x = LEFT + number * step / frame.bucket_s
        parts.append(f'<path class="grid" d="M{x:.1f} 0v{ROW * rows:.0f}"/>')
        parts.append(_soft(x, ROW * rows + 16, f"{number * step / unit:g} {name}"))
    return "".join(parts)


def _curve(kind: str, points: Iterable[tuple[float, float]], low: float, high: float) -> str:
    """Return a line through values in a chart; a value that is no number breaks it."""
    height, moves, is_down = ROW * _CHART_ROWS - 12, [], False
    scale = height / (high - low) if high > low else 0.0
    for x, value in points:
        if not math.isfinite(value):
            is_down = False
            continue
        moves.append(f"{'L' if is_down else 'M'}{x:.1f} {6 + (high - value) * scale:.1f}")
        is_down = True
    return _path(f"curve {kind}", "".join(moves))


def _draw_curves(series: Mapping[str, Sequence[float]], frame: Frame) -> Markup:
    """Return curves over time with their last values; buckets before the first value are left out."""
    high = max((max(values, default=0.0) for values in series.values()), default=0.0)
    if not high:
        return Markup()
    parts = [
        _time_axis(frame, _CHART_ROWS),
        label(0, 0, size_text(int(high))),
        label(0, _CHART_ROWS - 1, "0"),
    ]
    for row, (kind, values) in enumerate(series.items(), 1):
        if any(values):
            parts.append(
                f'<g class="text {kind}">{label(0, row + 1, f"{kind}: {size_text(int(max(values)))}")}</g>'
            )
            points = [(LEFT + bucket, each) for bucket, each in enumerate(values) if each]
            parts.append(_curve(kind, points, 0.0, high))
    return svg(_CHART_ROWS + 1, "".join(parts), aria_label="bytes over time", **_of_time(frame))


def _draw_loss(history: JobHistory, frame: Frame) -> Markup:
    """Return the mean of the loss, with the range where a point has several, and the recoveries."""
    points = [point for _, point in sorted(history.points.items())]
    finite = [each for point in points for each in (point.low, point.high) if math.isfinite(each)]
    if not finite:
        return Markup()
    low, high, last = min(finite), max(finite), max(1, frame.last_iteration)
    height = ROW * _CHART_ROWS

    def x(iteration: float) -> float:
        return LEFT + NUM_BUCKETS * min(1.0, iteration / last)

    parts = [label(0, 0, f"{high:.3f}"), label(0, _CHART_ROWS - 1, f"{low:.3f}")]
    parts += [
        _curve("range", ((x(each.iteration), each.low) for each in points), low, high),
        _curve("range", ((x(each.iteration), each.high) for each in points), low, high),
        _curve("loss", ((x(each.iteration), each.mean) for each in points), low, high),
    ]
    for event in (each.event for each in history.recoveries[-_MOST_EVENTS:]):
        at, lost = x(event.target_iteration), f"{event.lost_tokens:,} tokens lost"
        text = (
            f"start {event.incarnation} continues from iteration {event.target_iteration}; {lost}"
        )
        parts.append(
            f'<path class="recovered" d="M{at:.1f} 0v{height}"><title>{_text(text)}</title></path>'
        )
    parts.append(_soft(LEFT, height + 16, "0"))
    parts.append(_soft(LEFT + NUM_BUCKETS, height + 16, f"iteration {last:,}"))
    return svg(
        _CHART_ROWS + 1,
        "".join(parts),
        aria_label="loss by iteration",
        data_from="0",
        data_to=f"{last}",
        data_unit="iteration",
    )


def _tier_rows(
    tiers: Mapping[SnapshotTier, TierMoves], num_iterations: int
) -> Iterator[Sequence[str]]:
    for tier in SnapshotTier:
        if tier in tiers:
            found = tiers[tier]
            rate = f"{size_text(int(found.num_bytes / found.seconds))}/s" if found.seconds else "-"
            yield (
                _MEANINGS[tier],
                f"{found.num:,}",
                size_text(found.num_bytes),
                size_text(found.num_bytes // max(1, num_iterations)),
                f"{found.seconds / found.num:.3f}",
                f"{found.longest_s:.3f}",
                rate,
            )


def _draw_loads(total: TimelineRow) -> Iterator[tuple[str, Markup]]:
    """Yield name and heat map of some layers: experts downwards, iterations to the right."""
    iterations = sorted(total.loads)
    layers = sorted({layer for layers in total.loads.values() for layer in layers}, key=_in_order)
    step = max(1, math.ceil(len(layers) / _MOST_LAYERS))
    for layer in layers[::step]:
        columns = [total.loads[each].get(layer, []) for each in iterations]
        num_experts = max(map(len, columns))
        if not num_experts:
            continue
        means = [sum(tokens) / num_experts for tokens in columns]
        rows = [
            bytes(
                _shade(tokens[expert] / mean if mean else 1.0) if expert < len(tokens) else _STEPS
                for tokens, mean in zip(columns, means, strict=True)
            )
            for expert in range(num_experts)
        ]
        saved = [total.saved.get(each, {}).get(layer, []) for each in iterations]
        marks = [
            (column, expert)
            for column, experts in enumerate(saved)
            for expert in experts
            if len(experts) < num_experts  # else nothing is selected
        ]
        yield (
            layer,
            _draw_map(
                rows,
                marks,
                f"load of {layer}",
                [f"expert {expert}" for expert in range(num_experts)],
                (iterations[0], iterations[-1]),
            ),
        )


def _in_order(layer: str) -> tuple[str, int]:
    block, _, number = layer.partition(".")
    return block, int(number) if number.isdigit() else -1


def _shade(ratio: float) -> int:
    """Return the number of the colour of a load as a multiple of the mean."""
    power = math.log2(ratio) if ratio > 0 else -2.0
    return _STEPS + round(_STEPS * max(-2.0, min(2.0, power)) / 2)


def _draw_lost(history: JobHistory) -> Markup:
    """Return a map of the tokens that the last lossy recovery cost, layer by layer."""
    events = (each.event for each in reversed(history.recoveries))
    found = next((each for each in events if each.lost_tokens), None)
    if found is None or not found.lost_per_expert:
        return Markup()
    layers = sorted(found.lost_per_expert, key=_in_order)
    values = [found.lost_per_expert[layer] for layer in layers]
    most = max(map(max, values)) or 1
    width = max(map(len, values))
    rows = [
        bytes(_STEPS + math.ceil(_STEPS * each / most) for each in row).ljust(
            width, bytes([_STEPS])
        )
        for row in values
    ]
    return _draw_map(
        rows, [], "lost tokens by expert", layers, (0, width - 1), unit="expert", most=f"{most:,}"
    )


def _draw_map(
    rows: Sequence[bytes],
    marks: Sequence[tuple[int, int]],
    name: str,
    row_names: Sequence[str],
    span: tuple[int, int],
    *,
    unit: str = "iteration",
    most: str = "",
) -> Markup:
    """Return a map of colours as a small image, stretched, with a dot at each mark."""
    width, row_height = NUM_BUCKETS / len(rows[0]), max(2.0, min(16.0, 256 / len(rows)))
    height = row_height * len(rows)
    place = (
        f'x="{LEFT}" y="0" width="{NUM_BUCKETS}" height="{height:.0f}" preserveAspectRatio="none"'
    )
    parts = [f'<image {place} href="data:image/png;base64,{_png(rows)}"/>']
    if width > 3 and row_height > 3:
        size = min(4.0, width / 2, row_height / 2)
        dots = (
            f"M{LEFT + (column + 0.5) * width - size / 2:.1f} {(row + 0.5) * row_height - size / 2:.1f}"
            f"h{size:.1f}v{size:.1f}h-{size:.1f}z"
            for column, row in marks
        )
        parts.append(_path("saved", "".join(dots)))
    parts += [label(0, 0, row_names[0]), label(0, height / ROW - 1, row_names[-1])]
    parts.append(label(0, height / ROW / 2 - 0.5, f"strongest: {most}") if most else "")
    y = height + 18
    parts.append(_soft(LEFT, y, f"{unit} {span[0]:,}"))
    parts.append(_soft(LEFT + NUM_BUCKETS, y, f"{span[1]:,}"))
    return svg(
        height / ROW + 1,
        "".join(parts),
        aria_label=name,
        data_rows="\n".join(row_names),
        data_row=f"{row_height:.4g}",
        data_from=f"{span[0]}",
        data_to=f"{span[1]}",
        data_unit=unit,
    )


def _png(rows: Sequence[bytes]) -> str:
    """Return an image of one byte for a pixel as PNG in base 64: numbers of colours, the middle one clear."""
    colours = [_LOW] * _STEPS + [_HIGH] * (_STEPS + 1)
    alphas = bytes(abs(number - _STEPS) * 255 // _STEPS for number in range(2 * _STEPS + 1))
    pixels = b"".join(b"\0" + row for row in rows)  # each row has no filter
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(map(bytes, colours))),
        (b"tRNS", alphas),
        (b"IDAT", zlib.compress(pixels, 9)),
        (b"IEND", b""),
    )
    return b64encode(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    ).decode()
