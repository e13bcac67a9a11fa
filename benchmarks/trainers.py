"""Defaults of each trainer that the settings of a run leave out: one entry per trainer, with the sources that were read.

An entry holds only facts that change memory or speed. A fact is listed if five rows of the published table depend on it, or if fewer rows would be more
than 20 % wrong without it; the comment beside it says so. `find_trainer` finds the entry of a row, by its repository or else by what it is like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from preheat.interop import trainer_defaults

__all__ = ["Row", "Trainer", "find_trainer"]

Row = Mapping[str, str]
Memory = Literal["allocated", "reserved", "nvidia-smi"]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The defaults of a trainer; the defaults of this class are those of transformers' Trainer with torch's own means."""

    name: str
    read: str
    """The version or date of the source that was read."""
    sources: tuple[str, ...] = ()

    reports: Memory = "allocated"
    """Which memory its figure is, if the row does not name it."""
    expandable_segments: bool = False
    """The allocator's segments grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`)."""
    logit_bytes: int = 4
    """Bytes per logit when backward begins, if the loss is compiled or in place (ours: 2)."""
    chunked_logit_bytes: int = 4
    """The same if the loss is "chunked" without being fused with the head."""
    loss_in_place: bool = False
    """Its loss keeps `logit_bytes` with tensor parallelism too; it is compiled or in place without a word about it."""
    split_logit_bytes: int = 12
    """Bytes per logit when the vocabulary is split across devices (ours: 6)."""
    loss_rows: int | None = None
    """Tokens per chunk of head and loss together when it fine-tunes."""
    chunks_logits: bool = False
    """Head and loss are chunked one after the other when it fine-tunes, so all logits are in memory in half precision."""
    gathers_again: bool = False
    """Sequence parallelism gathers a block's input again in backward."""
    torch_ddp: bool = True
    """Data parallelism without sharded optimizer states is DistributedDataParallel, whose buckets are as large as the weights."""
    fp16_gradients_in_fp16: bool = False
    """Gradients of fp16 weights are summed in fp16."""
    bf16_gradients_beside_sums: bool = False
    """A pipeline's micro-batch has its gradients in bf16 until they are added to fp32 sums, all at once."""
    hidden_dropout: bool = False
    """GPT models drop hidden states by default: two masks per layer."""
    whole_root: bool = True
    """FSDP leaves embedding and head to the root module, which stays gathered from a step's first layer to its last."""
    upcasts_rest: bool = False
    """The parts of a 4-bit base that are not quantized (embedding, norms, head) are cast to fp32, and so are hidden states."""
    keeps_quantized_inputs: bool = True
    """bitsandbytes before 0.44 keeps the inputs of 4-bit layers."""
    fused_norms: bool = False
    """Norms are one operator without a compiler too."""
    whole_quantization_states: bool = False
    """Scales of 4-bit weights are no parameters, so FSDP neither shards nor offloads them."""
    adds_in_place: bool = False
    """An adapter's product is added to the base's result in place, as ours is; peft's needs three results of a layer at once."""
    adapter_dropout: float = 0.05
    adapts: Mapping[str, str] = field(default_factory=lambda: {"lora": "q,v", "qlora": "all"})
    """Layers with adapters, by method."""
    adapts_all: tuple[str, ...] = ()
    """Models of which its example configurations adapt all layers."""
    recomputes: tuple[str, ...] = ()
    """Methods with which activation checkpointing is on by default."""
    one_micro_batch_per_stage: bool = False
    """A pipeline cuts what a device gets of a step into as many micro-batches as there are stages."""
    transformer_engine: bool = False
    """8-bit matmuls and attention are kernels written by hand, with no word of a compiler."""
    autocasts: bool = True
    """Matmuls are cast by autocast, if weights are in half precision and adapters in fp32."""
    peft_layers: bool = False
    """Adapters are peft's layers, which clone the results of 4-bit layers and cast the inputs of others to fp32."""
    bitsandbytes: bool = False
    """4-bit weights are dequantized by bitsandbytes."""
    mean_length: int | None = None
    """Tokens of a padded row in the mean, if a row says that lengths vary."""
    foreach_update: bool = False
    """AdamW is torch's default, many kernels over lists of tensors, which move three times the bytes of the fused one."""
    overlaps_update: bool = False
    """New weights are gathered while the next step's first layers compute."""
    host_optimizer: bool = False
    """With its optimizer on the host the device keeps bf16 shards and no gradients beyond two communication buckets."""


TRANSFORMERS = Trainer(
    name="transformers Trainer, TRL",
    read="transformers 4.36 to 4.46, peft 0.7 to 0.17, bitsandbytes 0.41 to 0.43 (2023-12 to 2025)",
    sources=(
        "huggingface/transformers src/transformers/models/llama/modeling_llama.py (fp32 copies in LlamaRMSNorm)",
        "huggingface/transformers src/transformers/trainer.py, huggingface/accelerate utils/fsdp_utils.py (auto_wrap by layer class)",
        "pytorch torch/distributed/fsdp/_flat_param.py (the root's shard stays gathered)",
        "bitsandbytes pull request 1270 (inputs kept before 0.44)",
        "arXiv:2106.09685 and peft/utils/constants.py (queries and values); arXiv:2305.14314 (QLoRA: all layers)",
        "huggingface/peft src/peft/utils/other.py (prepare_model_for_kbit_training recomputes, and casts what is in half precision to fp32)",
        "huggingface/peft src/peft/tuners/lora/layer.py (result + lora_B(lora_A(x)) * scaling; x in the adapters' dtype)",
        "huggingface/peft src/peft/tuners/lora/bnb.py (the result of a 4-bit layer is cloned)",
        "huggingface/transformers src/transformers/training_args.py (optim adamw_torch) and pytorch torch/optim/adamw.py (foreach)",
    ),
    foreach_update=True,
    recomputes=("qlora",),
    upcasts_rest=True,  # 6 rows: the three with FlashAttention 17 to 23 % too low without it
    peft_layers=True,
    bitsandbytes=True,
)
PEFT_COMPARISON = replace(
    TRANSFORMERS,
    name="peft's comparison of methods",
    read="2025 to 2026-10",
    sources=(
        "huggingface/peft method_comparison/MetaMathQA/run.py (no autocast; batches padded to their longest row)",
        "huggingface/peft method_comparison/MetaMathQA/results (tokens and seconds: 216 padded tokens a row)",
    ),
    autocasts=False,
    mean_length=216,
)
LITGPT = replace(
    TRANSFORMERS,
    name="litgpt",
    read="2023-10 (PyTorch 2.1) to 0.5 (2024)",
    sources=(
        "Lightning-AI/litgpt litgpt/finetune/lora.py (torch.cuda.max_memory_allocated; queries and values; dropout 0.05)",
        "Lightning-AI/litgpt litgpt/utils.py chunked_cross_entropy (128 tokens) and litgpt/model.py (RMSNorm with fp32 copies)",
        "Lightning-AI/litgpt config_hub/finetune/*/{lora,qlora}.yaml (which layers)",
        "Lightning-AI/litgpt extensions/thunder/pretrain.py (4 sequences, bf16-true, where a row says nothing)",
        "bitsandbytes pull request 1270",
    ),
    foreach_update=False,  # fused, on a GPU
    peft_layers=False,
    chunks_logits=True,
    adapts={"lora": "q,v", "qlora": "q,v"},
    adapts_all=("Gemma", "Phi-2", "Phi-3", "TinyLlama"),
    recomputes=(),
    upcasts_rest=False,
)
LLAMA_FACTORY = replace(
    TRANSFORMERS,
    name="LLaMA-Factory",
    read="0.4 to 0.9 (2023-12 to 2025)",
    sources=(
        "hiyouga/LLaMA-Factory src/llamafactory/hparams/finetuning_args.py (lora_dropout 0)",
        "hiyouga/LLaMA-Factory src/llamafactory/hparams/model_args.py (disable_gradient_checkpointing False)",
        "hiyouga/LLaMA-Factory wiki/Performance-comparison (under both tables: LoRA modules: all)",
        "memory in whole GB without a torch counter is taken to be nvidia-smi's",
    ),
    reports="nvidia-smi",
    adapter_dropout=trainer_defaults.LLAMA_FACTORY.adapter_dropout,
    adapts=trainer_defaults.LLAMA_FACTORY.adapts,
    recomputes=trainer_defaults.LLAMA_FACTORY.recomputes,
    upcasts_rest=False,
)
UNSLOTH = replace(
    TRANSFORMERS,
    name="Unsloth",
    read="2023-12 to 2025",
    sources=(
        "unslothai/unsloth unsloth/models/llama.py (all layers adapted, dropout 0, use_gradient_checkpointing=True, kernels of its own)",
        "unslothai/unsloth unsloth/kernels/cross_entropy_loss.py (the gradient takes the place of the half-precision logits)",
        "huggingface/accelerate src/accelerate/utils/operations.py (ConvertOutputsToFp32: a copy of the logits that forward returns)",
        "unslothai/notebooks (torch.cuda.max_memory_reserved, adamw_8bit, 2,048 tokens)",
    ),
    reports="reserved",
    logit_bytes=6,
    loss_in_place=True,
    keeps_quantized_inputs=False,
    fused_norms=True,
    adds_in_place=True,
    adapter_dropout=trainer_defaults.UNSLOTH.adapter_dropout,
    adapts=trainer_defaults.UNSLOTH.adapts,
    recomputes=trainer_defaults.UNSLOTH.recomputes,
    upcasts_rest=False,
)
UNSLOTHS_PEER = replace(TRANSFORMERS, name="transformers in Unsloth's notebooks", reports="reserved")
FSDP_QLORA = replace(
    TRANSFORMERS,
    name="fsdp_qlora",
    read="2024-03",
    sources=(
        "AnswerDotAI/fsdp_qlora train.py (get_wrapping_policy, peak reserved; setup_quantized_meta_for_peft: FSDP syncs no quant_state)",
        "bitsandbytes bitsandbytes/nn/modules.py (quant_state of Params4bit is an attribute)",
    ),
    reports="reserved",
    keeps_quantized_inputs=False,
    whole_quantization_states=True,
    upcasts_rest=False,
)
TORCHTUNE = Trainer(
    name="torchtune",
    read="0.2 to 0.6 (2024-07 to 2025-04)",
    sources=(
        "pytorch/torchtune torchtune/modules/loss/ce_chunked_output_loss.py (logits of all chunks in bf16, one chunk in fp32)",
        "pytorch/torchtune torchtune/training/_distributed.py (FSDP2)",
    ),
    chunked_logit_bytes=3,
    loss_rows=512,
    whole_root=False,
)
TORCHTITAN = Trainer(
    name="torchtitan",
    read="0.1 to 0.2 (2024-10 to 2025-11)",
    sources=(
        "pytorch/torchtitan run_train.sh (expandable segments since 2024-10)",
        "pytorch/torchtitan torchtitan/components/metrics.py (max_reserved_gib)",
        "pytorch torch/distributed/tensor/parallel/loss.py (logits gone; log-softmax, gradient, chances and product in fp32)",
        "pytorch/torchtitan torchtitan/distributed/pipeline_parallel.py (micro-batches left out: as many as stages)",
    ),
    reports="reserved",
    expandable_segments=True,
    split_logit_bytes=16,
    whole_root=False,
    one_micro_batch_per_stage=True,  # 3 rows; 405B over 512 devices -26 % without it
)
NANOTRON = Trainer(
    name="nanotron",
    read="2024-12",
    sources=(
        "huggingface/nanotron src/nanotron/parallel/data_parallel/utils.py (make_ddp; sums of its own beside sharded states)",
        "huggingface/nanotron src/nanotron/parallel/tensor_parallel/functional.py (sharded_cross_entropy)",
    ),
    whole_root=False,
)
MEGATRON = Trainer(
    name="Megatron-LM, NeMo, Megatron-Bridge",
    read="core 0.7 to 0.15 (2024 to 2025), NeMo 24.07 to 25.11, TransformerEngine 1.7 to 2.9",
    sources=(
        "NVIDIA/Megatron-LM megatron/core/tensor_parallel/{layers,cross_entropy}.py (input gathered again; loss in place)",
        "NVIDIA/Megatron-LM megatron/core/distributed (gradient buffers of its own; overlap_param_gather)",
        "NVIDIA/Megatron-LM megatron/training/arguments.py (accumulate_allreduce_grads_in_fp32 for bf16 alone)",
        "NVIDIA/Megatron-LM megatron/core/transformer/transformer_config.py (hidden_dropout 0.1)",
        "arXiv:2407.08608 (FlashAttention 3: at least 1.5 times FlashAttention 2 on Hopper; cuDNN's is taken to be near)",
    ),
    logit_bytes=6,
    loss_in_place=True,
    split_logit_bytes=6,
    gathers_again=True,  # 1 row of memory; a 15B over 8 devices +58 % without it
    torch_ddp=False,
    fp16_gradients_in_fp16=True,
    hidden_dropout=True,
    whole_root=False,
    overlaps_update=True,
    transformer_engine=True,
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON,
    name="Megatron-DeepSpeed",
    read="bigscience, 2022; DeepSpeed 0.5.9 to 0.6",
    sources=(
        "bigscience-workshop/Megatron-DeepSpeed megatron/mpu (those of Megatron-LM 2.4)",
        "microsoft/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (gradients in half precision)",
        "microsoft/DeepSpeed deepspeed/runtime/bf16_optimizer.py (update_hp_grads)",
    ),
    bf16_gradients_beside_sums=True,  # 2 rows, 12 and 14 % too low without it; the known rows' median is kept by it
    reports="nvidia-smi",
    gathers_again=False,
    overlaps_update=False,
    transformer_engine=False,
)
MEGATRON_DEEPSPEED_2021 = replace(
    MEGATRON_DEEPSPEED,
    name="Megatron-DeepSpeed of 2021",
    read="bigscience, 2021; DeepSpeed 0.4",
    sources=(
        "microsoft/DeepSpeed deepspeed/runtime/zero/stage1.py (reduce_scatter_gradients copies the gradients of all ranks in fp16)",
    ),
    fp16_gradients_in_fp16=False,  # two copies of 2 bytes: as much as fp32 sums
)
AUTOMODEL = replace(
    TRANSFORMERS,
    name="NeMo AutoModel",
    read="0.1 to 0.2 (2025)",
    sources=(
        "NVIDIA-NeMo/Automodel nemo_automodel/components/_peft/lora.py (dropout 0; layers of its own, in the base's dtype)",
        "NVIDIA-NeMo/Automodel examples/benchmark/configs (all linear layers adapted, FSDP2)",
    ),
    peft_layers=False,
    adapter_dropout=0.0,
    adapts={"lora": "all", "qlora": "all"},
    foreach_update=False,
    whole_root=False,
    upcasts_rest=False,
)
DEEPSPEED = replace(
    TRANSFORMERS,
    name="DeepSpeed ZeRO-3 with transformers",
    read="0.16 to 0.18 (2025)",
    sources=(
        "deepspeedai/DeepSpeed deepspeed/runtime/zero/stage3.py and offload_config.py (bf16 shards; gradients to the host)",
        "deepspeedai/DeepSpeed deepspeed/runtime/zero/config.py (reduce_bucket_size 5e8)",
    ),
    host_optimizer=True,  # 2 rows; an 8B over 8 devices +48 % without it
    foreach_update=False,
    whole_root=False,
    upcasts_rest=False,
)

# Repository, a word of the row's notes or accelerator, the trainer that ran it; the first that matches.
RAN: tuple[tuple[str, str, Trainer], ...] = (
    ("AnswerDotAI/fsdp_qlora", "", FSDP_QLORA),
    ("Lightning-AI/litgpt", "", LITGPT),
    ("NVIDIA-NeMo/Megatron-Bridge", "", MEGATRON),
    ("NVIDIA-NeMo/Automodel", "", AUTOMODEL),
    ("NVIDIA/Megatron-LM", "", MEGATRON),
    ("NVIDIA/NeMo", "", MEGATRON),
    ("bigscience-workshop/bigscience", "V100", MEGATRON_DEEPSPEED_2021),
    ("bigscience-workshop/bigscience", "", MEGATRON_DEEPSPEED),
    ("hiyouga/LLaMA-Factory", "Unsloth", UNSLOTH),
    ("hiyouga/LLaMA-Factory", "", LLAMA_FACTORY),
    ("huggingface/nanotron", "", NANOTRON),
    ("huggingface/peft", "cap 768", PEFT_COMPARISON),
    ("huggingface/peft", "", TRANSFORMERS),
    ("linkedin/Liger-Kernel", "", TRANSFORMERS),
    ("pytorch/ao", "torchtitan", TORCHTITAN),
    ("pytorch/ao", "torchtune", TORCHTUNE),
    ("pytorch/torchtitan", "", TORCHTITAN),
    ("pytorch/torchtune", "", TORCHTUNE),
    ("stas00/ml-engineering", "DeepSpeed", DEEPSPEED),
    ("unslothai/unsloth", "Unsloth", UNSLOTH),
    ("unslothai/unsloth", "", UNSLOTHS_PEER),
)


def find_trainer(row: Row) -> Trainer:
    """Returns the trainer that ran a row, else the one that trains with such settings."""
    text = f"{row['notes']} {row['gpu']}"
    for repository, word, trainer in RAN:
        if row["source_repo"] == repository and word in text:
            return trainer
    sharded = (row["dp_shard"] or "1") not in ("1", "1.0")
    if row["method"] != "pretrain":
        return TORCHTUNE if row["compile"] == "yes" else TRANSFORMERS
    if not sharded and (
        row["sequence_parallel"] or (row["precision"].startswith(("fp8", "mxfp8", "nvfp4")) and not row["compile"])
    ):
        return MEGATRON
    return TORCHTITAN if sharded else NANOTRON
