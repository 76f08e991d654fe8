"""What a checkpoint keeps of the control side: enough to offer the same remaining prompts in the same order.

Taken at version c, right after its publication: buffers before c are trained, everything else that was offered is
unfinished and will be offered again, first, in the order in which it was drawn. Rows and reservations are not kept.
"""

import msgspec

from psrl.control.messages import Counters, Prompt
from psrl.errors import ConfigError
from psrl.types import Version

FORMAT = 1


class UnfinishedGroup(msgspec.Struct, frozen=True):
    """A prompt that was offered but neither trained nor dropped. `offer`: the number of its last offer."""

    prompt: Prompt
    offer: int


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    version: Version
    attempt: int
    feed: bytes  # msgpack of the feed's position
    num_drawn: int  # prompts drawn from the feed in this line of history
    origin: int  # version at which drawing began
    unfinished: tuple[UnfinishedGroup, ...]  # by group id, the order of drawing
    counters: Counters
    log_bytes: int  # size of trajectories.jsonl; later lines are of a history that a resume leaves behind

    def for_another_log(self) -> "ControlState":
        """The same point, for a run whose log has nothing of what led to it: only unfinished groups are counted."""
        counters = Counters(offered=len(self.unfinished), in_flight=len(self.unfinished))
        return msgspec.structs.replace(self, counters=counters, log_bytes=0)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "ControlState":
        """Raises ConfigError when the bytes are no control state of this format."""
        try:
            state = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"the checkpoint's control state is damaged: {error}") from error
        if state.format != FORMAT:
            raise ConfigError(f"the checkpoint's control state has format {state.format}, this version reads {FORMAT}")
        return state
