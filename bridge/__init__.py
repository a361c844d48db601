"""Hugging Face checkpoint directories in and out, without torch.

``load_checkpoint`` and ``read_into`` read one, ``save_checkpoint`` writes one that
``transformers.AutoModelForCausalLM.from_pretrained`` and vLLM read, ``name_map`` is the bijection of names between.
"""

from bridge.hf_read import load_checkpoint, read_into
from bridge.hf_write import decoder_parameters, save_checkpoint

__all__ = ["decoder_parameters", "load_checkpoint", "read_into", "save_checkpoint"]
