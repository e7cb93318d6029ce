"""What Prometheus reads."""

from support.serving import SAMPLE_URL, RunningServer, http, user_message


def test_metrics_count_requests_and_tokens(embedded):
    with RunningServer(embedded) as server:
        usage = server.post({"messages": user_message("?", SAMPLE_URL)}).json()["usage"]
        assert server.post({"messages": []}).status_code == 400
        sums = server.metrics()
        assert 'nanovlm_requests_total{status="400"} 1.0' in http.get(f"{server.url}/metrics").text
    assert sums["nanovlm_requests_total"] == 2 and sums["nanovlm_first_token_seconds_count"] == 1
    assert sums["nanovlm_prompt_tokens_total"] == usage["prompt_tokens"]
    assert sums["nanovlm_answer_tokens_total"] == usage["completion_tokens"]
    assert sums["nanovlm_answers_running"] == sums["nanovlm_answers_waiting"] == 0
    assert sums["nanovlm_image_cache_hits_total"] == sums["nanovlm_prefix_cache_hit_tokens_total"] == 0, "no caches"
    cfg, tokens = embedded.model.cfg, usage["prompt_tokens"]
    per_token = 2 * cfg.lm_n_blocks * cfg.lm_n_kv_heads * cfg.lm_head_dim * embedded.model.dtype.itemsize
    assert sums["nanovlm_kv_cache_used_bytes"] == 0, "no answer runs"
    assert sums["nanovlm_kv_cache_allocated_bytes"] >= tokens * per_token
