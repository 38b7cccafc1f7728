"""Lends Megatron-Bridge packages for GPUs that it names when it is imported, and does not use on CPUs.

`install` is called by a line in .venv/bridge when Python starts (tools/make_bridge_venv.sh): so scripts need
not know of it, nor ranks that `moe_ft` starts or forks. It imports nothing.

A package is there only while the part of Bridge that names it is imported. Megatron Core would otherwise
believe that there is Transformer Engine.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Parts of Bridge by the start of their names, and the packages that each gets.
_LENT = {
    "megatron.bridge.training.pretrain": ("nvidia_resiliency_ext.inprocess",),
    "megatron.bridge.peft.lora_layers": ("transformer_engine.pytorch",),
    "megatron.bridge.data.energon": (
        "megatron.energon.epathlib.epath",
        "megatron.energon.flavors.base_dataset",
        "megatron.energon.flavors.webdataset",
        "megatron.energon.task_encoder.base",
        "webdataset.autodecode",
    ),
}
# Parts that need diffusers. Bridge imports them only so that they register their models.
_LEFT_OUT = {
    "megatron.bridge.diffusion.models",
    *(
        f"megatron.bridge.recipes.{name}{part}"
        for name in ("flux", "wan")
        for part in ("", ".h100")
    ),
}


class _AnyMeta(type):
    """Type of classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _made(name)


def _made(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyMeta(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


class _LentModule(ModuleType):
    """Module in which every name is a class that nobody makes an object of."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _made(name)


class _Lender(MetaPathFinder, Loader):
    """Finds the modules above as Python does, and lends them packages while they run."""

    def __init__(self) -> None:
        self._loaders: dict[str, Loader] = {}

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _LEFT_OUT:
            return ModuleSpec(name, self, is_package=True)
        if not _packages_of(name):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _LEFT_OUT:
            return
        lent = [each for each in _packages_of(name) if each not in sys.modules]
        sys.modules |= {each: _LentModule(each) for each in lent}
        try:
            self._loaders[name].exec_module(module)
        finally:
            for each in lent:
                del sys.modules[each]


def _packages_of(name: str) -> list[str]:
    """Return the packages that a module gets, each after its parents, which are new."""
    packages = []
    for start, names in _LENT.items():
        if name.startswith(start):
            for each in names:
                words = each.split(".")
                packages += [".".join(words[: end + 1]) for end in range(len(words))]
    return [each for each in dict.fromkeys(packages) if each != "megatron"]


def install() -> None:
    """Lend in this process; a second call does nothing."""
    if not any(isinstance(each, _Lender) for each in sys.meta_path):
        sys.meta_path.insert(0, _Lender())
