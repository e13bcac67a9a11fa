"""Tiny vision-language models, each with its tokenizer and image processor in a folder; images drawn for it, and conversations about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's own, for images and text."""
MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
COLOURS = {
    "red": (200, 30, 30),
    "green": (30, 160, 40),
    "blue": (20, 40, 220),
    "grey": (120, 120, 120),
    "yellow": (230, 220, 20),
    "black": (5, 5, 5),
    "white": (250, 250, 250),
    "pink": (250, 150, 190),
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_INTERLEAVED = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
_LEARNED = {"num_position_embeddings": 16}
QWEN: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {"num_attention_heads": 2, "num_key_value_heads": 1},
        {"mrope_section": [2, 3, 3]},
        {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"num_attention_heads": 2, "num_key_value_heads": 1},
        {"mrope_section": [2, 3, 3]},
        {"window_size": 16, "fullatt_block_indexes": [1]},  # windows of 2 x 2 tokens
    ),
    "qwen3_vl": ("Qwen3VL", {}, _INTERLEAVED, {**_LEARNED, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", _EXPERTS, _INTERLEAVED, {**_LEARNED, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": ("Qwen3_5", _LINEAR, {**_INTERLEAVED, "partial_rotary_factor": 1.0}, _LEARNED),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24},
        {**_INTERLEAVED, "partial_rotary_factor": 1.0},
        _LEARNED,
    ),
}
"""Of each family its class, and what its text, positions and tower have of their own."""


_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GEMMA4_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}\n\n<|image|>\n\n{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
_MISTRAL_TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "[/INST]{% else %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}</s>"
    "{% endif %}{% endfor %}"
)
_SMOL_TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0].type == 'image' %}:{% else %}: "
    "{% endif %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<image>"
    "{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
SQUARES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "class": "Gemma3ForConditionalGeneration",
        "marks": ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        "template": _GEMMA_TEMPLATE,
        "config": lambda piece: {
            "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "boi_token_index": piece("<start_of_image>"),
            "eoi_token_index": piece("<end_of_image>"),
            "image_token_index": piece("<image_soft_token>"),
        },
        "text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "processor": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    },
    "gemma4": {
        "class": "Gemma4ForConditionalGeneration",
        "marks": ["<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>"],
        "template": _GEMMA4_TEMPLATE,
        "config": lambda piece: {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 160,
                "standardize": True,
            },
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [4, 4],
                "output_proj_dims": 16,
            },
            "boi_token_id": piece("<|image>"),
            "eoi_token_id": piece("<image|>"),
            "image_token_id": piece("<|image|>"),
            "video_token_id": piece("<|video|>"),
            "audio_token_id": piece("<|audio|>"),
        },
        "text": {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "use_bidirectional_attention": "vision",
            "vocab_size_per_layer_input": 320,
            "max_position_embeddings": 512,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
        },
        "processor": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2}
        | {"max_soft_tokens": 70, "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3},
    },
    "mistral3": {
        "class": "Mistral3ForConditionalGeneration",
        "marks": ["[INST]", "[/INST]", "<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "template": _MISTRAL_TEMPLATE,
        "config": lambda piece: {
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
            "image_token_index": piece("[IMG]"),
            "spatial_merge_size": 2,
        },
        "text": {"model_type": "mistral", "sliding_window": None},
        "processor": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 32},
            "patch_size": {"height": 4, "width": 4},
        },
    },
    "smolvlm": {
        "class": "SmolVLMForConditionalGeneration",
        "marks": ["<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"]
        + [f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)],
        "template": _SMOL_TEMPLATE,
        "config": lambda piece: {
            "vision_config": _SIGLIP,
            "image_token_id": piece("<image>"),
            "scale_factor": 2,
        },
        "text": {"model_type": "llama"},
        "processor": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
    },
}
"""Families whose tower takes pixels: what each has of its own."""


def tiny_folder(folder: Path, family: str = "qwen3_vl") -> Path:
    """A model's folder with random weights; biases, norms and learned positions are drawn too, so that leaving one out is seen."""
    import transformers

    from preheat.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([("0" * 32, "What colour is it? The colour is. user assistant")], vocabulary=290)
    own = SQUARES.get(family, {"marks": MARKS, "template": TEMPLATE})
    tokenizer.add_special_tokens({"additional_special_tokens": own["marks"]})
    tokenizer.chat_template = own["template"]
    if family.startswith("gemma"):
        tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    piece = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    if family in QWEN:
        _, more, positions, seen = QWEN[family]
        rope = {"rope_type": "default", "rope_theta": 10000.0, **positions}
        whole: dict[str, Any] = {
            "text_config": {**text, "rope_parameters": rope, **more},
            "vision_config": {**_TOWER, **seen},
            "image_token_id": piece("<|image_pad|>"),
            "video_token_id": piece("<|video_pad|>"),
            "vision_start_token_id": piece("<|vision_start|>"),
            "vision_end_token_id": piece("<|vision_end|>"),
        }
        cls, processor = QWEN[family][0] + "ForConditionalGeneration", PROCESSOR
    else:
        whole = {"text_config": {**text, **own["text"]}, **own["config"](piece)}
        cls, processor = own["class"], {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **own["processor"]}
    config = transformers.AutoConfig.for_model(family, **whole, tie_word_embeddings=family.startswith("gemma"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, cls)(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                middle = p.mean().round()  # 1 for the weights of norms, but for those that add 1 themselves
                p.normal_(0, 0.25 if "pos_embed" in name or "experts" in name or "gate.weight" in name else 0.15)
                if "norm" in name and name.endswith("weight"):
                    p.add_(middle)
                if "conv1d" in name:  # small ones make a recurrent layer amplify rounding
                    p.mul_(3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def draw(folder: Path, name: str, colour: tuple[int, int, int], size: tuple[int, int]) -> str:
    """An image of one colour with some noise, [width, height]."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(len(name)).integers(-15, 15, (size[1], size[0], 3))
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(folder / name)
    return name


SIZES = [(16, 16), (24, 16), (16, 32), (20, 20), (40, 24), (16, 16), (33, 17), (24, 24)]


def questions(folder: Path) -> list[dict[str, Any]]:
    """Eight rows in both layouts with images of different sizes; two of the images stand in one row too."""
    rows: list[dict[str, Any]] = []
    for (colour, rgb), size in zip(COLOURS.items(), SIZES, strict=True):
        draw(folder, f"{colour}.png", rgb, size)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": "<image>What colour is it?"},
                    {"role": "assistant", "content": f"It is {colour}."},
                ],
                "images": [f"{colour}.png"],
            }
        )
    return rows


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
