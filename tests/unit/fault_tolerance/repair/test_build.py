"""A replacement is set up alone: its groups are fake, and what all ranks gather comes from a record."""

import enum
import math
import pickle
import struct
from argparse import Namespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from megatron.training import training
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.repair.build import Gathered, Joining, from_json, to_json
from megatron.fault_tolerance.repair.swap import Recipe, Recipes
from moe_ft.cluster.member import Member, Standing
from moe_ft.errors import ConfigError, RepairError
from tests.unit.fault_tolerance.repair.members import position_at
from tests.unit.signed import member_of, signed


@pytest.fixture
def member() -> Member:
    """Return a replacement."""
    return member_of(1, 2, died_s=5.0)


def test_replacement_makes_fake_groups_and_loads_nothing_until_it_meets_the_others(
    member: Member, loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(training, "setup_model_and_optimizer", lambda: calls.append(loop_args.load))
    loop_args.load, loop_args.fake_process_group = "checkpoints", False
    loop_args.distributed_backend = "nccl"
    recipes, make_group = Recipes(), dist.new_group
    joining = Joining(member, recipes)
    with joining.installed():
        assert loop_args.fake_process_group
        # As Megatron does then.
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        group = dist.new_group([0, 1], backend="gloo")
        assert (dist.get_backend(), dist.get_backend(group)) == ("fake", "fake")
        assert recipes.of_default() == Recipe(backend="nccl")
        assert recipes.of(group) == Recipe(backend="gloo")
        training.setup_model_and_optimizer()
        assert loop_args.load == "checkpoints", "it identifies the run"
        joining.end()
        assert dist.new_group is make_group
    dist.destroy_process_group()
    assert calls == [None]
    assert loop_args.fake_process_group is False


class _Chunk:
    """A part of a model whose modules gather their weights before they run."""

    def __init__(self) -> None:
        self.config = Namespace(param_sync_func="gather")
        self.remove_forward_pre_hook_handles = {"module": "hook"}

    def start_param_sync(self) -> None: ...

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles = {"module": "hook"}

    def disable_forward_pre_hook(self, param_sync: bool) -> None:
        del self.remove_forward_pre_hook_handles["module"]


@pytest.mark.parametrize("gathers", [False, True])
def test_replacement_gathers_weights_in_its_first_iteration_if_the_others_do(
    gathers: bool, member: Member, loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def step(*args: Any) -> None:
        seen.append((args[5].param_sync_func, bool(chunk.remove_forward_pre_hook_handles)))

    monkeypatch.setattr(training, "train_step", step)
    chunk, joining = _Chunk(), Joining(member, Recipes())
    loop_args.fake_process_group = False
    with joining.installed():
        joining.follow(position_at(4, gathers_weights=gathers))
        training.disable_forward_pre_hook([chunk], param_sync=False)  # as Megatron's loop begins
        chunk.config.param_sync_func = None
        joining.end()
        member.standing = Standing.JOINED
        training.train_step(*range(5), chunk.config)
        training.enable_forward_pre_hook([chunk])
        assert chunk.remove_forward_pre_hook_handles
        training.disable_forward_pre_hook([chunk], param_sync=False)  # before an evaluation
        assert not chunk.remove_forward_pre_hook_handles
    assert seen == [("gather", True) if gathers else (None, False)]


VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: (
        some.lists(inner)
        | some.lists(inner).map(tuple)
        | some.dictionaries(some.text() | some.tuples(some.integers(), some.floats()), inner)
    ),
    max_leaves=10,
)


def bits_of(value: Any) -> Any:
    """Return a value in which types and the bits of numbers can be compared."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return ["dict", *(bits_of(each) for each in value.items())]
    if isinstance(value, list | tuple):
        return [type(value), *map(bits_of, value)]
    return (type(value), value)


@given(some.lists(VALUES))
def test_values_come_back_with_their_types_and_bits(values: list[Any]) -> None:
    assert bits_of(from_json(to_json(values))) == bits_of(values)


def test_numbers_that_json_lacks_come_back_and_equal_ones_of_another_type_stay_apart() -> None:
    values = [(math.inf, -math.inf, -0.0, 0.1), (1, 1.0, True), (1.0, True, 1), None, ()]
    assert bits_of(from_json(to_json(values))) == bits_of(values)


def test_many_ranks_that_say_the_same_are_kept_once() -> None:
    kept = to_json([[(("max_lr", 1e-3),), False]] * 10_000)
    assert len(kept["values"]) == 1 and len(kept["of_rank"]) == 10_000


class _Setting(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("value", [_Setting.ONE, {1}, b"bytes", object])
def test_value_that_cannot_be_kept_bit_for_bit_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="--moe-ft-repair=auto keeps what .* Leave the flag out"):
        to_json([(value,)])


@pytest.fixture
def _others(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have another rank say something; return the groups of some ranks that gather."""
    of_groups: list[Any] = []

    def gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if group is not None:
            of_groups.append(group)
        object_list[:] = [obj, (obj, None)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return of_groups


def test_replacement_gets_all_values_in_their_order(_others: list[Any]) -> None:
    store, gather = signed(), dist.all_gather_object
    for is_joining in (False, True):
        with Gathered(store, is_joining=is_joining).installed():
            found: list[Any] = []
            for value in ("first", "second"):
                own: list[Any] = [None, None]
                dist.all_gather_object(own, "alone" if is_joining else value)
                found.append(own)
            dist.all_gather_object([None], value, "a group of some ranks")
        assert found == [["first", ("first", None)], ["second", ("second", None)]]
    assert _others == ["a group of some ranks"] * 2
    assert dist.all_gather_object is gather


class _Payload:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("the stranger's code runs",))


@pytest.mark.usefixtures("_others")
def test_code_of_a_stranger_in_the_store_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    store.set("gathered_0", pickle.dumps([_Payload()]))  # type: ignore[arg-type]  # takes bytes too
    with (
        Gathered(signed(store), is_joining=True).installed(),
        pytest.raises(RepairError, match="gathered_0, which the ranks have told each other"),
    ):
        dist.all_gather_object([None, None], "alone")
    assert "a value of gathered_0 in the job's store is ignored" in capsys.readouterr().err
