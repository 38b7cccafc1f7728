"""Sources of conversions by what a folder holds: of Hugging Face, of Megatron, or of moe_ft."""

from pathlib import Path

from moe_ft.convert.huggingface.release import is_release, open_release
from moe_ft.convert.megatron_checkpoint import is_megatron_checkpoint, open_megatron_checkpoint
from moe_ft.convert.model import Model
from moe_ft.convert.remote_path import path_of
from moe_ft.convert.run_model import RunModel
from moe_ft.convert.source import open_source
from moe_ft.errors import ConfigError


def open_model(directory: str, iteration: int | None = None) -> Model:
    """Return the model in a directory or fsspec URL.

    Raises:
        MoeFtError: if there is none that can be converted; the message says why.
    """
    folder = path_of(directory)
    if isinstance(folder, Path) and not folder.is_dir():
        found = "is a file. Name the folder that it is in" if folder.exists() else "is not there"
        raise ConfigError(
            f"SRC={folder} must be a folder, and {found}. It may hold a run of moe_ft, checkpoints of "
            "Megatron, or a model of Hugging Face."
        )
    if is_release(folder):
        if iteration is not None:
            raise ConfigError(
                f"--iteration={iteration}: {folder} is a model of Hugging Face, which has no iterations. "
                "Leave it out."
            )
        return open_release(folder)
    if is_megatron_checkpoint(folder):
        return open_megatron_checkpoint(folder, iteration)
    return RunModel(open_source(directory.removeprefix("file://"), iteration))
