"""Functions of Megatron-Bridge that are wrapped or called, and the versions that have been looked at.

As in seams/versions.py, the check at a start asks the functions themselves. None has lost a parameter between
the oldest version and the newest; later ones have added some at the end, or by name.
"""

import importlib
from typing import Any

from megatron.fault_tolerance.seams.stack import Seam
from megatron.fault_tolerance.seams.versions import misfits

RECOMMENDED = "0.6.2"  # `make test-bridge` runs with it
# All seams fit. 0.7.0 is main of August 2026; it and 0.6.0 have trained, the two oldest have not.
READ = ("0.4.2", "0.5.1", "0.6.0", RECOMMENDED, "0.7.0")

_BRIDGE = "megatron.bridge"
_MODEL = "model optimizer scheduler"
# Module that calls it, function, and its first parameters, which are used by their places.
_PAGE = (
    ("training.pretrain", "_pretrain", "state forward_step_func"),
    ("training.pretrain", "_maybe_destroy_process_group", ""),
    ("training.pretrain", "setup", "state train_valid_test_datasets_provider"),
    (
        "training.pretrain",
        "train",
        f"forward_step_func {_MODEL} train_data_iterator valid_data_iterator global_state",
    ),
    (
        "training.train",
        "train_step",
        f"forward_step_func data_iterator {_MODEL} global_state pg_collection forward_backward_func"
        " p2p_communicator",
    ),
    (
        "training.train",
        "_dummy_train_step",
        "global_state train_data_iterator pg_collection",
    ),
    (
        "training.train",
        "training_log",
        "loss_dict total_loss_dict learning_rate decoupled_learning_rate loss_scale report_memory_flag",
    ),
    ("training.train", "save_checkpoint_and_time", ""),
    ("training.train", "evaluate_and_print_results", ""),
    ("training.train", "update_pg_timeout", "timeout"),
    ("training.train", "disable_forward_pre_hook", "model"),
    ("training.train", "enable_forward_pre_hook", "model"),
    ("training.train", "check_param_hashes_across_dp_replicas", ""),
    ("training.setup", "set_jit_fusion_options", ""),
    ("training.setup", "setup_data_iterators", ""),
    ("training.eval", "evaluate", "state forward_step_func data_iterator model"),
    ("data.loaders", "build_train_valid_test_data_loaders", ""),
    ("data.loaders", "build_pretraining_data_loader", "dataset consumed_samples"),
)
# Called where they are defined.
_CALLED = (
    ("training.utils.train_utils", "prepare_forward_step_func", "forward_step_func state"),
    ("training.utils.flop_utils", "num_floating_point_operations", "cfg batch_size"),
    ("data.iterator_utils", "make_data_iterator_list", "model data_iterator"),
)
# By function: parameters that are used by their names.
_NAMED = {"_pretrain": "store", "setup": "restart_store"}
# Not in all versions that are looked at: it came with 0.6.
CLEANUP = "_cleanup_after_pretrain_failure"

BRIDGE_SEAMS = {
    name: Seam(
        module=f"{_BRIDGE}.{module}",
        name=name,
        first=tuple(first.split()),
        named=tuple(_NAMED.get(name, "").split()),
    )
    for module, name, first in (*_PAGE, *_CALLED)
}


def called(name: str) -> Any:
    """Return a function of Bridge by its name."""
    return getattr(*BRIDGE_SEAMS[name].place)


def installed_version() -> str:
    """Return the version of the Bridge that is imported."""
    found: str = importlib.import_module(f"{_BRIDGE}.package_info").__version__
    return found.partition("+")[0]  # without the commit of a checkout


def check_bridge_seams(*, allow_misfit: bool = False) -> list[str]:
    """Return a line on a version that has not been looked at; none for the others.

    Args:
        allow_misfit: return the misfits in lines instead of raising.

    Raises:
        ConfigError: if a function does not fit, with the names of all that do not.
    """
    version, readable = installed_version(), ", ".join(READ)
    package, remedy = f"megatron-bridge {version}", f"Install one that does ({readable})"
    lines = misfits(package, BRIDGE_SEAMS.values(), remedy, allow_misfit=allow_misfit)
    if lines or version in READ:
        return lines
    return [f"{package} is not one of {readable}: the functions that moe_ft uses are there"]
