"""transformers as the oracle: the same GGUF weights in its own model, mapped and converted by its own code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def transformers_model_from_gguf(path: Path) -> Any:
    """What from_pretrained(gguf_file=...) builds, which itself refuses to run without one more package.

    The file is read once and not twice: gguf.GGUFReader takes 11 s on a vocabulary of 262,144.
    """
    with mock.patch("gguf.GGUFReader", functools.cache(gguf.GGUFReader)):
        settings = dict(load_gguf_checkpoint(str(path))["config"])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=shell)["tensors"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    absent, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all("lm_head" in name for name in absent), absent
    model.tie_weights()
    return model.eval()
