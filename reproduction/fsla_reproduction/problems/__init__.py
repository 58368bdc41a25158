"""Problems: two with known answers, and the sample reweighting of section 6.2."""

from fsla_reproduction.problems.least_squares import LeastSquares, Synthetic
from fsla_reproduction.problems.quadratic import Quadratic
from fsla_reproduction.problems.reweighting import Reweighting

__all__ = ["LeastSquares", "Quadratic", "Reweighting", "Synthetic"]
