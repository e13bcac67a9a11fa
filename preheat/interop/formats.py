"""The formats that preheat reads, by name."""

from __future__ import annotations

from collections.abc import Mapping

from preheat.interop.automodel import AUTOMODEL
from preheat.interop.axolotl import AXOLOTL
from preheat.interop.hf_trainer import HF_TRAINER
from preheat.interop.litgpt import LITGPT, LITGPT_PRETRAIN
from preheat.interop.llama_factory import LLAMA_FACTORY
from preheat.interop.reading import Format
from preheat.interop.trl import TRL, TRL_DPO
from preheat.interop.unsloth import UNSLOTH

__all__ = ["FORMATS"]

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (AXOLOTL, LLAMA_FACTORY, TRL, TRL_DPO, HF_TRAINER, AUTOMODEL, LITGPT, LITGPT_PRETRAIN, UNSLOTH)
}
