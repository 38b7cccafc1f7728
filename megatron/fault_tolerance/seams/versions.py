"""Versions of Megatron: which are tested, which seams must fit, and what older ones lack.

Nothing else asks for the version. The check at a start asks the seams themselves: the functions of Megatron
that are wrapped or called, and the parameters by whose place or name that is done. An unknown version whose
seams fit is used, with a line.
"""

import argparse
import importlib
import importlib.util
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ft.config.untested import MEGATRON
from moe_ft.errors import ConfigError

OLDEST = (0, 18)
RECOMMENDED = "0.19.2"  # all tests run with it
# `make test-versions` reads this line and runs them; its CHECKOUTS: main, 0.20.0.
WHEELS = ("0.18.2", "0.19.0")
TESTED = (*WHEELS, RECOMMENDED, "0.20.0")

_TRAINING = "megatron.training.training"
_OPTIMIZER = "megatron.core.optimizer.optimizer"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """A function of Megatron that is wrapped or called.

    Attributes:
        module, name: where it is; the name of a method has its class before it.
        first: its first parameters, which are used by their places.
        named: parameters that are used by their names.
    """

    module: str
    name: str
    first: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def misfit(self) -> str | None:
        """Return what does not fit, with the name of the function; None if it fits."""
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"{self.module}.{self.name} is not there"
        parameters = inspect.signature(found).parameters
        first = tuple(parameters)[: len(self.first)]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if first != self.first:
            return (
                f"{self.name} begins with ({', '.join(first)}) instead of ({', '.join(self.first)})"
            )
        if missing := [] if takes_any else [each for each in self.named if each not in parameters]:
            return f"{self.name} has no parameter {', '.join(missing)}"
        return None


_LOOP = ("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator")
_STEP = ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler")
SEAMS = (
    Seam(module=_TRAINING, name="pretrain", first=("cfg_container",)),
    Seam(module=_TRAINING, name="setup_model_and_optimizer"),
    Seam(
        module=_TRAINING,
        name="train",
        first=(*_LOOP, "valid_data_iterator", "process_non_loss_data_func", "config"),
    ),
    Seam(
        module=_TRAINING,
        name="train_step",
        first=(*_STEP, "config", "forward_backward_func"),
        named=("iteration",),
    ),
    Seam(module=_TRAINING, name="dummy_train_step", first=("data_iterator",)),
    Seam(module=_TRAINING, name="training_log", named=("is_first_iteration",)),
    Seam(module=_TRAINING, name="evaluate", first=("forward_step_func",)),
    Seam(module=_TRAINING, name="save_checkpoint"),
    Seam(module=_TRAINING, name="evaluate_and_print_results"),
    Seam(module=_TRAINING, name="build_train_valid_test_data_loaders"),
    Seam(
        module=_TRAINING,
        name="build_pretraining_data_loader",
        first=("dataset", "consumed_samples"),
    ),
    Seam(module=_TRAINING, name="get_megatron_optimizer"),
    Seam(module=_TRAINING, name="update_pg_timeout"),
    Seam(module=_TRAINING, name="set_jit_fusion_options"),
    Seam(module=_TRAINING, name="disable_forward_pre_hook", first=("model_chunks",)),
    Seam(module=_TRAINING, name="enable_forward_pre_hook", first=("model_chunks",)),
    Seam(module=_TRAINING, name="check_param_hashes_across_dp_replicas"),
    Seam(module=_TRAINING, name="num_floating_point_operations", first=("args", "batch_size")),
    Seam(module="megatron.training.arguments", name="parse_args", first=("extra_args_provider",)),
    Seam(module="megatron.training.arguments", name="add_megatron_arguments", first=("parser",)),
    *(
        Seam(module=_OPTIMIZER, name=f"ChainedOptimizer.{name}")
        for name in ("prepare_grads", "step_with_ready_grads", "get_grad_norm", "zero_grad")
    ),
    Seam(
        module="megatron.core.pipeline_parallel.p2p_communication",
        name="P2PCommunicator._communicate",
        named=("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape"),
    ),
    Seam(
        module="megatron.core.transformer.moe.router",
        name="apply_router_token_dropping",
        named=("router_topk", "capacity_factor", "drop_policy"),
    ),
    Seam(module="megatron.core.transformer.moe.moe_logging", name="get_moe_metrics_tracker"),
    Seam(module="megatron.core.rerun_state_machine", name="RerunDataIterator.__next__"),
)

# Arguments and settings that an older version lacks: what that means.
_LATER: dict[str, Any] = {
    "gtp_weight_remat_size": 1,  # since 0.19: ranks that share weights and read different data
    "expert_gtp_weight_remat_size": 1,  # since 0.19
}


def setting(of: argparse.Namespace | Any, name: str) -> Any:
    """Return one of Megatron's arguments, or of its settings of a model, in any version.

    Args:
        name: one that some version lacks.
    """
    return getattr(of, name, _LATER[name])


def later(module: str, name: str | None = None) -> Any:
    """Return a module of a newer Megatron, or what is in it; None if this one lacks it."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something else
        return None
    return found if name is None else getattr(found, name, None)


def name_of_parameter(function: Any, *names: str) -> str:
    """Return the first of the names that a parameter has had in different versions, which this one has.

    Raises:
        ConfigError: if it has none of them.
    """
    for name in names:
        if name in inspect.signature(function).parameters:
            return name
    raise ConfigError(
        f"megatron-core {installed_version()} does not fit moe_ft: {function.__name__} has no parameter "
        f"{' or '.join(names)}. Install a tested version ({', '.join(TESTED)})."
    )


def installed_version() -> str:
    """Return the version of the Megatron that an import would take, without importing it.

    Raises:
        ConfigError: if there is none.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"megatron.core is not installed. Install megatron-core, for example {RECOMMENDED}, or put a "
            "checkout of Megatron-LM on PYTHONPATH."
        )
    text = (Path(spec.origin).parent / "package_info.py").read_text()
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH"))


def check_oldest() -> None:
    """Raise ConfigError if the Megatron that an import would take is too old, or is not there."""
    version = installed_version()
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"megatron-core {version} is used, and moe_ft needs {oldest} or newer. Install a tested version "
            f"(pip install megatron-core=={RECOMMENDED}), or put a newer checkout of Megatron-LM first on "
            "PYTHONPATH."
        )


def check_seams(*, allow_misfit: bool = False) -> list[str]:
    """Return a line on a version that is not tested; none for one that is.

    Args:
        allow_misfit: return the misfits in lines instead of raising.

    Raises:
        ConfigError: if a seam does not fit, with the names of all that do not.
    """
    version = installed_version()
    misfits = [misfit for seam in SEAMS if (misfit := seam.misfit())]
    if misfits and not allow_misfit:
        raise ConfigError(
            f"megatron-core {version} does not fit moe_ft: {'; '.join(misfits)}. Install a tested version "
            f"({', '.join(TESTED)}), or {MEGATRON.risk}."
        )
    if misfits:
        return [f"megatron-core {version} does not fit moe_ft: {'; '.join(misfits)}"]
    if version not in TESTED:
        return [
            f"megatron-core {version} is not one of {', '.join(TESTED)}, with which moe_ft is tested: the "
            "functions that moe_ft uses are there"
        ]
    return []
