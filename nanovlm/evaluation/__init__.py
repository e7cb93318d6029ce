"""Evaluation on held-out examples: `evaluate` asks their questions, `metrics` scores the answers."""

from nanovlm.evaluation.evaluate import Evaluation, EvaluationOptions, evaluate, in_words, questions_of
from nanovlm.evaluation.metrics import METRICS, load_metric

__all__ = ["METRICS", "Evaluation", "EvaluationOptions", "evaluate", "in_words", "load_metric", "questions_of"]
