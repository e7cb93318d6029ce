"""What Prometheus reads."""

import httpx
import openai
import pytest

from support.serving import SAMPLE_URL, RunningServer, user_message


def test_metrics_count_requests_and_tokens(embedded):
    with RunningServer(embedded, strict_model=True) as server, server.client() as client:
        response = client.chat.completions.create(model="nanovlm", messages=user_message("?", SAMPLE_URL), n=2)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=user_message("?"))
        sums = server.metrics()
        assert 'nanovlm_requests_total{status="404"} 1.0' in httpx.get(f"{server.url}/metrics").text
    assert sums["nanovlm_requests_total"] == 2 and sums["nanovlm_first_token_seconds_count"] == 1
    assert sums["nanovlm_prompt_tokens_total"] == response.usage.prompt_tokens
    assert sums["nanovlm_answer_tokens_total"] == response.usage.completion_tokens
    assert sums["nanovlm_answers_running"] == sums["nanovlm_answers_waiting"] == 0
    cfg, tokens = embedded.model.cfg, response.usage.prompt_tokens
    per_token = 2 * cfg.lm_n_blocks * cfg.lm_n_kv_heads * cfg.lm_head_dim * embedded.model.dtype.itemsize
    assert sums["nanovlm_kv_cache_used_bytes"] == 0, "no answer runs"
    assert sums["nanovlm_kv_cache_allocated_bytes"] >= tokens // 2 * per_token
