"""The weights of ``demand``'s terms, as ``python -m tests.benchmarks.preloading --fit`` finds them
on ten days of requests for 76 models (Alibaba GenTD26, Lin et al., SoCC 2025)."""

from controlplane.placement.demand import Weights

AVERAGES = Weights((-0.05, 0.174, 0.034, 0.073, 1.0))
AVERAGES_AND_FORECAST = Weights((-0.052, 0.183, 0.026, 0.071, 1.0), forecast=0.032)
FITTED = Weights((-0.316, 1.0, 0.167, 0.123, 0.941), 0.013, (0.244, 0.555), 0.044)
