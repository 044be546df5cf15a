"""`hub`: a Hugging Face id and revision, checked from its small files before the large ones are fetched."""

from __future__ import annotations

import sys
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tasks.console import timed
from tasks.contracts import InputError
from tasks.moe.headers import read_index, weight_files
from tasks.params import HubModel
from tasks.sources.local_model import CODE_FILES, SIDE_FILES, adopt, check_config
from tasks.sources.shards import read_config

TRANSPORTS = ("httpx", "httpx2", "httpcore")


def build(
    folder: Path, params: HubModel, endpoint: str | None = None, cache: Path | None = None
) -> dict[str, str]:
    """Fetch the checkpoint into the hub's cache (an interrupted download is resumed) and bring it to
    `folder`.

    endpoint: another hub than the environment's (HF_ENDPOINT); cache: another cache than the user's.
    Returns the commit that the revision stood for. Raises InputError for an unknown, closed or unreachable
    repository, and as `local_model.adopt` does.
    """
    where = f"{params.id} at revision {params.revision}"
    side_files = [*SIDE_FILES, *(CODE_FILES if params.trust_remote_code else ())]

    def fetch(patterns: list[str], revision: str) -> Path:
        return Path(
            snapshot_download(
                params.id, revision=revision, allow_patterns=patterns, endpoint=endpoint, cache_dir=cache
            )
        )

    try:
        snapshot = fetch(side_files, params.revision)  # without network: as an earlier run fetched it
        commit = snapshot.name
        names = _file_names(params.id, commit, endpoint)
        if names is None:
            print(f"  the hub cannot be reached: using commit {commit}, fetched earlier", file=sys.stderr)
            names = [path.name for path in snapshot.iterdir()]
        check_config(read_config(snapshot), where, params.trust_remote_code)
        weights = weight_files(names, read_index(snapshot), where)
        with timed(f"fetching {len(weights)} weight files of {params.id}"):
            fetch([*side_files, *weights], commit)
    except HFValidationError as error:
        raise InputError(f"hub.id is '{params.id}': {error}") from None
    except GatedRepoError:
        raise InputError(
            f"hub.id is '{params.id}': access must be granted on its page, then log in with 'hf auth login'"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"hub.id is '{params.id}': no such repository, or it is private: check the id"
        ) from None
    except RevisionNotFoundError:
        raise InputError(f"hub.revision is '{params.revision}': {params.id} has no such revision") from None
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"cannot fetch {where}: {reason}; without network, place the checkpoint's folder on this machine "
            "and use source 'path'"
        ) from None
    adopt(snapshot, folder, params.trust_remote_code)
    return {"id": params.id, "revision": params.revision, "commit": commit}


def _file_names(id: str, commit: str, endpoint: str | None) -> list[str] | None:
    """The names of a commit's files; None when the hub cannot be reached."""
    try:
        info = HfApi(endpoint=endpoint).model_info(id, revision=commit, timeout=30)
    except HfHubHTTPError:
        raise
    except Exception as error:
        # The hub client's transport errors share no public base class with its own.
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in TRANSPORTS:
            raise
        return None
    return [item.rfilename for item in info.siblings or []]
