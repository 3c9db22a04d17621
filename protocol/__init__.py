"""What both sides of hexcomb must agree on.

Importing it sets the floor of TLS for the process: gRPC's Python interface has no setting for the lowest
version, and reads its cipher list from the environment once, when it is first imported. The list below is
for TLS 1.2 alone, and a TLS 1.2 handshake cannot use it with the P-256 certificates of a run, so that
only TLS 1.3 is left. `TLS_13_ONLY` is False where gRPC was imported first; then TLS 1.2 is still
possible, with forward secrecy and both sides authenticated. gRPC's fork handlers are switched off too: every child is
a new program, and the handlers abort it when the event loop's fork meets a busy gRPC thread.
"""

import os
import sys

_TLS_12_CIPHERS = "ECDHE-RSA-AES256-GCM-SHA384"

TLS_13_ONLY = "grpc" not in sys.modules or os.environ.get("GRPC_SSL_CIPHER_SUITES") == _TLS_12_CIPHERS
os.environ["GRPC_SSL_CIPHER_SUITES"] = _TLS_12_CIPHERS
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
