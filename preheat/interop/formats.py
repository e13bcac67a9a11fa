"""The formats that preheat reads, by name."""

from __future__ import annotations

from collections.abc import Mapping

from preheat.interop.automodel import AUTOMODEL
from preheat.interop.axolotl import AXOLOTL
from preheat.interop.hf_trainer import HF_TRAINER
from preheat.interop.litgpt import LITGPT, LITGPT_PRETRAIN
from preheat.interop.llama_factory import LLAMA_FACTORY
from preheat.interop.megatron import MEGATRON
from preheat.interop.megatron_bridge import MEGATRON_BRIDGE
from preheat.interop.megatron_swift import MEGATRON_SWIFT
from preheat.interop.ms_swift import MS_SWIFT, MS_SWIFT_PRETRAIN, MS_SWIFT_RLHF
from preheat.interop.reading import Format
from preheat.interop.torchtitan import TORCHTITAN
from preheat.interop.trl import TRL, TRL_DPO
from preheat.interop.unsloth import UNSLOTH

__all__ = ["FORMATS"]

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        AXOLOTL,
        LLAMA_FACTORY,
        TRL,
        TRL_DPO,
        HF_TRAINER,
        UNSLOTH,
        AUTOMODEL,
        LITGPT,
        LITGPT_PRETRAIN,
        TORCHTITAN,
        MEGATRON,
        MS_SWIFT,
        MS_SWIFT_PRETRAIN,
        MS_SWIFT_RLHF,
        MEGATRON_SWIFT,
        MEGATRON_BRIDGE,
    )
}
