"""The errors a user can cause: one clear sentence each, shown without a traceback by the CLI and the app."""

from typing import Any


class ResinspectError(Exception):
    """Base of all errors that say what was given, what is allowed and what to do."""


class CheckpointError(ResinspectError):
    """A folder or file cannot be loaded as a model."""


class CaptureError(ResinspectError):
    """A forward pass cannot be turned into a faithful map."""


class UnknownFamilyError(CaptureError):
    """No family recognises a model; ``reason`` says in one clause what was in the way."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class MapError(CaptureError):
    """The map of a forward pass is wrong; ``trace`` holds it, for whoever asks what is wrong with it."""

    def __init__(self, message: str, trace: Any = None) -> None:
        super().__init__(message)
        self.trace = trace


class PromptError(ResinspectError):
    """The prompts cannot be run as given."""


class TraceError(ResinspectError):
    """A dataset or folder does not follow the trace convention."""


class OptionError(ResinspectError):
    """An argument has a value that is not allowed."""
