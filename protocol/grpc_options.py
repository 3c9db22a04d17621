"""Channel and server arguments on which both sides must agree: message size, signs of life, no compression.
Pure.

A client that pings more often than its server allows is thrown out by gRPC, so the two halves stand
together here.
"""

MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_MS = 15_000
KEEPALIVE_TIMEOUT_MS = 10_000

Options = list[tuple[str, int]]

_BOTH: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: Options = [
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # a redialled channel never inherits another's broken connection
    ("grpc.enable_http_proxy", 0),
]
"""For every channel of ours, beside `protocol.tls.channel_options`."""

SERVER_OPTIONS: Options = [
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),
]
"""For every server of ours: a compressed message is refused, and two servers never share a port."""

JOIN_SERVER_OPTIONS: Options = [
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", 16 << 10),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_allowed_incoming_connections", 256),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
]
"""For the one port that strangers may call: small messages, few connections, none of which stays for long."""
