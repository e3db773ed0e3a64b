"""Errors for the mistakes that a GPU refuses."""


class DeviceMismatch(RuntimeError):
    """Tensors of two devices in one operation."""


class CaptureError(RuntimeError):
    """A wait, or a copy that waits, while a graph is captured."""


class HostRace(RuntimeError):
    """Pinned memory was written while a copy from it was under way."""
