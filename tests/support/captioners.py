"""Captioners that differ from a loaded one."""

import copy

from nanovlm import Captioner
from nanovlm.processing.processor import Processor


def ending_with(captioner, *eos_token_ids):
    """The same captioner, whose answers end with other tokens."""
    tokenizer = copy.copy(captioner.tokenizer)
    tokenizer.eos_token_ids = eos_token_ids
    return Captioner(captioner.inference, Processor(captioner.processor.cfg, tokenizer))
