"""Settings that another start has: each through Megatron's own scheduler and torch's Adam, by flag."""

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from moe_ft.config.flag_table import FLAGS, Kind, flag_classes, names_in
from moe_ft.errors import ConfigError
from moe_ft.format.records import IterationRecord
from moe_ft.state.packed_values import to_json
from moe_ft.state.record import _capture_scalars, _encode_optimizer, apply
from moe_ft.state.schedule import KEEP, OVERRIDE, check_changes, put_back, state_of
from tests.unit.moe_ft.builders import make_record
from tests.unit.source import text_of

TAKE_NEW = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
TAKE_OLD = {"use_checkpoint_opt_param_scheduler": True}
NEITHER = {"use_checkpoint_opt_param_scheduler": False}


@dataclass(frozen=True)
class Flags:
    """Settings of a start, as Megatron makes them of its flags."""

    schedule: dict[str, Any] = field(
        default_factory=lambda: {
            "init_lr": 0.0,
            "max_lr": 1e-3,
            "min_lr": 1e-4,
            "lr_warmup_steps": 16,
            "lr_decay_steps": 96,
            "lr_decay_style": "WSD",
            "start_wd": 0.01,
            "end_wd": 0.05,
            "wd_incr_steps": 80,
            "wd_incr_style": "linear",
            "wsd_decay_steps": 64,
            "lr_wsd_decay_style": "linear",
        }
    )
    decoupled: dict[str, Any] = field(default_factory=lambda: {"max_lr": 3e-3, "min_lr": 2e-4})
    adam: dict[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.999), "eps": 1e-8})

    def changed(self, **values: Any) -> "Flags":
        """Return settings some of which differ; names with decoupled_ are those of that group."""
        changes: dict[str, Any] = {}
        for part in ("schedule", "adam", "decoupled"):
            prefix = "decoupled_" if part == "decoupled" else ""
            own = getattr(self, part)
            changes[part] = {key: values.get(f"{prefix}{key}", old) for key, old in own.items()}
        return replace(self, **changes)


class Start:
    """Groups of parameters and a scheduler as Megatron builds them at a start."""

    def __init__(self, flags: Flags, num_steps: int = 0, **asked: bool) -> None:
        rates = {name: flags.schedule[name] for name in ("max_lr", "min_lr")}
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(2))], "wd_mult": 1.0, **rates},
            {"params": [torch.nn.Parameter(torch.ones(2))], "wd_mult": 0.0, **flags.decoupled},
        ]
        for group, is_default in zip(groups, (True, False), strict=True):
            group["default_config"] = is_default
        adam = torch.optim.AdamW(groups, lr=flags.schedule["max_lr"], **flags.adam)
        self.inner = SimpleNamespace(optimizer=adam, config=SimpleNamespace(optimizer="adam"))
        given: Any = {**flags.schedule, **NEITHER, **asked}
        self.scheduler = OptimizerParamScheduler(adam, **given)
        self.scheduler.step(num_steps)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Values of the next step of the optimizer."""
        groups = self.inner.optimizer.param_groups
        return [{key: each for key, each in group.items() if key != "params"} for group in groups]

    def record(self) -> IterationRecord:
        """Return the record of this state, as a start reads it from its file."""
        record = make_record(6)
        optimizer = msgspec.structs.replace(
            record.optimizers[0], groups=tuple(to_json(group) for group in self.groups)
        )
        scheduler = to_json(state_of(self.scheduler))
        record = msgspec.structs.replace(record, optimizers=(optimizer,), scheduler=scheduler)
        return msgspec.json.decode(msgspec.json.encode(record), type=IterationRecord)

    def recover(self, record: IterationRecord) -> str:
        """Continue from a record; return what is said."""
        line = check_changes([record], self.inner, self.scheduler)
        put_back(record, self.inner, self.scheduler)
        return line


STEPS = 48
# By flag: what it changes in a start that has another value.
COMPARED: dict[str, dict[str, Any]] = {
    "lr": {"max_lr": 5e-4},
    "min_lr": {"min_lr": 5e-5},
    "lr_warmup_iters": {"lr_warmup_steps": 24},
    "lr_warmup_samples": {"lr_warmup_steps": 23},
    "lr_warmup_fraction": {"lr_warmup_steps": 9.6},
    "lr_decay_iters": {"lr_decay_steps": 128},
    "lr_decay_samples": {"lr_decay_steps": 127},
    "lr_decay_style": {"lr_decay_style": "cosine"},
    "start_weight_decay": {"start_wd": 0.02},
    "end_weight_decay": {"end_wd": 0.1},
    "weight_decay": {"start_wd": 0.1, "end_wd": 0.1},
    "weight_decay_incr_style": {"wd_incr_style": "cosine"},
    "train_iters": {"wd_incr_steps": 160},
    "train_samples": {"wd_incr_steps": 159},
    "decoupled_lr": {"decoupled_max_lr": 2e-3},
    "decoupled_min_lr": {"decoupled_min_lr": 1e-4},
    "adam_beta1": {"betas": (0.8, 0.999)},
    "adam_beta2": {"betas": (0.9, 0.95)},
    "adam_eps": {"eps": 1e-6},
}
OF_THE_START: dict[str, dict[str, Any]] = {
    "lr_warmup_init": {"init_lr": 1e-5},
    "lr_wsd_decay_iters": {"wsd_decay_steps": 72},
    "lr_wsd_decay_samples": {"wsd_decay_steps": 71},
    "lr_wsd_decay_style": {"lr_wsd_decay_style": "cosine"},
}
OF_GROUPS = ("decoupled", "adam")
changes = pytest.mark.parametrize("name", COMPARED)
OLD = Flags()


def continue_both(one: Start, other: Start) -> None:
    """Compare what two starts do in some steps."""
    for _ in range(8):
        assert one.groups == other.groups
        for start in (one, other):
            start.scheduler.step(8)


@changes
def test_change_that_no_flag_asks_for_is_refused_as_megatron_refuses_it(name: str) -> None:
    record, start = Start(OLD, STEPS).record(), Start(OLD.changed(**COMPARED[name]))
    flag = f"--{name}".replace("_", "-").replace("warmup-samples", "warmup-iters")
    flag = flag.removesuffix("-fraction").replace("decay-samples", "decay-iters")
    flag = "--end-weight-decay: .*--start-weight-decay" if name == "weight_decay" else flag
    named = "samples of the run" if name.startswith("train_") else flag
    with pytest.raises(
        ConfigError, match=f"iteration 6 .*{named}.* there, .* now.*{OVERRIDE}.*{KEEP}"
    ):
        start.recover(record)
    if not name.startswith(OF_GROUPS):  # Megatron's scheduler knows nothing of these
        with pytest.raises(AssertionError, match="do not match"):
            start.scheduler.load_state_dict(Start(OLD, STEPS).scheduler.state_dict())


@changes
def test_override_takes_the_new_value_from_the_first_step_on(name: str) -> None:
    new = OLD.changed(**COMPARED[name])
    record, start = Start(OLD, STEPS).record(), Start(new, **TAKE_NEW)
    line = start.recover(record)
    assert line.startswith(f"{OVERRIDE} takes other settings than the state of iteration 6: ")
    again = start.record()
    continue_both(start, Start(new, STEPS))
    # Another start has the same flags; one without the flag needs it no more.
    for asked in (TAKE_NEW, NEITHER):
        start = Start(new, **asked)
        assert start.recover(again) == ""
        continue_both(start, Start(new, STEPS))


@changes
def test_value_of_the_state_is_kept_where_a_flag_asks_for_that(name: str) -> None:
    record, start = Start(OLD, STEPS).record(), Start(OLD.changed(**COMPARED[name]), **TAKE_OLD)
    assert start.recover(record).startswith(f"{KEEP} does not take other settings than ")
    continue_both(start, Start(OLD, STEPS))


@pytest.mark.parametrize("name", OF_THE_START)
@pytest.mark.parametrize("asked", [NEITHER, TAKE_NEW, TAKE_OLD])
def test_what_megatron_does_not_save_is_new_from_the_first_step_on(
    name: str, asked: dict[str, bool]
) -> None:
    new = OLD.changed(**OF_THE_START[name])
    record, start = Start(OLD, STEPS).record(), Start(new, **asked)
    assert start.recover(record) == ""
    continue_both(start, Start(new, STEPS))
    window = [record, record]
    with pytest.raises(ConfigError, match="window of 2 snapshots.*--lr-w.* there, .* now"):
        check_changes(window, start.inner, Start(new, **asked).scheduler)


def test_another_length_of_the_run_is_the_same_schedule_where_rates_are_constant() -> None:
    constant = OLD.changed(start_wd=0.05, wd_incr_style="constant", lr_decay_style="constant")
    start = Start(constant.changed(wd_incr_steps=160, lr_decay_steps=192))
    assert start.recover(Start(constant, STEPS).record()) == ""
    continue_both(start, Start(constant, STEPS))
    start = Start(constant.changed(start_wd=0.1, end_wd=0.1))
    with pytest.raises(ConfigError, match="settings: --weight-decay: 0.05 there, 0.1 now. It"):
        start.recover(Start(constant, STEPS).record())


def test_rates_that_a_script_has_set_itself_come_back() -> None:
    saved, start = Start(OLD, STEPS), Start(OLD)
    saved.inner.optimizer.param_groups[0]["lr"] = 0.125
    assert start.recover(saved.record()) == ""
    assert start.groups == saved.groups


def test_window_runs_again_with_its_own_settings_or_not_at_all() -> None:
    record = Start(OLD, STEPS).record()
    start = Start(OLD.changed(max_lr=5e-4), **TAKE_NEW)
    with pytest.raises(ConfigError, match="window of 2 snapshots.*--lr: 0.001 there, 0.0005 now"):
        check_changes([record, record], start.inner, start.scheduler)
    start = Start(OLD.changed(max_lr=5e-4), **TAKE_OLD)
    assert KEEP in check_changes([record, record], start.inner, start.scheduler)


def test_loss_scale_is_state_and_its_rules_are_those_of_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, device: tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    rules = {"growth_factor": 2.0, "backoff_factor": 0.5}

    def scaler(**flags: Any) -> Any:
        real_tensor = torch.tensor
        with monkeypatch.context() as patch:
            patch.setattr(torch, "tensor", lambda data, **_: real_tensor(data))
            return DynamicGradScaler(**rules, **flags)

    saved, start = Start(OLD, STEPS), Start(OLD)
    old = {"initial_scale": 64.0, "min_scale": 1.0, "growth_interval": 100, "hysteresis": 2}
    new = {"initial_scale": 8.0, "min_scale": 4.0, "growth_interval": 3, "hysteresis": 5}
    saved.inner.grad_scaler, start.inner.grad_scaler = scaler(**old), scaler(**new)
    saved.inner.grad_scaler.update(torch.zeros(1) > 0)
    optimizers = [{**_capture_scalars(saved.inner), "steps": {}, "scales": {}}]
    record = msgspec.structs.replace(
        saved.record(), optimizers=tuple(map(_encode_optimizer, optimizers)), buffers={}
    )
    apply(record, [], start.inner, start.scheduler, [])
    scale = start.inner.grad_scaler
    assert scale.scale.item() == 64.0
    assert scale._growth_tracker == 1
    found = (scale.min_scale.item(), scale.growth_interval, scale.hysteresis)
    assert found == (4.0, 3, 5)


def test_page_says_of_each_recorded_flag_what_a_change_does() -> None:
    classes = FLAGS["optimizer"]
    flags = {*names_in(classes["record"]), *names_in(classes["record untested"])}
    asking = {"override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"}
    untried_kinds = {
        "lion_beta1",
        "lion_beta2",
        "muon_momentum",
        "sgd_momentum",
    }  # as those of Adam
    tried = {*COMPARED, *OF_THE_START} - {"train_iters", "train_samples", "decoupled_lr"}
    assert tried == flags - asking - untried_kinds
    recorded = {name for name, each in flag_classes().items() if each.kind is Kind.RECORD}
    named = re.findall(r"`--([a-z0-9*-]+)`", text_of("docs/changed_flags.md"))
    others = {"phase_transition_iterations", "full_validation"}  # docs/flags.md
    unnamed = {
        name
        for name in recorded - asking - others
        if not any(fnmatch(name.replace("_", "-"), each) for each in named)
    }
    assert unnamed == set()
