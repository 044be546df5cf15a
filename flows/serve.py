"""`python -m flows.serve`: the deployment `pipeline/default`, in place of a work pool, a deploy and a worker.

Then, from anywhere that reaches the server:
    prefect deployment run 'pipeline/default' --watch --param 'overrides={"quantize_instances.bits": [2, 4]}'
"""

from __future__ import annotations

import sys
import time

from prefect.flows import EntrypointType
from prefect.settings import PREFECT_API_URL

from flows.pipeline import pipeline, server_answers

WAIT_SECONDS = 60.0


def main() -> None:
    """Serve until interrupted. Runs queue up behind one another: two must never share one workspace."""
    if not server_answers():
        # `prefect server start --background` returns before its server answers.
        print(f"Waiting for the Prefect server at {PREFECT_API_URL.value()} ...", flush=True)
        deadline = time.monotonic() + WAIT_SECONDS
        while not server_answers():
            if time.monotonic() > deadline:
                sys.exit("serve: error: no Prefect server; start one: prefect server start --background")
            time.sleep(0.5)
    pipeline.serve(
        name="default",
        description="Every stage of dvc.yaml that DVC considers changed.",
        limit=1,
        global_limit=1,
        pause_on_shutdown=False,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


if __name__ == "__main__":
    main()
