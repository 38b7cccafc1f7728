"""Variables with which torch leaves a rank alive when an operation of NCCL has failed.

torch reads them when it makes a group, and would otherwise end the process from a thread of its own.
"""

from collections.abc import Mapping, MutableMapping

from moe_ft.errors import ConfigError

_FLAG = "--moe-ft-repair=auto"
_OFF = ("0", "n", "no", "f", "false", "off")
# All are to be off. The first name of each is torch's present one, which it prefers.
_SET: Mapping[tuple[str, ...], str] = {
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_ASYNC_ERROR_HANDLING",
    ): "torch ends the process when another rank has died",
    (
        "TORCH_NCCL_DESYNC_DEBUG",
        "NCCL_DESYNC_DEBUG",
    ): "torch turns the handling of errors on again, which ends the process",
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        "NCCL_BLOCKING_WAIT",
    ): "torch looks for no errors, and each operation waits for the device",
    (
        "TORCH_NCCL_ENABLE_MONITORING",
    ): "torch ends the process when an operation has hung for some minutes",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "a rank that has written its flight recorder ends the process",
    ("TORCH_NCCL_EXTRA_DUMP_ON_EXEC",): "each end of a group writes the flight recorder first",
    (
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    ): "a group waits a minute after each failure before it can end",
}
_REFUSED: Mapping[str, str] = {
    "ENABLE_INTRA_NODE_COMM": "its buffers are shared with the process that has died",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "its backends are others, which nobody has renewed yet",
}


def set_variables(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Set what torch is to read, before groups are made; return what this has added.

    Raises:
        ConfigError: if a variable has a value with which nothing can be repaired.
    """
    for name, reason in _REFUSED.items():
        if (value := environment.get(name, "0")).lower() not in _OFF:
            raise _refusal(name, value, reason)
    if (value := environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF")).upper() == "DETAIL":
        reason = "groups have wrappers then, which are not renewed"
        raise _refusal("TORCH_DISTRIBUTED_DEBUG", value, reason)
    added: dict[str, str] = {}
    for names, reason in _SET.items():
        given = {name: environment[name] for name in names if name in environment}
        for name, value in given.items():
            if value.lower() not in _OFF:
                raise _refusal(name, value, reason)
        if not given:
            added[names[0]] = "0"
    environment.update(added)
    return added


def _refusal(name: str, value: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{name}={value} does not work with {_FLAG}: {reason}. Remove it, or leave the flag out."
    )
