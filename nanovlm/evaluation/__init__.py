"""How well a model answers held-out examples: `evaluate` asks them, `metrics` scores the answers."""

from nanovlm.evaluation.evaluate import Evaluation, EvaluationOptions, evaluate, questions_of
from nanovlm.evaluation.metrics import METRICS, load_metric

__all__ = ["METRICS", "Evaluation", "EvaluationOptions", "evaluate", "load_metric", "questions_of"]
