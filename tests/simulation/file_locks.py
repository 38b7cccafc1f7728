"""Locks of the package filelock, whose bookkeeping is per real process and thread, for simulated ones.

The locks themselves stay `flock` on descriptors, which end with their process. Taken out are the registry
against forks, which would close the descriptors of all other simulated processes as those of a parent, and
destructors that run when their process is dead.
"""

import os
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

from filelock import _api

from tests.simulation.active import Patches, World, world
from tests.simulation.kernel import Thread

_NOTHING = nullcontext()
_KEY = "locks held by thread"


class _Registry:
    """Paths of locks that a thread holds, by which filelock finds that it waits for itself."""

    def __init__(self, real: Any) -> None:
        self._real = real

    @property
    def held(self) -> dict[Hashable, int]:
        current = world()
        if current is None:
            return self._real.held  # type: ignore[no-any-return]
        assert current.kernel.running is not None
        by_thread = current.process.local.setdefault(_KEY, {})
        return by_thread.setdefault(current.kernel.running, {})  # type: ignore[no-any-return]


class _PerThread(_api.ThreadLocalFileContext):
    """State of a lock in each thread."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._states: dict[Thread | None, Any] = {}

    @property
    def current(self) -> Any:
        thread = _running()
        found = self._states.get(thread)
        if found is None:
            found = self._states[thread] = _api.FileLockContext(**self._settings)
        return found

    @current.setter
    def current(self, state: Any) -> None:
        self._states[_running()] = state


def _running() -> Thread | None:
    current = world()
    return None if current is None else current.kernel.running


def _end_with_process(patches: Patches) -> None:
    """Let a lock be released by its destructor only while its process lives."""
    adopt: Callable[..., None] = _api.BaseFileLock._adopt_settings
    delete: Callable[..., None] = _api.BaseFileLock.__del__

    def adopt_settings(lock: Any, settings: Any) -> None:
        adopt(lock, settings)
        current = world()
        if current is not None:
            lock._process = current.process

    def release_unreachable(lock: Any) -> None:
        process = lock.__dict__.get("_process")
        if process is None:
            delete(lock)
            return
        thread = _running()
        if thread is not None and thread.process is process and process.is_alive:
            lock._release_abandoned_holds(exited_only=False)

    patches.set(_api.BaseFileLock, "_adopt_settings", adopt_settings)
    patches.set(_api.BaseFileLock, "__del__", release_unreachable)


def _ignore(world: World, *arguments: Any) -> None:
    pass


def install(patches: Patches) -> None:
    """Let locks of the package filelock belong to simulated processes and threads."""
    for name in ("ensure_current_process", "register_owned_descriptor", "register_fork_object"):
        patches.divert(_api, name, _ignore)
    patches.divert(_api, "_RESOLVE_DIR", lambda world, path: os.path.abspath(path))  # has no links
    patches.divert(_api, "fork_transition", lambda world, owner=None: _NOTHING)
    patches.set(_api, "_REGISTRY", _Registry(_api._REGISTRY))
    patches.set(_api, "ThreadLocalFileContext", _PerThread)
    _end_with_process(patches)
