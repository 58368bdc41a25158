"""Problems with known answers."""

from fsla.problems.least_squares import LeastSquares, Synthetic
from fsla.problems.quadratic import Quadratic

__all__ = ["LeastSquares", "Quadratic", "Synthetic"]
