"""The held-out predictor against loops over documents and labels."""

import numpy as np
import pytest
from analysis_cases import trace_of

from resinspect.analysis.resampling import percentiles
from resinspect.analysis.shrinkage import carried
from resinspect.analysis.staticness import staticness
from resinspect.analysis.variance import variance_of_routing


def shrinkage(sums, counts):
    """Covariance between folds and noise of a sum, with loops over pairs; ``sums (fold, label)``."""
    folds, size = range(len(sums)), range(counts.shape[1])
    n = counts.sum(0)
    pairs = [(g, h, i) for g in folds for h in folds for i in size if g != h]
    below = sum(counts[g, i] * counts[h, i] / n[i] for g, h, i in pairs if n[i])
    shared = max(sum(sums[g, i] * sums[h, i] / n[i] for g, h, i in pairs if n[i]) / below, 0) if below else 0
    left = sum((sums[g, i] ** 2 - shared * counts[g, i] ** 2) / n[i] for g in folds for i in size if n[i])
    return shared, max(left / max((n > 0).sum(), 1), 0)


def few(seed, documents=5, length=16):
    """Documents with their own static weights, and position effects partly shared."""
    generator = np.random.default_rng(seed)
    samples, place = (
        np.repeat(np.arange(documents), length),
        np.log2(np.tile(np.arange(length), documents) + 1).astype(int),
    )
    weight = generator.standard_normal((documents, 3, 3))[samples] + generator.standard_normal((5, 3, 3))[place]
    weight = weight + 0.5 * generator.standard_normal((documents, 5, 3, 3))[samples, place]
    return trace_of(np.ones((samples.size, 3, 2)), weight, samples=samples), samples, place


def test_the_gain_from_sums_is_the_drop_in_squared_error():
    """A null computed by other arithmetic than the value it is held against; a fold that predicts itself."""
    generator = np.random.default_rng(0)
    folds, size, fold, label = 4, 6, generator.integers(0, 4, 300), generator.integers(0, 6, 300)
    values = generator.standard_normal((300, 1)) + generator.standard_normal((size, 1))[label]
    sums, counts = np.zeros((folds, size, 1)), np.zeros((folds, size))
    np.add.at(sums, (fold, label), values)
    np.add.at(counts, (fold, label), 1)
    effects, gain = carried(sums, counts, np.zeros((folds, 2, size, 1)))
    np.testing.assert_allclose(gain, (values**2).sum(0) - ((values - effects[fold, label]) ** 2).sum(0))
    for k in range(folds):
        rest = np.arange(folds) != k
        shared, noise = shrinkage(sums[rest, :, 0], counts[rest])
        n = counts[rest].sum(0)
        np.testing.assert_allclose(effects[k, :, 0], sums[rest, :, 0].sum(0) * shared / (n * shared + noise))
        changed = sums.copy()
        changed[k] += 100
        np.testing.assert_allclose(carried(changed, counts, np.zeros((folds, 2, size, 1)))[0][k], effects[k])


@pytest.mark.parametrize("seed", range(3))
def test_static_and_position_parts_equal_loops_over_documents(seed):
    """A mean or effect that contains the document it predicts, or another fold's."""
    trace, samples, place = few(seed)
    base = static = position = 0
    for reader, sources in enumerate([1, 2, 3]):
        values = trace["weight"].values[:, reader, :sources]
        means = {d: values[samples != d].mean(0) for d in range(5)}
        centre = np.mean(list(means.values()), axis=0)
        for source in range(sources):
            y = values[:, source]
            cells = [[(samples == d) & (place == b) for b in range(5)] for d in range(5)]
            counts = np.array([[cell.sum() for cell in row] for row in cells])
            sums = np.array([[(y[cell] - centre[source]).sum() for cell in row] for row in cells])
            for d in range(5):
                test, rest = samples == d, np.arange(5) != d
                shared, noise = shrinkage(sums[rest], counts[rest])
                n = counts[rest].sum(0)
                left = sums[rest].sum(0) - n * (means[d][source] - centre[source])
                effect = left * shared / (n * shared + noise)
                base += ((y[test] - means[d].mean()) ** 2).sum()
                static += ((y[test] - means[d][source]) ** 2).sum()
                position += ((y[test] - means[d][source] - effect[place[test]]) ** 2).sum()
    found = variance_of_routing(trace, folds=5, permutations=2).set_index(["reader", "component"]).loc["all", "r2"]
    assert found["static"] == pytest.approx(1 - static / base)
    assert found["position"] == pytest.approx((static - position) / base)
    assert staticness(trace)["staticness"][0] == pytest.approx(1 - static / base)


def test_a_half_is_predicted_from_the_other_half_alone():
    """A document effect measured on the tokens that it was taken from."""
    generator, documents, length = np.random.default_rng(0), 200, 10
    samples, half = np.repeat(np.arange(documents), length), np.tile(np.arange(length) >= 5, documents).astype(int)
    weight = generator.standard_normal((documents, 3, 3))[samples]
    weight = weight + generator.standard_normal((documents, 2, 3, 3))[samples, half]
    trace = trace_of(np.ones((samples.size, 3, 2)), weight, samples=samples)
    found = variance_of_routing(trace, permutations=10).set_index(["reader", "component"]).loc[("all", "document")]
    # Halves correlate by 1/2; the best predictor of one from the other leaves three quarters.
    assert found["r2"] == pytest.approx(0.25, abs=0.06)
    assert found["null_high"] < 0.05


def test_bounds_are_moved_to_the_value_only_if_asked():
    """An interval of a biased statistic that leaves out the statistic."""
    values = np.array([5.0, 1.0, 2.0, 3.0])
    np.testing.assert_allclose(percentiles(values, 2, 0.5), [1.5, 2.5])
    np.testing.assert_allclose(percentiles(values, 2, 0.5, centred=True), [4.5, 5.5])
    assert np.isnan(percentiles(values, 1, 0.5)).all()


def test_bounds_of_a_statistic_that_may_be_infinite():
    """An interval of NaN, from infinity minus infinity, or of a half-life between finite and infinite ones."""
    values = np.array([[5.0, 5.0], [1.0, 1.0], [2.0, np.inf], [3.0, np.inf]])
    np.testing.assert_array_equal(percentiles(values, 2, 0.5)[:, 0], [1.5, 2.5])
    assert np.isin(percentiles(values, 2, 0.5)[:, 1], values[:, 1]).all()
    assert np.isinf(percentiles(values, 2, 0.5)[1, 1])
