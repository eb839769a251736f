"""The coordinator of jax.distributed in a process of its own. In process 0, where jax has it, its loss would abort all
others; so process 0 is lost as any other is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

# Seconds for which the coordinator outlives the last goodbye: a process that is slower to hang up takes the closed
# connection for a failure and aborts.
GRACE = 1.0


class Coordinator:
    """What process 0 holds in place of jax's own service. RuntimeError where it cannot listen at the address."""

    def __init__(self, address: str, num_nodes: int, **options: Any) -> None:
        command = [sys.executable, "-m", __name__, json.dumps([address, num_nodes, options])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if not self._process.stdout.readline():
            raise RuntimeError(f"no coordinator can be started at {address}; is the port free?")

    def shutdown(self) -> None:
        """Ends it, and waits for its end."""
        self._process.communicate(b"end")


def main(arguments: str) -> None:
    """Serves until process 0 says that it is the end, or has been gone for so long that the others know it."""
    from jaxlib import _jax

    address, num_nodes, options = json.loads(arguments)
    service = _jax.get_distributed_runtime_service(address, num_nodes, **options)
    print("listening", flush=True)
    is_end = sys.stdin.read()
    time.sleep(GRACE if is_end else options["heartbeat_timeout"] + 5)
    service.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
