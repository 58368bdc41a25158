"""Problems: two with known answers, and the sample reweighting of section 6.2."""

from fsla.problems.least_squares import LeastSquares, Synthetic
from fsla.problems.quadratic import Quadratic
from fsla.problems.reweighting import Reweighting

__all__ = ["LeastSquares", "Quadratic", "Reweighting", "Synthetic"]
