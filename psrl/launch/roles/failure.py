"""An actor that ends by an error ends its process, by name."""

from psrl.actor import Runtime
from psrl.errors import RunFailed


async def raise_when_failed(runtime: Runtime) -> None:
    """Wait until an actor of the runtime fails; then RunFailed with its error as the cause."""
    failed = await runtime.wait_failed()
    raise RunFailed(f"{failed.actor}: {type(failed.error).__name__}: {failed.error}") from failed.error
