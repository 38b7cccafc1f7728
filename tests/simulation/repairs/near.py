"""Schedules of repairs near which mistakes show that few random ones show.

Without a mistake they break no promise.
"""

from tests.simulation.repairs.schedule import Fault, RepairSchedule

# A thread that hangs in what looks like a wait for others: they time out.
_LOST_MESSAGE = RepairSchedule(
    seed=1,
    iterations=8,
    faults=(Fault(kind="hang", start=0, moment="forward", time=12, amount=0.2),),
)
# A node also runs the ranks of another one; then it is lost, or the other one comes back.
_CROWDED = RepairSchedule(
    seed=1,
    nodes=3,
    keeps_apart=True,
    without_spare="crowd",
    iterations=40,
    faults=(
        Fault(kind="lose-node", start=0, moment="forward", time=6, target=2, amount=0.9),
        Fault(kind="lose-node", start=0, moment="forward", time=14, target=0, amount=0.2),
    ),
)
# A node also runs the ranks of another one, and one of them dies.
_GUEST_DIES = RepairSchedule(
    seed=1,
    nodes=3,
    keeps_apart=True,
    without_spare="share",
    iterations=20,
    faults=(
        Fault(kind="lose-node", start=0, moment="forward", time=6, target=2, amount=0.9),
        Fault(kind="kill", start=0, moment="forward", time=20, target=2),
    ),
)
_STORE_CUT_OFF = RepairSchedule(
    seed=1,
    nodes=3,
    spares=1,
    iterations=30,
    faults=(Fault(kind="cut-store", start=0, moment="forward", time=12, amount=0.7),),
)
NEAR_OF_REPAIRS: dict[str, RepairSchedule] = {
    "own-stop-held-against-the-thread": RepairSchedule(
        seed=468080,
        ranks=4,
        iterations=3,
        faults=(
            Fault(kind="kill", start=0, moment="logged", time=12, amount=0.9),
            Fault(kind="pause-node", start=0, moment="build", time=2, amount=0.896),
        ),
        switching=0.3,
    ),
    "broken-rounds-waited-for": RepairSchedule(
        seed=187,
        iterations=3,
        faults=(
            Fault(kind="stop", start=0, moment="forward", time=6),
            Fault(kind="kill", start=0, moment="build", time=3, target=1),
        ),
        switching=0.6,
    ),
    "rounds-without-end": RepairSchedule(  # a rank dies in each
        seed=1,
        ranks=6,
        iterations=4,
        faults=(
            Fault(kind="kill", start=0, moment="forward", time=14, target=0),
            *(
                Fault(kind="kill", start=0, moment="restore", time=time)
                for time in (12, 18, 24, 30)
            ),
        ),
    ),
    "nobody-is-crowded": _CROWDED,
    # A rank dies before the lost node comes back, and is built meanwhile.
    "slots-move-in-the-middle-of-a-round": RepairSchedule(
        seed=1,
        nodes=3,
        keeps_apart=True,
        without_spare="share",
        iterations=40,
        faults=(
            Fault(kind="lose-node", start=0, moment="forward", time=6, target=2, amount=0.35),
            Fault(kind="kill", start=0, moment="forward", time=14, target=1),
        ),
    ),
    "guests-have-devices": _GUEST_DIES,
    "host-forgotten-with-a-process": _GUEST_DIES,
    "crowded-slots-forgotten": _CROWDED,
    "ranks-that-move-live-on": _CROWDED,
    "hang-not-ended": _LOST_MESSAGE,
    "timeouts-kept-to-oneself": _LOST_MESSAGE,
    "survivors-never-freed": _LOST_MESSAGE,
    "slow-writes-are-silence": RepairSchedule(
        seed=1,
        ranks=2,
        iterations=8,
        hang_limit="25",
        evaluation_steps=2,
        faults=(Fault(kind="write-long", start=0, moment="between", time=11, amount=0.95),),
    ),
    # One node falls silent after the other one, whose ranks the spare has not brought back.
    "nobody-left-is-no-reason": RepairSchedule(
        seed=169835069324,
        ranks=2,
        nodes=2,
        spares=1,
        fewest=1,
        keeps_apart=True,
        faults=(
            Fault(kind="silence-node", start=0, moment="leave", time=1, amount=0.723),
            Fault(kind="silence-node", start=0, moment="end", time=10, amount=0.183),
        ),
        switching=0.1,
    ),
    # The node of the store is told to end, and all save; meanwhile another one is lost.
    "starts-after-all-are-to-save": RepairSchedule(
        seed=1,
        nodes=3,
        fewest=1,
        iterations=30,
        faults=(
            Fault(kind="tell-node", start=0, moment="forward", time=6, target=0),
            Fault(kind="lose-node", start=0, moment="forward", time=10, target=2, amount=0.9),
        ),
        switching=0.1,
    ),
    # A rank fails at its start, as a node is lost, and its node still says so when the next one begins.
    "ends-of-an-earlier-start-count": RepairSchedule(
        seed=1,
        ranks=2,
        nodes=2,
        fewest=1,
        keeps_apart=True,
        iterations=4,
        faults=(
            Fault(kind="slow-store", start=0, moment="swap", time=1, amount=1.0),
            Fault(kind="lose-node", start=0, moment="recover", time=3, amount=0.99),
        ),
        switching=0.1,
    ),
    # A node comes back while a rank is built that has died.
    "growth-in-the-middle-of-a-round": RepairSchedule(
        seed=196676841,
        nodes=3,
        fewest=1,
        keeps_apart=True,
        ranks=3,
        iterations=12,
        faults=(
            Fault(kind="lose-node", start=0, moment="forward", time=5, amount=0.38),
            Fault(kind="kill", start=0, moment="backward", time=27, target=0, amount=0.4),
        ),
        switching=0.02,
    ),
    # One node is lost in each start of three nodes, before an iteration, and comes back while two train.
    "untrained-starts-counted-for-ever": RepairSchedule(
        seed=1,
        nodes=3,
        fewest=1,
        keeps_apart=True,
        iterations=70,
        faults=tuple(
            Fault(kind="lose-node", start=0, moment="restore", time=time, target=2, amount=0.2)
            for time in (3, 8, 13, 18)
        ),
        switching=0.1,
    ),
    # All ranks are on one node, which falls silent; the other one comes back, and trains when it wakes up.
    "lost-nodes-live-on": RepairSchedule(
        seed=665638243009,
        ranks=3,
        nodes=3,
        fewest=1,
        without_spare="end",
        iterations=8,
        faults=(
            Fault(kind="cut-node", start=0, moment="recover", time=4, target=-1, amount=1.0),
            Fault(kind="lose-node", start=0, moment="log", time=26, target=1, amount=0.145),
            Fault(kind="tell-node", start=0, moment="between", time=10, target=2, amount=0.3),
        ),
        switching=0.3,
    ),
    # The node of the store is cut off, and misses the nodes that it watches: nobody else is heard.
    "one-observer-is-enough": _STORE_CUT_OFF,
    "unheard-observers-are-not-there": _STORE_CUT_OFF,
    # A node reaches the store, and no other one.
    "own-beats-do-not-count": RepairSchedule(
        seed=1,
        nodes=3,
        spares=1,
        keeps_apart=True,
        iterations=30,
        faults=(Fault(kind="part-node", start=0, moment="forward", time=6, target=1, amount=0.7),),
    ),
}
