"""Which data to trust: weights of groups and samples, wrong labels, and a model that is not hurt by either."""

from fsla.data._estimators import GroupWeigher, LabelCleaner
from fsla.data._streaming import weigh_groups

__all__ = ["GroupWeigher", "LabelCleaner", "weigh_groups"]
