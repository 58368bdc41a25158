"""Which data to trust: weights of groups and samples, wrong labels, and a model that is not hurt by either."""

from fsla.data._estimators import GroupWeigher, LabelCleaner

__all__ = ["GroupWeigher", "LabelCleaner"]
