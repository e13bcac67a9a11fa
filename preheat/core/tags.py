"""The closed list of capabilities that techniques provide, need or conflict with. No torch."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Tag"]


class Tag(StrEnum):
    """A capability of a build that techniques provide, need (`needs`) or exclude (`conflicts`). Never a technique's
    name.

    The list is closed, so that a misspelled tag fails at import and cannot silently drop a conflict. A new capability
    is a new member here.
    """

    # The device.
    CPU = "cpu"
    CUDA = "cuda"

    # Precision of matmuls and weights.
    BF16_COMPUTE = "bf16-compute"
    FP16_COMPUTE = "fp16-compute"
    FP8_COMPUTE = "fp8-compute"
    TF32_PRODUCTS = "tf32-products"
    BF16_WEIGHTS = "bf16-weights"
    LOSS_SCALING = "loss-scaling"
    FAKE_QUANTIZED_WEIGHTS = "fake-quantized-weights"

    # Which weights are trained.
    FROZEN_BASE = "frozen-base"
    """The model's own weights are frozen under an adapter, and may have another precision than the trained ones."""
    FROZEN_WEIGHTS = "frozen-weights"
    """Some weights of the model are frozen, and have the precision of the trained ones."""
    QUANTIZED_BASE = "quantized-base"
    MODIFIED_BASE = "modified-base"
    """The frozen weights are not those of the base model (PiSSA keeps the residual of its adapter)."""
    ADAPTER = "adapter"
    NON_LORA_ADAPTER = "non-lora-adapter"
    NO_TOWER_ADAPTERS = "no-tower-adapters"
    """Adapters leave the vision tower alone."""

    # The model.
    ATTENTION_PATTERN = "attention-pattern"
    SLIDING_WINDOW = "sliding-window"
    GLOBAL_TOKENS = "global-tokens"
    PER_HEAD_PATTERN = "per-head-pattern"
    """Attention heads of one layer see different keys."""
    EXPERTS = "experts"
    UNGATED_MLP = "ungated-mlp"
    CLASSIFICATION_HEAD = "classification-head"
    EXTENDED_CONTEXT = "extended-context"

    # How layers run.
    COMPILED_LAYERS = "compiled-layers"
    FUSED_LAYERS = "fused-layers"
    """Modules are replaced by fused ones, which know no DTensor."""
    FUSED_OPERATORS = "fused-operators"
    RECOMPUTATION = "recomputation"

    # Sharding and collectives.
    REPLICATED_WEIGHTS = "replicated-weights"
    SHARDED_WEIGHTS = "sharded-weights"
    SHARDED_STATES = "sharded-states"
    """Optimizer states are sharded across devices that hold all weights."""
    SHARDED_EXPERTS = "sharded-experts"
    TENSOR_PARALLEL = "tensor-parallel"
    SEQUENCE_PARALLEL = "sequence-parallel"
    PIPELINE_STAGES = "pipeline-stages"
    REDUCED_GRADIENTS = "reduced-gradients"
    """Gradients are summed over the ranks that see different sequences."""
    REDUCE_EACH_MICRO_BATCH = "reduce-each-micro-batch"
    RESHARD_AFTER_FORWARD = "reshard-after-forward"
    BF16_ALL_GATHER = "bf16-all-gather"

    # The optimizer.
    ELEMENTWISE_UPDATE = "elementwise-update"
    """Each weight is updated from its own gradient and state, so that shards update alone."""
    PER_MATRIX_STATES = "per-matrix-states"
    """States belong to whole matrices (Adafactor's rows and columns, APOLLO's projections), so that they cannot be
    cut."""
    STEP_IN_BACKWARD = "step-in-backward"

    # Data.
    MICRO_BATCH_SIZE = "micro-batch-size"
    GROWING_LENGTH = "growing-length"
    WHOLE_EXAMPLES = "whole-examples"
    """The objective scores an example as a whole: it cannot be cut into shorter sequences."""
