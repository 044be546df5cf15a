"""The steps of the pipeline (verbs) and what they know (nouns); the environment is set before any library reads it."""

import os

# Telemetry is off (MLflow ignores DO_NOT_TRACK=1).
os.environ.update(
    DO_NOT_TRACK="true",
    MLFLOW_DISABLE_TELEMETRY="true",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)
# Waiting threads sleep: beside other work, threads that spin made small matrix products 25 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
