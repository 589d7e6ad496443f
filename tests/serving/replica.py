"""`python -m tests.serving.replica PORT NUMBER`: a fake server as a process, which says its number slowly or dies.

A prompt "die" kills it; "slow" streams the number and then waits for ever; others get the number.
"""

import asyncio
import os
import signal
import sys

from tests.serving.fake import HANG, FakeServer, completion, plain, stream


async def main() -> None:
    number = sys.argv[2]

    def answer(path, body, n):
        if path == "/health":
            return plain(200, "{}")
        if path == "/v1/models":
            return plain(200, '{"data": [{"id": "fake"}]}')
        if body.get("prompt") == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if body.get("prompt") == "slow":
            return [*stream(completion(number)[0], end=False), HANG]
        return stream(*completion(number, "b", "c"))

    server = FakeServer(answer, int(sys.argv[1]))
    async with server:
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main())
