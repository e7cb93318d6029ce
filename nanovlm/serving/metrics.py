"""What Prometheus reads at /metrics; each server counts by itself."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        where = {"registry": self.registry}
        self.requests = Counter("nanovlm_requests", "Chat completions by HTTP status, 499: left.", ["status"], **where)
        self.prompt_tokens = Counter("nanovlm_prompt_tokens", "Tokens read, pictures included.", **where)
        self.answer_tokens = Counter("nanovlm_answer_tokens", "Tokens said.", **where)
        self.first_token = Histogram(
            "nanovlm_first_token_seconds", "From a request's arrival to its first token.", buckets=SECONDS, **where
        )
        self.answer = Histogram(
            "nanovlm_answer_seconds", "From a request's arrival to its last token.", buckets=SECONDS, **where
        )
        Gauge("nanovlm_answers_running", "Answers being said.", **where).set_function(running)
        Gauge("nanovlm_answers_waiting", "Answers not yet begun.", **where).set_function(waiting)

    def text(self) -> bytes:
        return generate_latest(self.registry)
