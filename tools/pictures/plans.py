"""Pictures of plans, computed by the product's planners: windows, versions of experts, uneven batches."""

import numpy as np

from moe_ft.planning.cells import cell_sizes, samples_of
from moe_ft.planning.experts import ExpertLayout
from moe_ft.strategies.partial.selection import advance, select_sequential, select_to_persist
from moe_ft.strategies.sparse.windows import RankUnits, StageUnits, cut_window, fractions_of_layers
from moe_ft.units import parse_unit
from tools.pictures.svg import Drawing

_HIDDEN, _FFN = 1024, 2048
_FULL, _COMPUTE = 12, 2  # bytes per parameter: fp32 masters and two moments; BF16 weights
_TOKENS = np.array([[220, 340, 80, 360], [150, 260, 400, 190]])
_WINDOW, _FIRST = 3, 10
_CELL = 19


def _stage() -> tuple[list[str], list[int], list[str]]:
    """Return the units of a stage in the order of a window, the snapshot of each, and why."""
    expert, other, router = 3 * _HIDDEN * _FFN, 4 * _HIDDEN * _HIDDEN, 4 * _HIDDEN
    sizes: dict[str, int] = {}
    for layer in range(2):
        sizes |= {f"layer.{layer}.expert.{number}": expert for number in range(4)}
        sizes |= {f"layer.{layer}.router": router, f"layer.{layer}.non-expert": other}
    units = {parse_unit(name): (size * _FULL, size * _COMPUTE) for name, size in sizes.items()}
    stage = StageUnits([RankUnits(ep_rank=0, sizes=units)], ["layer.0", "layer.1"])
    order = stage.order(_TOKENS.astype(np.float64))
    groups = cut_window(order.sizes, _WINDOW).groups().tolist()
    shares = fractions_of_layers(_TOKENS.astype(np.float64))
    names = [str(unit) for unit in order.columns[0]]
    why = []
    for name in names:
        parts = name.split(".")
        is_expert = "expert" in parts
        share = shares[int(parts[1])][int(parts[3])] if is_expert else 0
        why.append(f"{share:.0%} of tokens" if is_expert else "")
    return names, groups, why


def draw_sparse_window() -> Drawing:
    """Draw two windows of a stage, a failure in the second one, and the recovery from the first."""
    names, groups, why = _stage()
    drawing = Drawing(
        860,
        610,
        "A sparse window and its replays",
        "Each of three consecutive snapshots holds one group of units "
        "in full and 16-bit weights of the groups "
        "still to come. A recovery restores the first snapshot and "
        "runs iterations again, with fewer frozen "
        "groups each time.",
    )
    left, top, step = 300, 92, 72
    drawing.text(20, 32, "Snapshots: what each one holds of a stage", size=16, bold=True)
    drawing.legend(
        20,
        56,
        [("blue", "full: masters and moments"), ("pale", "16-bit weights"), ("empty", "nothing")],
    )
    for column in range(6):
        is_lost = column == 5
        x = left + column * step + (16 if column >= 3 else 0)
        text = "failure" if is_lost else f"after {_FIRST + column}"
        ink = "red" if is_lost else "soft"
        drawing.text(x + step / 2 - 4, top - 10, text, ink=ink, size=12, anchor="middle")
    for row, (name, group, share) in enumerate(zip(names, groups, why, strict=True)):
        y = top + row * _CELL
        drawing.text(20, y + 13, name, size=12)
        drawing.text(left - 12, y + 13, share, ink="soft", size=11, anchor="end")
        for column in range(5):
            place = column % _WINDOW
            fill = "blue" if place == group else "pale" if place < group else "empty"
            x = left + column * step + (16 if column >= 3 else 0)
            drawing.box(x, y + 1, step - 8, _CELL - 3, fill)
    bottom = top + len(names) * _CELL
    for begin, end, text in ((0, 3, "window 1: complete"), (3, 5, "window 2: not complete")):
        gap = 16 if begin else 0
        x0, x1 = left + begin * step + gap, left + end * step + gap - 8
        drawing.path([(x0, bottom + 4), (x0, bottom + 10), (x1, bottom + 10), (x1, bottom + 4)])
        drawing.text((x0 + x1) / 2, bottom + 26, text, ink="soft", size=12, anchor="middle")
    middle = left + 5 * step + 16 + step / 2 - 4
    drawing.path([(middle, top), (middle, bottom)], "line dashed")
    _draw_replays(drawing, groups, bottom + 70)
    return drawing


def _draw_replays(drawing: Drawing, groups: list[int], top: float) -> None:
    """Draw, by group, what each iteration of a recovery from window 1 does with it."""
    drawing.text(20, top, "Recovery from window 1: which units are trained", size=16, bold=True)
    drawing.legend(
        20,
        top + 24,
        [
            ("green", "trained"),
            ("sand", "frozen, computes with 16-bit weights"),
            ("blue", "put back in full"),
        ],
    )
    columns = [
        ("put back", f"snapshot {_FIRST}"),
        ("run again", "one iteration"),
        ("put back", f"snapshot {_FIRST + 1}"),
        ("run again", "one iteration"),
        ("put back", f"snapshot {_FIRST + 2}"),
        ("train", f"from {_FIRST + 2} on"),
    ]
    width, left, grid = 106, 208, top + 74
    for column, (head, what) in enumerate(columns):
        x = left + column * width + (width - 6) / 2
        drawing.text(x, grid - 24, head, size=12, anchor="middle", bold=True)
        drawing.text(x, grid - 9, what, ink="soft", size=12, anchor="middle")
        place = column // 2
        for group in range(_WINDOW):
            y = grid + group * 34
            is_replay = column % 2 == 1
            if is_replay:
                fill = "green" if group <= place else "sand"
            else:
                fill = "blue" if group == place else "sand" if group > place else "green"
            drawing.box(left + column * width, y, width - 6, 28, fill)
    kinds = ("rare experts", "more popular ones", "the rest")
    for group, kind in enumerate(kinds):
        y = grid + group * 34 + 13
        drawing.text(20, y, f"group {group + 1}: {groups.count(group)} units", size=12)
        drawing.text(20, y + 13, kind, ink="soft", size=11)
    text = (
        "After the last snapshot of the window every unit is complete, and "
        "the state is that of a run without a failure."
    )
    drawing.text(20, grid + 3 * 34 + 20, text, ink="soft", size=12)


def draw_partial_versions() -> Drawing:
    """Draw which experts `partial` saves in each snapshot, and how old the newest version of each is."""
    layout = ExpertLayout(num_layers=2, num_experts=8, ep_size=2)
    k_snapshot, k_persist, last, every = 2, 1, 12, 2
    saved = np.full((2, 8), -1)
    persisted = saved.copy()
    copies: set[tuple[int, int, int]] = set()  # layer, expert, iteration
    written: set[tuple[int, int, int]] = set()
    cursors, writing = layout.first_cursors(k_snapshot), layout.first_cursors(k_persist)
    for iteration in range(1, last + 1):
        for layer, chosen in enumerate(select_sequential(layout, cursors, k_snapshot)):
            saved[layer, list(chosen)] = iteration
            copies |= {(layer, expert, iteration) for expert in chosen}
        cursors = advance(layout, cursors, k_snapshot)
        if iteration % every == 0:
            picked = select_to_persist(layout, writing, saved, persisted, None, k_persist)
            for layer, chosen in enumerate(picked):
                written |= {(layer, expert, int(saved[layer, expert])) for expert in chosen}
                persisted[layer, list(chosen)] = saved[layer, list(chosen)]
            writing = advance(layout, writing, k_persist)
    drawing = Drawing(
        860,
        548,
        "Versions of experts with partial checkpoints",
        "Every snapshot holds two of eight experts of a layer, every "
        "second one sends one more expert to "
        "storage. The newest version of each expert is a few "
        "iterations old in memory and older on storage.",
    )
    _draw_versions(drawing, (copies, written), (saved, persisted), last, every)
    return drawing


def _draw_versions(
    drawing: Drawing,
    events: tuple[set[tuple[int, int, int]], set[tuple[int, int, int]]],
    newest: tuple[np.ndarray, np.ndarray],
    last: int,
    every: int,
) -> None:
    copies, written = events
    left, top, step, height = 170, 112, 36, 21
    drawing.text(20, 32, "Partial checkpoints: two of eight experts at a time", size=16, bold=True)
    drawing.legend(
        20,
        58,
        [
            ("blue", "copied to host memory"),
            ("amber", "this version is also on storage"),
            ("empty", "not saved"),
        ],
    )
    right = left + last * step + 24
    for iteration in range(1, last + 1):
        x = left + (iteration - 1) * step + step / 2 - 2
        drawing.text(x, top - 8, str(iteration), ink="soft", size=12, anchor="middle")
    drawing.text(left - 12, top - 8, "after iteration", ink="soft", size=12, anchor="end")
    drawing.text(right, top - 24, "newest version, age after 12", size=12, bold=True)
    drawing.text(right + 44, top - 8, "memory", ink="soft", size=12, anchor="middle")
    drawing.text(right + 144, top - 8, "storage", ink="soft", size=12, anchor="middle")
    rows: list[tuple[str, int, int]] = [("everything else", -1, -1)]
    rows += [
        (f"layer {layer} expert {expert}", layer, expert)
        for layer in range(2)
        for expert in range(8)
    ]
    for row, (name, layer, expert) in enumerate(rows):
        y = top + row * height + (8 if row else 0) + (8 if row > 8 else 0)
        drawing.text(left - 12, y + 14, name, size=12, anchor="end")
        for iteration in range(1, last + 1):
            x = left + (iteration - 1) * step
            here = (layer, expert, iteration)
            is_copied = layer < 0 or here in copies
            is_written = (layer < 0 and iteration % every == 0) or here in written
            drawing.box(x, y + 1, step - 4, height - 4, "blue" if is_copied else "empty")
            if is_written:
                drawing.box(x + 9, y + 4, step - 22, height - 10, "amber")
        for column, (versions, strong) in enumerate(zip(newest, ("pale", "sand"), strict=True)):
            version = last if layer < 0 else int(versions[layer, expert])
            text = f"{version}: age {last - version}" if version > 0 else f"0: age {last}"
            fill = strong if version > 0 else "rose"
            drawing.label(right + column * 100, y + 1, 88, height - 4, fill, [text], size=12)
    text = (
        "A failure in iteration 13 goes back to 12. Each expert loses as "
        "many iterations of updates as its version is old:"
    )
    drawing.text(20, 520, text, ink="soft", size=12)
    text = (
        "what is in memory where memory survives, else what is on storage. "
        "The lost tokens are counted for each expert."
    )
    drawing.text(20, 537, text, ink="soft", size=12)


def draw_elastic() -> Drawing:
    """Draw the samples of an iteration on four, three and two ranks."""
    batch, micro, step, height = 16, 2, 58, 34
    drawing = Drawing(
        860,
        274,
        "The samples of one iteration on 4, 3 and 2 ranks",
        "Whatever ranks are left, an iteration reads the same samples: a rank reads one cell of each "
        "micro-batch, and cells differ in size by one sample at most.",
    )
    drawing.text(20, 32, f"One iteration of {batch} samples", size=16, bold=True)
    drawing.legend(20, 56, [("blue", "two samples"), ("pale", "one sample")])
    left = 92.0
    for num_ranks, note in ((4, "four nodes"), (3, "one is lost"), (2, "another one is lost")):
        sizes = cell_sizes(batch, micro, num_ranks)
        drawing.text(left, 92, note, size=13, bold=True)
        for number in range(len(sizes)):
            for rank in range(num_ranks):
                samples = samples_of(sizes, 0, number, rank)
                x, y = left + number * step, 104 + rank * height
                fill, ink = ("blue", "on") if len(samples) == micro else ("pale", "ink")
                drawing.box(x, y, step - 6, height - 6, fill)
                text = " ".join(map(str, samples))
                drawing.text(x + step / 2 - 3, y + 19, text, ink=ink, size=12, anchor="middle")
        left += len(sizes) * step + 66
    for rank in range(4):
        drawing.text(20, 104 + rank * height + 19, f"rank {rank}", ink="soft", size=12)
    text = (
        "columns are micro-batches; the loss is a mean over all tokens (--calculate-per-token-loss)"
    )
    drawing.text(20, 262, text, ink="soft", size=12)
    return drawing
