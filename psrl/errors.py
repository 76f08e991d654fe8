"""The error tree of PSRL. Raise where it is known, catch where something can be done.

    PsrlError
    |- ConfigError          the user can fix it; says which key and what to change
    |- DataError            a data file is not what it must be; names file, row and column
    |- ActorError           something about a call to another actor
    |  |- ActorDied         the peer is gone
    |  |- CallTimeout       no answer before the deadline
    |  |- Overloaded        the peer's mailbox is full
    |  |- RemoteError       the handler raised; carries the remote traceback as text
    |  `- WireError         a frame is too large, malformed or unknown
    |- StorageError         shared memory: segment, queue or weight slot
    |  |- ArenaFull         no room for the row; says how much is missing
    |  |- UnknownKey        a key, field or partition is not there
    |  |- NotReady          fewer rows than asked for were ready by the deadline
    |  |- Revoked           the lease was taken back; start again on the newest version
    |  `- ChecksumMismatch  bytes are not what was committed
    |- LinkError            bulk data to or from another node did not get there; says which peer and why
    |- CheckpointError      a checkpoint could not be written or read; the last good one stands
    |- StaleMessage         a message of an older epoch
    |- EngineError          an inference engine failed
    |- BenchError           a measurement did not come about, or cannot be true
    `- RunFailed            the run as a whole cannot go on

Each class says in its docstring what it means for who catches it.
"""


class PsrlError(Exception):
    """Base of everything PSRL raises on purpose."""


class ConfigError(PsrlError):
    """One or more settings cannot work. `problems` has one plain sentence each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(PsrlError):
    """A data file is not what it must be."""


class ActorError(PsrlError):
    """A call to another actor did not give an answer."""


class ActorDied(ActorError):
    """The peer ended, or its connection broke, before it answered."""


class CallTimeout(ActorError):
    """The peer did not answer before the deadline."""


class Overloaded(ActorError):
    """The peer's mailbox is full; try again later."""


class RemoteError(ActorError):
    """The remote handler raised. `error` is the class name there, `remote_traceback` its text."""

    def __init__(self, error: str, text: str, remote_traceback: str) -> None:
        self.error, self.text, self.remote_traceback = error, text, remote_traceback
        super().__init__(f"{error}: {text}\n--- remote traceback ---\n{remote_traceback}")


class WireError(ActorError):
    """A frame is too large, malformed, or of an unknown kind."""


class StorageError(PsrlError):
    """Shared memory could not be had, mapped or read."""


class ArenaFull(StorageError):
    """No room for the row; the text says how much is missing and which key to raise."""


class UnknownKey(StorageError):
    """A partition, key or field that is not there."""


class NotReady(StorageError):
    """Fewer rows than asked for were ready by the deadline; none was taken."""


class Revoked(StorageError):
    """The lease is more than one version old and was taken back."""


class ChecksumMismatch(StorageError):
    """The bytes read are not those that were committed."""


class LinkError(PsrlError):
    """Bulk data to or from another node did not get there. `status` says how it ended, the text why."""

    def __init__(self, text: str, status: str = "refused") -> None:
        self.status = status
        super().__init__(text)


class CheckpointError(PsrlError):
    """A checkpoint could not be written or read. What was there before is untouched."""


class StaleMessage(PsrlError):
    """A message of an older epoch of the run was refused."""


class EngineError(PsrlError):
    """An inference engine failed."""


class BenchError(PsrlError):
    """A measurement did not come about, or its result cannot be true; the text says which and why."""


class RunFailed(PsrlError):
    """The run cannot go on; the text names the first cause."""
