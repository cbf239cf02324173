"""The errors that vacsr raises on purpose, as one small tree.

Each message says what is wrong, what was expected, and what to do next. The command line turns the class into an
exit code: 2 for usage, 3 for the environment, 4 for data.
"""


class VacsrError(Exception):
    """Base of every error that vacsr raises on purpose."""

    exit_code = 1


class UsageError(VacsrError):
    """The call itself is wrong: an unknown name, a bad option, a recipe that does not parse."""

    exit_code = 2


class EnvironmentProblem(VacsrError):
    """The machine cannot do it: a missing extra, no GPU, a full disk."""

    exit_code = 3


class DataError(VacsrError):
    """The data cannot be used: wrong shape, bad ids, NaN, a broken file."""

    exit_code = 4


class ConfigError(UsageError):
    """A recipe or an override names a field that does not exist or a value that does not fit."""


class MissingExtra(EnvironmentProblem):
    """``MissingExtra(package, extra)``: an optional dependency is needed and missing."""

    def __str__(self) -> str:
        package, extra = self.args
        return f"{package} is not installed; it comes with an extra — run: pip install 'vacsr[{extra}]'"


class DiskFull(EnvironmentProblem):
    """No space left; what was there before is untouched."""


class FolderInUse(EnvironmentProblem):
    """Another process is writing to this folder."""


class NoSuchSplit(DataError):
    """The data are valid but have no split of this name; a caller that does not need it may continue."""


class OtherRun(DataError):
    """A checkpoint is complete but belongs to another run; a caller may start that run again."""


class ShapeMismatch(DataError):
    """Two arrays, or an array and a model, disagree on a dimension."""


class ProvenanceMismatch(DataError):
    """A model is given embeddings from another backbone, preprocessing or revision."""


class NonFiniteLoss(DataError):
    """The loss is NaN or infinite; the message names the step, the term and the batch."""


class NotFoldable(VacsrError):
    """This adapter's decode is not linear after the trunk, so it has no folded form."""
