"""Process groups of simulated ranks: they exchange, and they fail as those of gloo do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ft.engine import agreement as module
from moe_ft.engine.agreement import Agreement, StageSum
from tests.simulation.groups import Group
from tests.simulation.kernel import Process
from tests.unit.simulation.simulated import Simulated

TIMEOUT_S = 600.0


def ranks(
    simulated: Simulated, act: Callable[[int], Any], world_size: int = 3, start: int = 0
) -> list[Process]:
    """Return processes that are ranks of a job, which say what they fail with."""

    def main(rank: int) -> None:
        try:
            act(rank)
        except RuntimeError as error:
            simulated.say((rank, str(error)))

    return [
        simulated.rank(lambda rank=rank: main(rank), rank, world_size, start)
        for rank in range(world_size)
    ]


def group_of(simulated: Simulated, members: list[int] | None = None) -> Group:
    """Return a group of the process that runs."""
    group = simulated.collectives.new_group(simulated.world.process, members, TIMEOUT_S)
    assert group is not None
    return group


# Exchanges


def test_agreement_of_ranks(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        agreement, stage = Agreement(TIMEOUT_S), StageSum(TIMEOUT_S)
        agreement.start()
        stage.start(agreement.gather(rank // 2), rank)
        agreement.barrier()
        simulated.say(agreement.broadcast([rank]))
        agreement.begin([rank, -rank])
        counts = torch.tensor([[rank, 1]])
        stage.begin(counts)
        counts.zero_()
        simulated.say((rank, agreement.result(), stage.result().tolist()))
        agreement.close()

    ranks(simulated, act)
    simulated.run()
    assert [each for each in simulated.said if each == [0]] == [[0]] * 3
    assert sorted(each for each in simulated.said if each != [0]) == [
        (0, [0, -2], [[1, 2]]),
        (1, [0, -2], [[1, 2]]),
        (2, [0, -2], [[2, 1]]),
    ]


def test_values_are_copies(simulated: Simulated) -> None:
    values = [{"rank": [rank]} for rank in range(2)]

    def act(rank: int) -> None:
        found = simulated.collectives.exchange(group_of(simulated), values[rank])
        simulated.say(found == values and not any(a is b for a in found for b in values))
        assert simulated.collectives.exchange(group_of(simulated), (rank, b"x"))[1] == (1, b"x")

    ranks(simulated, act, 2)
    simulated.run()
    assert simulated.said == [True, True]


def test_tensors_are_broadcast_and_reduced(simulated: Simulated) -> None:
    dist: Any = module.dist

    def act(rank: int) -> None:
        group = dist.new_group([2, 0])  # a rank of 1 is no member
        if rank == 1:
            return
        assert dist.get_process_group_ranks(group) == [2, 0]
        own = dist.get_rank(group)
        tensor = torch.tensor([rank, 5 - rank])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        simulated.say(tensor.tolist())
        tensor = torch.full((3,), float(rank))
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
        simulated.say((own, tensor.tolist()))

    ranks(simulated, act)
    simulated.run()
    assert [each for each in simulated.said if isinstance(each, list)] == [[2, 5], [2, 5]]
    assert sorted(each for each in simulated.said if isinstance(each, tuple)) == [
        (0, [2.0] * 3),
        (1, [2.0] * 3),
    ]


def test_ranks_of_two_starts_do_not_meet(simulated: Simulated) -> None:
    def act_in(start: int) -> Callable[[int], None]:
        return lambda rank: simulated.say(
            simulated.collectives.exchange(group_of(simulated), (start, rank))
        )

    for start in range(2):
        ranks(simulated, act_in(start), 2, start)
    simulated.run()
    assert sorted(simulated.said) == [[(start, 0), (start, 1)] for start in (0, 0, 1, 1)]


def test_slow_rank_is_waited_for(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        simulated.kernel.sleep(50.0 * rank)
        agreement.begin([rank])
        simulated.say(agreement.result())

    ranks(simulated, act)
    simulated.run()
    assert simulated.said == [[0]] * 3
    assert simulated.trace[0][0] > 100.0


# Failures


def dying(simulated: Simulated, dead: list[Process]) -> Callable[[int], None]:
    """Return an act in which rank 1 dies, while the others wait for it in an all-reduce."""

    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        if rank == 1:
            simulated.kernel.sleep(10.0)
            simulated.kernel.end(simulated.world.process)
        agreement.begin([rank])
        with pytest.raises(RuntimeError) as caught:
            agreement.result()
        simulated.say(str(caught.value))
        with pytest.raises(RuntimeError) as caught:
            agreement.gather(rank)
        simulated.say(str(caught.value))

    return act


def test_end_of_a_rank_fails_all_that_need_it(simulated: Simulated) -> None:
    ranks(simulated, dying(simulated, []))
    simulated.run()
    assert len(simulated.said) == 4
    assert all("Connection closed by peer [node-1]" in each for each in simulated.said)
    assert all(10.0 < now < 10.5 for now, _ in simulated.trace)


def test_end_of_a_rank_may_be_seen_by_nobody(simulated: Simulated) -> None:
    simulated.collectives.hang_probability = 1.0
    ranks(simulated, dying(simulated, []))
    simulated.run()
    assert "Timed out waiting 120000ms" in simulated.said[0]
    assert 120.0 < simulated.trace[0][0] < 121.0


def test_timeout_of_one_rank_ends_the_waiting_of_others(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        group = group_of(simulated)
        if rank != 1:
            simulated.collectives.exchange(group, rank, timeout_s=50.0 if rank else 500.0)

    ranks(simulated, act)
    simulated.run()
    assert [(rank, round(now)) for now, (rank, _) in simulated.trace] == [(2, 50), (0, 50)]
    assert "closed by peer [node-2]" in simulated.said[1][1]


def test_lost_node_is_noticed_by_the_timeout_only(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        if rank == 1:
            simulated.network.lose("node-1")
            simulated.kernel.end(simulated.world.process)
        agreement.begin([rank])
        agreement.result()

    ranks(simulated, act)
    simulated.run()
    assert "Timed out waiting 120000ms" in simulated.said[0][1]
    assert simulated.trace[0][0] > 120.0


def test_rank_that_leaves_ends_what_the_others_wait_for(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        if rank == 2:
            simulated.kernel.sleep(10.0)
        agreement.begin([rank])
        if rank == 0:
            agreement.leave()
            agreement.close()
        else:
            agreement.result()

    ranks(simulated, act)
    simulated.run()
    assert [(rank, round(now)) for now, (rank, _) in simulated.trace] == [(1, 0), (2, 10)]
    assert all("closed by peer" in error for _, error in simulated.said)


@pytest.mark.parametrize("seed", range(20))
def test_closing_after_a_result_spoils_it_for_nobody(seed: int) -> None:
    with Simulated(seed) as simulated:

        def act(rank: int) -> None:
            agreement = Agreement(TIMEOUT_S)
            agreement.start()
            for _ in range(3):
                agreement.begin([rank])
                agreement.result()
            agreement.close()
            simulated.say("done")

        ranks(simulated, act)
        simulated.run()
        assert simulated.said == ["done"] * 3


def test_some_ranks_may_have_a_result_that_others_lack() -> None:
    counts = set()
    for seed in range(60):
        with Simulated(seed) as simulated:

            def act(rank: int, simulated: Simulated = simulated) -> None:
                agreement = Agreement(TIMEOUT_S)
                agreement.start()
                agreement.begin([rank])
                if rank == 1:
                    simulated.kernel.end(simulated.world.process)
                agreement.result()
                simulated.say("done")

            ranks(simulated, act)
            simulated.run()
            counts.add(simulated.said.count("done"))
    assert counts == {0, 1, 2}


def test_partition_delays_or_times_out(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        for seconds in (30.0, 300.0):
            agreement.begin([rank])
            if rank == 0:
                simulated.network.partition(
                    ["node-0"], ["node-1", "node-2"], seconds, drop_probability=0
                )
            simulated.say(agreement.result())

    ranks(simulated, act)
    simulated.run()
    assert simulated.said[:3] == [[0]] * 3
    assert all(30.0 < now < 31.0 for now, _ in simulated.trace[:3])
    assert len(simulated.said) == 6
    assert "Timed out" in simulated.said[3][1]


def test_reset_of_a_node_breaks_its_groups(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        if rank == 1:
            simulated.network.reset("node-2")
            simulated.kernel.sleep(1.0)
        agreement.barrier()

    ranks(simulated, act)
    simulated.run()
    assert sorted(rank for rank, _ in simulated.said) == [0, 1, 2]


def test_group_that_was_destroyed_is_unknown(simulated: Simulated) -> None:
    dist: Any = module.dist

    def act(rank: int) -> None:
        group = dist.new_group()
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)
        simulated.say("done")

    ranks(simulated, act, 1)
    simulated.run()
    assert simulated.said == ["done"]


def test_process_that_is_no_rank_has_no_groups(simulated: Simulated) -> None:
    simulated.process(lambda: simulated.say(module.dist.is_initialized()))
    simulated.run()
    assert simulated.said == [False]
    assert not module.dist.is_initialized()


@pytest.mark.parametrize("seed", range(5))
def test_same_seed_makes_the_same_trace(seed: int) -> None:
    def trace() -> tuple[Any, ...]:
        with Simulated(seed) as simulated:

            def act(rank: int) -> None:
                agreement = Agreement(TIMEOUT_S)
                agreement.start()
                for iteration in range(30):
                    agreement.begin([rank, iteration])
                    simulated.say((rank, agreement.result()))
                    if iteration == 20 and rank == 2:
                        simulated.kernel.end(simulated.world.process)

            ranks(simulated, act)
            simulated.run()
            return simulated.trace, simulated.kernel.num_events, simulated.kernel.random.random()

    assert trace() == trace()
