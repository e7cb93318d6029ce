"""The metrics that Prometheus reads at /metrics; each server has a registry of its own."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from models.inference.serving_caches import ImageCache, PrefixCache

LATENCY_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class CacheCollector(Collector):
    """How often the caches between requests were of use; without a cache its numbers are 0."""

    def __init__(self, image_cache: ImageCache | None, prefix_cache: PrefixCache | None):
        self.image_cache, self.prefix_cache = image_cache, prefix_cache

    def collect(self) -> Iterator[Metric]:
        images, prefixes = self.image_cache or ImageCache(0), self.prefix_cache or PrefixCache(0)
        for name, what, number in (
            ("image_cache_queries", "Images of requests.", images.queries),
            ("image_cache_hits", "Images of requests that had been encoded before.", images.hits),
            ("prefix_cache_query_tokens", "Prompt tokens.", prefixes.queries),
            ("prefix_cache_hit_tokens", "Prompt tokens whose keys and values were cached.", prefixes.hits),
        ):
            yield CounterMetricFamily(f"nanovlm_{name}", what, value=number)
        for name, what, number in (
            ("image_cache_used_bytes", "Encoded images kept.", images.bytes_used),
            ("prefix_cache_used_bytes", "Keys and values kept of sequences that have ended.", prefixes.bytes_used),
        ):
            yield GaugeMetricFamily(f"nanovlm_{name}", what, value=number)


class Metrics:
    """running and waiting return how many sequences are decoded and wait at the moment; cache_* return bytes."""

    def __init__(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        cache_used: Callable[[], int],
        cache_allocated: Callable[[], int],
        image_cache: ImageCache | None = None,
        prefix_cache: PrefixCache | None = None,
    ):
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "nanovlm_requests",
            "Chat completions by HTTP status; 499 if the client disconnected.",
            ["status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "nanovlm_prompt_tokens", "Prompt tokens, image tokens included.", registry=registry
        )
        self.answer_tokens = Counter("nanovlm_answer_tokens", "Generated tokens.", registry=registry)
        self.first_token = Histogram(
            "nanovlm_first_token_seconds",
            "Time to first token, from a request's arrival.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.answer = Histogram(
            "nanovlm_answer_seconds",
            "Request latency, from its arrival to its last token.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        Gauge("nanovlm_answers_running", "Sequences being decoded.", registry=registry).set_function(running)
        Gauge("nanovlm_answers_waiting", "Sequences that wait.", registry=registry).set_function(waiting)
        Gauge(
            "nanovlm_kv_cache_used_bytes", "Keys and values of the sequences being decoded.", registry=registry
        ).set_function(cache_used)
        Gauge(
            "nanovlm_kv_cache_allocated_bytes", "Memory for keys and values, unused room included.", registry=registry
        ).set_function(cache_allocated)
        registry.register(CacheCollector(image_cache, prefix_cache))

    def text(self) -> bytes:
        return generate_latest(self.registry)
