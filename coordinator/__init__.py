"""The authority. `protocol` comes first, since it sets the floor of TLS before gRPC is imported."""

import protocol as protocol
