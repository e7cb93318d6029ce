"""The metrics that Prometheus reads at /metrics; each server has a registry of its own."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from models.inference.serving_caches import ImageCache, PrefixCache
from nanovlm.serving.engine import Engine

LATENCY_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics(Collector):
    """Counts requests and tokens, and reads the engine and the caches; without a cache its numbers are 0."""

    def __init__(self, engine: Engine, count_waiting: Callable[[], int]):
        self.engine, self.count_waiting = engine, count_waiting
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        status = "Requests by HTTP status; 499 if the client disconnected."
        self.requests = Counter("nanovlm_requests", status, ["status"], registry=registry)
        prompt = "Prompt tokens, image tokens included."
        self.prompt_tokens = Counter("nanovlm_prompt_tokens", prompt, registry=registry)
        self.answer_tokens = Counter("nanovlm_answer_tokens", "Generated tokens.", registry=registry)
        self.first_token, self.answer = (
            Histogram(f"nanovlm_{name}_seconds", what, buckets=LATENCY_BUCKETS_S, registry=registry)
            for name, what in (
                ("first_token", "Time to first token, from a request's arrival."),
                ("answer", "Request latency, from its arrival to its last token."),
            )
        )

    def collect(self) -> Iterator[Metric]:
        batch = self.engine.batch
        images, prefixes = batch.image_cache or ImageCache(0), batch.prefix_cache or PrefixCache(0)
        for name, what, number in (
            ("answers_running", "Sequences being decoded.", batch.running),
            ("answers_waiting", "Sequences that wait.", self.count_waiting()),
            ("kv_cache_used_bytes", "Keys and values of the sequences being decoded.", batch.cache_bytes_used),
            ("kv_cache_allocated_bytes", "Memory for keys and values, unused room too.", batch.cache_bytes_allocated),
            ("image_cache_used_bytes", "Encoded images kept.", images.bytes_used),
            ("prefix_cache_used_bytes", "Keys and values kept of sequences that have ended.", prefixes.bytes_used),
        ):
            yield GaugeMetricFamily(f"nanovlm_{name}", what, value=number)
        for name, what, number in (
            ("image_cache_queries", "Images of requests.", images.queries),
            ("image_cache_hits", "Images of requests that had been encoded before.", images.hits),
            ("prefix_cache_query_tokens", "Prompt tokens.", prefixes.queries),
            ("prefix_cache_hit_tokens", "Prompt tokens whose keys and values were cached.", prefixes.hits),
        ):
            yield CounterMetricFamily(f"nanovlm_{name}", what, value=number)

    def text(self) -> bytes:
        return generate_latest(self.registry)
