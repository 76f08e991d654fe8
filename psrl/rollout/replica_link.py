"""What both ends of the replica protocol must agree on: channel options, and how an error crosses."""

import traceback

import grpc

from psrl.errors import ActorDied, ActorError, CallTimeout, RemoteError

MAX_MESSAGE_BYTES = 64 << 20  # of one frame, both ways
_MAX_DETAIL_CHARS = 2500  # an error travels in a header, which is limited to 8 KiB


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """For servers and channels alike. Pings find a host that vanished without closing its connections."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
        ("grpc.enable_http_proxy", 0),  # replicas are reached directly, whatever proxy the environment names
        ("grpc.use_local_subchannel_pool", 1),  # a client's connection is its own, and ends with it
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def describe_error(error: BaseException) -> str:
    """Class name, text and traceback, as the details of a status."""
    trace = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}\n{str(error)[:_MAX_DETAIL_CHARS]}\n\n{trace[-_MAX_DETAIL_CHARS:]}"


def actor_error(failure: grpc.aio.AioRpcError, peer: str) -> ActorError:
    """The status of a failed call as one of our errors."""
    code, details = failure.code(), failure.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallTimeout(f"{peer} did not answer in time")
    if code is grpc.StatusCode.INTERNAL and "\n" in details:
        head, _, trace = details.partition("\n\n")
        name, _, text = head.partition("\n")
        return RemoteError(name, f"{peer}: {text}", trace)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL):
        return ActorDied(f"{peer} is gone: {details or code.name}")
    return RemoteError(code.name, f"{peer}: {details}", "")
