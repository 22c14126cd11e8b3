"""The weights of ``demand``'s terms, as ``python -m tests.benchmarks.preloading --fit`` finds them
on ten days of requests for 76 models (Alibaba GenTD26, Lin et al., SoCC 2025)."""

from controlplane.placement.demand import Weights

AVERAGES = Weights((-0.74, 2.73, 0.53, 1.02, 0.98))
AVERAGES_AND_FORECAST = Weights((-0.74, 2.73, 0.53, 1.02, 0.98))
FITTED = Weights((-0.74, 2.73, 0.53, 1.02, 0.98))
