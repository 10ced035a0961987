"""Tiny random DeepSeek-V2 and V3 models: MLA attention and mixture of experts at 16 million parameters.

They answer nonsense, and repeatably so: they exist to take the loader, the KV cache and the engine
through the shapes of DeepSeek on any machine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

Variant = Literal["v2", "v3"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


class TinyModelError(Exception):
    """The model cannot be made; the message says what is wrong and what to do."""


def make_tiny_deepseek(target: Path, *, variant: Variant, tokenizer_from: Path, seed: int = 0) -> Path:
    """Writes a random DeepSeek-V2 or V3 model folder; does nothing when the same one is there already.

    4 layers (the first dense), hidden size 128, 4 heads, 8 routed experts of which 2 are used and one
    shared expert; bfloat16 like the real ones. The MLA ranks (512 + 64) are theirs too, because engines
    have kernels for no other (and on CPUs with AMX for no other format). The folder appears at
    `target` in one step.

    Args:
        target: folder to make.
        variant: "v2" (greedy routing) or "v3" (noaux_tc routing with a correction bias).
        tokenizer_from: model folder whose tokenizer and chat template are copied (at most 49,152 tokens).
        seed: of the random weights.

    Returns:
        `target`.

    Raises:
        TinyModelError: torch or transformers is missing, `tokenizer_from` has no tokenizer, or `target`
            holds something else.
    """
    recipe = f"tiny-deepseek-{variant}-{seed}-2"
    if target.exists() and any(target.iterdir()):
        if _recipe(target) == recipe:
            return target
        raise TinyModelError(f"{target} holds something else: remove it or name another folder")
    if not (tokenizer_from / "tokenizer.json").is_file():
        raise TinyModelError(f"{tokenizer_from} has no tokenizer.json: name a folder with a tokenizer")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(partial, variant, seed, recipe)
        for name in _TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copy(tokenizer_from / name, partial / name)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write(folder: Path, variant: Variant, seed: int, recipe: str) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config
        from transformers.utils import logging as transformers_logging
    except ImportError as exc:
        raise TinyModelError(f"making a tiny DeepSeek needs torch and transformers: {exc}") from exc

    transformers_logging.disable_progress_bar()
    config = (DeepseekV2Config if variant == "v2" else DeepseekV3Config)(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=48,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=4096,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    config.topk_method = "greedy" if variant == "v2" else "noaux_tc"
    config.sealmesh_recipe = recipe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)


def _recipe(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    found = config.get("sealmesh_recipe") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None
