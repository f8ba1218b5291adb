"""What metalmm raises. Every class is an :class:`Error` and the built-in exception that a caller would expect."""

from __future__ import annotations


class Error(Exception):
    """Base of all errors that metalmm raises."""


class DeviceError(Error, RuntimeError):
    """A device cannot do what was asked: no memory, a module that does not load, an unknown device."""


class ShapeError(Error, ValueError):
    """Ranks or sizes that do not fit together, are zero, or exceed 32-bit element counts."""


class DTypeError(Error, TypeError):
    """An element type that is not supported, or an object that is not an array."""


class LayoutError(Error, ValueError):
    """Memory that cannot be used as it lies: not contiguous, read-only, misaligned or overlapping."""


class UnknownVariantError(Error, LookupError):
    """No variant of this id; the message lists near ones."""


class UnsupportedError(Error, ValueError):
    """The variant does not take this operation; the message says what it lacks and who supports it."""


class CompileError(Error, RuntimeError):
    """Source that does not compile; carries the compiler's own text."""


class CompilerNotFoundError(Error, RuntimeError):
    """No C++ compiler was found for the CPU device."""


class KernelError(Error, RuntimeError):
    """A dispatch that breaks a rule of Metal: unbound buffers, too many threads, barrier divergence."""


class ClosedError(Error, RuntimeError):
    """Use of a device, array or batch after its end."""


class ArgumentError(Error, TypeError):
    """A call whose arguments are missing, unknown or not of the kind that is taken; the message names them."""


class LoweringError(CompileError):
    """A construct of MSL that the CPU device cannot take; names file, line and construct."""


class ManifestError(Error, ValueError):
    """A manifest of variants that does not follow the format."""


# In the order of ErrorKind in csrc/core/error.h.
_BY_KIND = (
    DeviceError,
    ShapeError,
    DTypeError,
    LayoutError,
    UnknownVariantError,
    UnsupportedError,
    CompileError,
    CompilerNotFoundError,
    KernelError,
    ClosedError,
    ArgumentError,
)
