"""Whether an error is a cause, or only says that another rank is gone.

gloo, NCCL and torch's stores raise plain RuntimeErrors; their words are all there is to go by.
"""

from __future__ import annotations

import re

_LOST = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|caused pair closure|remote process (exited|has)"
    r"|NCCL communicator was aborted|failed to recv, got 0 bytes|Could not connect to|TCPStore|recvValue failed"
    r"|ranks? [\d, -]+ (has|have) ended"
)
_TIMED_OUT = re.compile(
    r"Timed out waiting|[Ww]ait timeout|Socket Timeout|timed out after \d+ *ms|collective operation timeout"
)


def is_consequence(error: BaseException | str) -> bool:
    """Whether an error (or its text) only says that talking to another rank failed: that rank knows the cause."""
    if isinstance(error, BaseException) and not isinstance(error, RuntimeError | ConnectionError):
        return False
    return bool(_LOST.search(str(error))) or timed_out(error)


def timed_out(error: BaseException | str) -> bool:
    """Whether the error says that another rank did not answer in time (rather than that its connection broke)."""
    return bool(_TIMED_OUT.search(str(error)))
