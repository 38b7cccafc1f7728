"""Pictures of how things are arranged: processes of a node, ways to recover, layers of the code."""

from moe_ft.planning.host_memory import num_regions
from moe_ft.planning.slot_tables import balanced
from tools.pictures.svg import Drawing

_FULL = 12  # bytes of a parameter with `dense`: fp32 masters and two moments


def draw_processes() -> Drawing:
    """Draw the processes of a node, what they do with the state, and where its bytes lie."""
    drawing = Drawing(
        860,
        520,
        "Processes and bytes of a node",
        "A launcher starts one agent, whose fork server forks the ranks. A rank copies its state "
        "to memory of the node and sends it to another node; a "
        "writer process brings it to storage.",
    )
    drawing.text(20, 32, "Processes and bytes of a node", size=16, bold=True)
    drawing.box(20, 50, 610, 396, "panel", radius=8)
    drawing.text(34, 72, "node", ink="soft", size=12)
    drawing.label(40, 86, 120, 44, "empty", ["launcher", "srun, torchrun"], size=12)
    drawing.label(216, 86, 160, 44, "empty", ["moe_ft keep", "the agent, one a node"], size=11)
    server = ["fork server, one a node", "has imported everything"]
    drawing.label(432, 86, 180, 44, "violet", server, ink="on", size=12)
    drawing.arrow((160, 108), (216, 108))
    drawing.arrow((376, 108), (432, 108))
    drawing.text(166, 100, "starts", ink="soft", size=11)
    drawing.text(384, 100, "asks", ink="soft", size=11)
    drawing.arrow((522, 130), (522, 168))
    drawing.text(530, 153, "forks", ink="soft", size=11)
    _draw_rank(drawing)
    _draw_host_memory(drawing)
    writer = ["writer process", "one a node, low", "priority"]
    drawing.label(478, 340, 134, 60, "violet", writer, ink="on", size=12)
    drawing.arrow((256, 260), (256, 318))
    drawing.text(264, 301, "copy: forward and backward run meanwhile", ink="soft", size=11)
    drawing.arrow((440, 370), (478, 370))
    drawing.label(690, 168, 150, 108, "pale", ["another node", "host memory:", "replicas"], size=12)
    drawing.arrow((596, 230), (690, 230))
    drawing.text(640, 222, "TCP", ink="soft", size=11)
    drawing.label(690, 340, 150, 60, "amber", ["storage", "files, manifest"], ink="dark", size=12)
    drawing.arrow((612, 370), (690, 370))
    text = (
        "Bytes are those of the strategy `dense` with Adam: fp32 masters and "
        "two moments, 12 bytes per parameter and copy."
    )
    drawing.text(20, 474, text, ink="soft", size=12)
    text = "Without `moe_ft keep` the launcher starts the ranks itself, torchrun or srun."
    drawing.text(20, 494, text, ink="soft", size=12)
    return drawing


def _draw_rank(drawing: Drawing) -> None:
    """Draw the threads of a rank."""
    drawing.box(40, 168, 572, 108, "mint", radius=6)
    drawing.text(54, 188, "rank: one process for each GPU", size=12, bold=True)
    threads = [
        ("training thread", "Megatron's loop"),
        ("copy worker", "copies, commits"),
        ("peer server", "takes replicas"),
        ("sending worker", "to peers"),
    ]
    for index, (name, does) in enumerate(threads):
        drawing.label(54 + index * 138, 200, 128, 60, "green", [name, does], ink="on", size=12)


def _draw_host_memory(drawing: Drawing) -> None:
    """Draw what lies in host memory, and how many bytes each of it takes."""
    drawing.box(40, 318, 400, 114, "pale", radius=6)
    drawing.text(54, 338, "host memory (tmpfs): outlives the processes", size=12, bold=True)
    own = num_regions(persists=False) * _FULL
    more = num_regions(persists=True) * _FULL
    rows = [
        ("own regions", f"{own} bytes per parameter, {more} with storage"),
        ("a replica for each peer", f"{_FULL} bytes where there are two, else {2 * _FULL}"),
        ("breakpoint", f"{_FULL} bytes, with --moe-ft-breakpoints"),
        ("boundary log", "what the rank sends to other stages"),
    ]
    for row, (name, size) in enumerate(rows):
        y = 360 + row * 19
        drawing.text(54, y, name, size=12)
        drawing.text(196, y, size, ink="soft", size=11)


_QUESTIONS: list[tuple[str, str, list[str], str, str]] = [
    (
        "Can this death be repaired in place?",
        "--moe-ft-repair auto, the ranks are in an iteration",
        ["repair", "only the dead rank gets a new process"],
        "violet",
        "no: the launcher starts all ranks again",
    ),
    (
        "Do all ranks have the newest iteration?",
        "breakpoints (--moe-ft-breakpoints), or snapshots of it",
        ["continue", "nothing runs again"],
        "green",
        "no",
    ),
    (
        "Did only some stages lose it?",
        "--moe-ft-upstream-log: the others logged what they sent",
        ["local recovery", "only those stages run iterations again"],
        "green",
        "no",
    ),
    (
        "Is the newest window in the nodes' own memory?",
        "processes died, the nodes are the same",
        ["own memory", "iterations since that window run again"],
        "blue",
        "no, or damaged",
    ),
    (
        "Do peers have replicas of what is missing?",
        "a node is lost",
        ["memory of peers", "the same, read over the network"],
        "blue",
        "no, or damaged",
    ),
    (
        "Does storage have a checkpoint?",
        "--moe-ft-persist-dir; all nodes are lost",
        ["storage", "iterations since that checkpoint"],
        "amber",
        "no, or damaged: older ones in the same order",
    ),
    (
        "Was any state ever complete?",
        "",
        ["refused", "a message names every reason and the flag"],
        "red",
        "no",
    ),
]


def draw_ladder() -> Drawing:
    """Draw the questions that decide how a failure is recovered."""
    step, top, left, width = 84, 96, 20, 400
    drawing = Drawing(
        860,
        top + step * len(_QUESTIONS) + 74,
        "Recovery as a ladder of decisions",
        "Seven questions, from the cheapest recovery to the dearest: "
        "repair, breakpoints, local recovery, own "
        "memory, peers, storage, and a refusal if state exists that cannot be used.",
    )
    drawing.text(20, 32, "What happens after a failure", size=16, bold=True)
    drawing.label(left, 48, width, 30, "rose", ["a rank dies or hangs, or a node is lost"])
    drawing.arrow((left + 60, 78), (left + 60, top))
    for row, (question, when, answer, fill, otherwise) in enumerate(_QUESTIONS):
        y = top + row * step
        drawing.box(left, y, width, 54, "panel", radius=6)
        drawing.text(left + 14, y + (23 if when else 32), question, bold=True)
        drawing.text(left + 14, y + 42, when, ink="soft", size=12)
        drawing.arrow((left + width, y + 27), (left + width + 70, y + 27))
        drawing.text(left + width + 20, y + 20, "yes", ink="soft", size=12)
        ink = "dark" if fill == "amber" else "on"
        drawing.label(left + width + 70, y + 2, 350, 50, fill, answer, ink=ink)
        drawing.arrow((left + 60, y + 54), (left + 60, y + step))
        drawing.text(left + 72, y + 73, otherwise, ink="soft", size=12)
    y = top + len(_QUESTIONS) * step
    drawing.label(
        left, y, width, 34, "empty", ["the run begins, from --load or from the beginning"]
    )
    text = (
        "Every byte is verified before anything is overwritten. A "
        "repair looks for state in the same order."
    )
    drawing.text(20, y + 60, text, ink="soft", size=12)
    return drawing


_LAYERS: list[tuple[list[tuple[str, str]], str]] = [
    ([("pretrain_gpt_moe.py", "or your script, under moe_ft run")], "mint"),
    (
        [
            ("megatron/fault_tolerance", "seams, repair, degraded, custom, launch, program, cpu"),
            ("stock Megatron-LM", "an unmodified dependency"),
        ],
        "green",
    ),
    (
        [
            ("moe_ft/commands", "plan, report, doctor, ..."),
            ("moe_ft/convert", ""),
            ("moe_ft/doctor", ""),
            ("moe_ft/simulate", ""),
        ],
        "sand",
    ),
    (
        [
            ("moe_ft/loop", "a training loop as we see it"),
            ("moe_ft/cluster", "forked ranks, rounds of repairs"),
        ],
        "pale",
    ),
    ([("moe_ft/recovery", "one start: find state, restore it, protect it")], "blue"),
    ([("moe_ft/engine", "moves bytes while training runs")], "blue"),
    (
        [
            ("moe_ft/strategies", "what a snapshot holds"),
            ("moe_ft/state", "Megatron's objects"),
            ("moe_ft/store", "memory, extents"),
            ("moe_ft/files", "files, storage"),
        ],
        "violet",
    ),
    (
        [
            ("moe_ft/planning", "numbers in, plans out"),
            ("moe_ft/kernels", "pack state: Triton, torch"),
        ],
        "violet",
    ),
    (
        [
            (
                "moe_ft/config, moe_ft/format, moe_ft/*.py",
                "settings and flags, file formats, units, topology, events",
            )
        ],
        "empty",
    ),
]


def draw_layers() -> Drawing:
    """Draw the layers of the code; imports go down."""
    step, top = 58, 56
    drawing = Drawing(
        860,
        top + step * len(_LAYERS) + 62,
        "Layers of the code",
        "From the program at the top to settings and formats at the "
        "bottom; each layer imports only from lower ones.",
    )
    drawing.text(20, 32, "Layers: imports go down, never up", size=16, bold=True)
    for row, (parts, fill) in enumerate(_LAYERS):
        width = (790 - 8 * (len(parts) - 1)) / len(parts)
        for index, (name, holds) in enumerate(parts):
            is_stock = name.startswith("stock")
            ink = "on" if fill in ("green", "blue", "violet") and not is_stock else "ink"
            lines = [name, holds] if holds else [name]
            drawing.label(
                50 + index * (width + 8),
                top + row * step,
                width,
                step - 10,
                "empty" if is_stock else fill,
                lines,
                ink=ink,
            )
    bottom = top + step * len(_LAYERS)
    drawing.arrow((30, top + 6), (30, bottom - 12))
    text = (
        "strategies, planning and the lowest layer run without torch and "
        "without Megatron; only megatron/fault_tolerance knows"
    )
    drawing.text(50, bottom + 18, text, ink="soft", size=12)
    text = (
        "Megatron's training loop. tests/unit/test_architecture.py "
        "reads the imports and checks them."
    )
    drawing.text(50, bottom + 36, text, ink="soft", size=12)
    return drawing


def draw_expert_slots() -> Drawing:
    """Draw slots and homes of one layer, and the two messages between them in an iteration."""
    load, num_ranks, num_slots = (900, 450, 150, 300), 3, 2
    fills = ("blue", "green", "amber", "violet")
    drawing = Drawing(
        860,
        330,
        "Slots and homes of experts",
        "Each rank has slots, of which popular experts have several, and a third of the state of "
        "every expert. Gradients go from slots to homes, weights from homes to the slots of the "
        "next table.",
    )
    drawing.text(20, 32, "Slots and homes of one layer: 4 experts, 3 ranks of 2 slots", bold=True)
    table = balanced(load, num_ranks, num_slots, 1)
    drawing.text(20, 104, "slots compute", size=12, bold=True)
    drawing.text(20, 120, "by the table", ink="soft", size=12)
    drawing.text(20, 244, "homes hold state", size=12, bold=True)
    drawing.text(20, 260, "a part of every expert", ink="soft", size=12)
    for rank, row in enumerate(table):
        left = 170 + 230 * rank
        drawing.box(left, 50, 210, 230, "panel", radius=8)
        drawing.text(left + 12, 70, f"rank {rank}", ink="soft", size=12)
        for slot, expert in enumerate(row):
            place = left + 12 + 96 * slot
            share = load[expert] // sum(each.count(expert) for each in table)
            lines = [f"expert {expert}", f"{share} tokens"]
            drawing.label(place, 84, 90, 50, fills[expert], lines, ink="on", size=12)
        drawing.arrow((left + 60, 140), (left + 60, 214))
        drawing.arrow((left + 150, 214), (left + 150, 140))
        drawing.text(left + 66, 172, "gradients", ink="soft", size=11)
        drawing.text(left + 156, 190, "weights", ink="soft", size=11)
        for expert, fill in enumerate(fills):
            lines = [f"{expert}", f"{rank + 1}/{num_ranks}"]
            drawing.label(left + 12 + 47 * expert, 220, 43, 44, fill, lines, ink="on", size=12)
    text = (
        "Every rank sends to every other one, always equally much: another table costs no byte "
        "more, and no master or moment moves."
    )
    drawing.text(20, 310, text, ink="soft", size=12)
    return drawing
