"""The errors a user can cause: one clear sentence each, shown without a traceback by the CLI and the app."""


class ResinspectError(Exception):
    """Base of all errors that say what was given, what is allowed and what to do."""


class CheckpointError(ResinspectError):
    """A folder or file cannot be loaded as a model."""


class CaptureError(ResinspectError):
    """A forward pass cannot be turned into a faithful map."""


class PromptError(ResinspectError):
    """The prompts cannot be run as given."""


class TraceError(ResinspectError):
    """A dataset or folder does not follow the trace convention."""


class OptionError(ResinspectError):
    """An argument has a value that is not allowed."""
