"""Adapters under SmolVLM's names: PEFT loads them onto the exported base model, which then computes the same."""

import json

import pytest
import torch

from models.formats.to_smolvlm import smolvlm_config, smolvlm_tensors
from models.lora import PARTS, merge
from nanovlm.export.adapters import write_smolvlm_adapters
from support import Package
from support.smolvlm import assert_same_logits

peft, transformers = Package("peft"), Package("transformers")


def export_of(model):
    """transformers' SmolVLM with the model's weights."""
    theirs = transformers.SmolVLMForConditionalGeneration(transformers.SmolVLMConfig(**smolvlm_config(model.cfg, 3, 2)))
    assert theirs.load_state_dict(smolvlm_tensors(model), strict=False).unexpected_keys == []
    theirs.tie_weights()
    return theirs.eval()


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("embeddings", [False, True], ids=["adapters", "embeddings"])
@pytest.mark.parametrize("parts", [("decoder",), ("vision_encoder", "MP"), PARTS], ids=str)
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_peft_loads_them_onto_the_exported_base(adapted, tiny_model, tmp_path, parts, embeddings, tied):
    model = adapted(parts, embeddings=embeddings, lm_tie_weights=tied)
    write_smolvlm_adapters(tmp_path, model, base="me/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == ("me/base", "CAUSAL_LM")
    base = tiny_model(lm_tie_weights=tied)
    theirs = peft.PeftModel.from_pretrained(export_of(base), tmp_path)
    ids, images = torch.randint(4, 40, (1, 20), generator=torch.manual_seed(0)), torch.rand(2, 3, 16, 16)
    ids[0, 2:6] = ids[0, 9:13] = 3
    assert_same_logits(merge(model), theirs, ids, images)
    with pytest.raises(AssertionError):
        assert_same_logits(base, theirs, ids, images)
    assert_same_logits(merge(model), theirs.merge_and_unload(), ids, images)


def test_a_trained_patch_embedding_is_refused(adapted, tmp_path):
    model = adapted(("decoder",))
    model.vision_encoder.patch_embedding.conv.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"conv.weight was trained in full, .* export the merged model"):
        write_smolvlm_adapters(tmp_path, model, "me/base")
