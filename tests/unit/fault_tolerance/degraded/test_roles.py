"""Places of roles in a job's layout, and gradients that are added up role by role."""

from argparse import Namespace

import pytest
import torch

from megatron.fault_tolerance.degraded.roles import RoleGradients, RolePlace
from moe_ft.planning.lost_ranks import Layout

LAYOUTS = [
    Layout(num_stages=2, tp=1, cp=1, dp=2),
    Layout(num_stages=3, tp=2, cp=1, dp=4, ep=2),
    Layout(num_stages=1, tp=2, cp=1, dp=3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_is_found_by_its_role_from_each_of_its_peers(layout: Layout) -> None:
    size = layout.num_stages * layout.tp * layout.cp * layout.dp
    for rank in range(size):
        role = RolePlace(layout, rank).role
        assert {role} == layout.roles_of([rank]) or layout.num_groups == 1
        peers = [
            each for each in range(size) if each % layout.group_size == rank % layout.group_size
        ]
        assert {RolePlace(layout, peer).rank_of(role) for peer in peers} == {rank}


def test_peer_reads_the_samples_of_the_role_that_it_plays() -> None:
    place = RolePlace(Layout(num_stages=2, tp=2, cp=1, dp=4, ep=1), rank=8 + 3)
    assert place.role == (1, 1)
    assert [place.reader_of(pipeline) for pipeline in range(4)] == [0, 1, 2, 3]


def test_gradients_of_roles_are_apart_until_they_are_added_up() -> None:
    # Summed in the order in which they come, the 1 is lost in each of the large numbers.
    buffer = torch.zeros(4)
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.main_grad = buffer.view(2, 2)  # type: ignore[attr-defined]
    bucket = Namespace(grad_data=buffer, params_list=[weight], param_to_index={weight: (0, 4)})
    chunk = Namespace(bucket_groups=[Namespace(buckets=[bucket])], expert_parallel_bucket_groups=[])
    gradients = RoleGradients(chunk, own=0)
    for _ in range(2):  # a second iteration begins with zeros
        buffer.zero_()
        gradients.begin([0, 1])
        for role, value in ((0, 2.0**24), (1, 1.0), (0, -(2.0**24)), (1, 1.0)):
            gradients.play(role)
            weight.main_grad.add_(value)  # type: ignore[attr-defined]
        gradients.play(0)
        gradients.add_up([0, 1])
        assert buffer.tolist() == [2.0] * 4
        assert weight.main_grad.data_ptr() == buffer.data_ptr()  # type: ignore[attr-defined]
