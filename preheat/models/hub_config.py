"""Fetches the config.json of a model on the Hugging Face hub, which is all that a plan needs. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from preheat.errors import RecipeError
from preheat.hardware.connectivity import is_hub_reachable

__all__ = ["find_hub_folder", "is_hub_name"]

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Returns True for a name of the form `owner/model`; paths such as `./model` and `~/model` have another."""
    return _NAME.fullmatch(name) is not None


def find_hub_folder(name: str) -> Path | None:
    """Returns the folder of the hub's cache that holds a model's config.json, downloading that one file if needed.

    Returns:
        None if `name` is not of the form `owner/model`, or there is no such model in the cache or, with a network, on
        the hub.

    Raises:
        RecipeError: the model is gated, or has no config.json.
    """
    if not is_hub_name(name):
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=not is_hub_reachable())).parent
    except GatedRepoError:
        raise RecipeError(
            f"{name}: the hub gives its config.json only to those who accepted its licence; accept it on the model's "
            "page, then `hf auth login`"
        ) from None
    # Both are EntryNotFoundErrors, but here the file may exist on the hub.
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        return None
    except EntryNotFoundError:
        raise RecipeError(
            f"{name}: has no config.json on the hub, so it is not a model of transformers (perhaps a GGUF file or an "
            "adapter); name the model that it was made from"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError):
        return None
