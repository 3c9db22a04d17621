from protocol.child import *  # noqa: F403
