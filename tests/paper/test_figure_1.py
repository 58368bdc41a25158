"""Section 6.1: the numbers that an implementation must reproduce, over 20 seeds; over 10 in the default suite."""

import json

import pytest

from fsla_reproduction.folder import Folder
from fsla_reproduction.synthetic import METHODS, SyntheticSpec, run
from fsla_reproduction.synthetic_summary import markdown, summarise

# Median K over 20 seeds from which ‖∇f_K - ∇f‖² / ‖∇f‖² stays under a level, from an independent implementation with
# another start ω_0 and other random numbers.
REFERENCE = {
    "NS": {"1e-06": 61, "1e-08": 131, "1e-10": 200},
    "CG": {"1e-06": 56, "1e-08": 124, "1e-10": 191},
    "FSLA": {"1e-06": 79, "1e-08": 156, "1e-10": 231},
    "FSLA (v at new ω)": {"1e-06": 77, "1e-08": 155, "1e-10": 230},
}


@pytest.fixture(scope="module", params=[10, pytest.param(20, marks=pytest.mark.slow)], ids="{} seeds".format)
def summary(request, tmp_path_factory):
    spec = SyntheticSpec(seeds=request.param, K_max=330, K_timed=20, K_sequence=1000)
    folder = Folder(tmp_path_factory.mktemp("synthetic"), "synthetic", spec)
    records = run(spec, folder, lambda name, done, total: None)
    result = summarise(spec, records)
    assert "| BP and NS coincide | yes |" in markdown(spec, result)
    return json.loads(json.dumps(result))


@pytest.mark.parametrize("method", REFERENCE)
def test_figure_1_terms_to_each_level(summary, method):
    for level, K in REFERENCE[method].items():
        assert summary["K_to_level"][method][level] == pytest.approx(K, rel=0.15)


def test_figure_1_order_at_every_level(summary):
    K = summary["K_to_level"]
    for level in ("1e-01", "1e-02", "1e-04", "1e-06", "1e-08", "1e-10"):
        assert K["CG"][level] <= K["NS"][level] == K["BP"][level] <= K["FSLA"][level]


def test_figure_1_bp_equals_ns(summary):
    assert summary["bp_against_ns"] < 1e-12


def test_figure_1_slopes_follow_sequences(summary):
    for a, slope in summary["slopes"].items():
        assert slope == pytest.approx(-2 * float(a), abs=0.02)


def test_figure_1_divergence_above_two_over_l_is_reported(summary):
    for row in summary["divergence"]:
        assert row["diverged"] == (0 if row["beta"] < row["two_over_L"] else row["seeds"])
        assert (row["median_error"] > 1e20) == (row["beta"] > row["two_over_L"])


def test_figure_1_product_counts(summary):
    """FSLA: K products for every k ≤ K; NS and BP about K²/2."""
    for method in METHODS:
        K = summary["K_to_level"][method]["1e-08"]
        every = summary["hvp_to_level"][method]["every"]["1e-08"]
        if method.startswith("FSLA"):
            assert every == K
        elif method != "CG":
            assert every == pytest.approx(K * (K - 1) / 2, rel=0.03)
