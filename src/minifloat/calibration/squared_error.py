"""The expected squared error of quantizing a tensor, computed from its histogram."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minifloat.calibration.stats import ModuleStats
from minifloat.numerics.formats import E4M3, ElementFormat
from minifloat.numerics.histogram import bin_edges, count_magnitudes

Doubles = npt.NDArray[np.float64]


def expected_squared_error(module: ModuleStats, scales: npt.ArrayLike, element: ElementFormat = E4M3) -> Doubles:
    """Return the mean of ``(x - dequantize(quantize(x)))**2`` over the elements of a histogram, for each scale.

    The amax of each sequence is an element of known value; so are the outliers, which decide where to clip. The other
    elements are taken as spread evenly over their bin, and the error is integrated exactly over the bin. (One value per
    bin would be too coarse, because a bin is about as wide as a step of E4M3.)
    """
    histogram = module.require_histogram("the squared error")
    known = module.amax[module.amax > 0]
    others = np.maximum(histogram - count_magnitudes(known), 0)
    used = np.flatnonzero(others[1:]) + 1
    edges = bin_edges()
    lower = edges[used]
    # The largest magnitude may be the lower edge of its bin: keep the bin wider than a point, which has no average.
    upper = np.maximum(np.minimum(edges[used + 1], module.max), lower * (1 + 2.0**-20))
    grid = np.array(element.values[: element.max_code + 1])
    scale = np.asarray(scales, np.float64)[..., None]
    integral = _error_integral(upper / scale, grid) - _error_integral(lower / scale, grid)
    spread = np.maximum(integral * scale / (upper - lower), 0.0) @ others[used]
    exact = known / scale
    points = np.sum((exact - grid[_nearest(exact, grid)]) ** 2, axis=-1)
    errors: Doubles = (spread + points) * scale[..., 0] ** 2 / max(histogram.sum(), 1)
    return errors


def _nearest(x: Doubles, grid: Doubles) -> npt.NDArray[np.int64]:
    """Return the index of the value of `grid` (ascending) nearest to each x; on a tie, of either neighbour."""
    return np.searchsorted((grid[1:] + grid[:-1]) / 2, x, side="right")


def _error_integral(x: Doubles, grid: Doubles) -> Doubles:
    """Return the integral of ``(t - nearest(t))**2`` over t from 0 to x."""
    starts = np.concatenate([[0.0], (grid[1:] + grid[:-1]) / 2])  # from here on, this grid value is the nearest
    pieces = ((starts[1:] - grid[:-1]) ** 3 - (starts[:-1] - grid[:-1]) ** 3) / 3
    before = np.concatenate([[0.0], np.cumsum(pieces)])
    index = _nearest(x, grid)
    full: Doubles = before[index] + ((x - grid[index]) ** 3 - (starts[index] - grid[index]) ** 3) / 3
    return full
