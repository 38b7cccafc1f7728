"""A module that leaves a thread running of which Python does not know."""

import ctypes

_c = ctypes.CDLL(None)
_thread = ctypes.c_ulong()
assert _c.pthread_create(ctypes.byref(_thread), None, _c.pause, None) == 0
