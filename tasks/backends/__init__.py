"""Adapters to third-party quantizers and engines: imported lazily, one extra of pyproject.toml each.

Their environment brings torchao, which any import of transformers' quantizers finds and which says on the terminal
which of its GPU kernels it could not load: none is used here.
"""

import logging
import os

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
