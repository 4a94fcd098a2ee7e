"""The fleet's interval and its odd hosts: against published figures, another implementation, and simulated truth."""

import math

import numpy
import pytest
from bench.fleet_statistics import EFFECT, campaigns, covered, measure, named
from build import change, honest_records, protocol
from kvtrial.analysis.effect import hodges_lehmann
from kvtrial.analysis.fleet import combine, discoveries, hartung_knapp, odd_host_power, odd_hosts, paule_mandel, pool
from kvtrial.analysis.verdict import conclude
from msgspec.structs import replace

# The BCG trials of Colditz et al. (1994) as in van Houwelingen et al. (Stat. Med. 21, 2002, 589, table I):
# vaccinated with and without tuberculosis, not vaccinated with and without.
BCG = (
    (4, 119, 11, 128), (6, 300, 29, 274), (3, 228, 11, 209), (62, 13536, 248, 12619), (33, 5036, 47, 5761),
    (180, 1361, 372, 1079), (8, 2537, 10, 619), (505, 87886, 499, 87892), (29, 7470, 45, 7232), (17, 1699, 65, 1600),
    (186, 50448, 141, 27197), (5, 2493, 3, 2338), (27, 16886, 29, 17825),
)  # fmt: skip


def bcg():
    table = numpy.array(BCG, float)
    return numpy.log(table[:, 0] * table[:, 3] / table[:, 1] / table[:, 2]), (1 / table).sum(axis=1)


def test_the_bcg_trials_give_the_published_log_odds_ratios():
    effects, variances = bcg()
    assert effects[:3] == pytest.approx([-0.9387, -1.6662, -1.3863], abs=5e-5)
    assert variances[:3] == pytest.approx([0.3571, 0.2081, 0.4334], abs=5e-5)


def test_paule_mandel_with_hartung_knapp_is_that_of_statsmodels():
    # combine_effects(effects, variances, method_re="iterated", atol=1e-12) of statsmodels 0.15.0
    found = hartung_knapp(*bcg())
    assert float(found.tau2) == pytest.approx(0.3412051021778679, rel=1e-9)
    assert float(found.mean) == pytest.approx(-0.7454603905316224, rel=1e-9)
    assert float(found.error) == pytest.approx(0.1867903364712766, rel=1e-9)
    assert float(found.freedom) == 12


def test_one_variance_for_all_hosts_needs_no_search():
    effects = numpy.array([[0.1, 0.5, -0.3, 0.9], [0.1, 0.1, 0.1, 0.1]])
    same = numpy.full((2, 4), 0.01)
    nearly = same * (1 + 1e-6 * numpy.arange(4))
    assert paule_mandel(effects, same) == pytest.approx(paule_mandel(effects, nearly), rel=1e-3)


def test_an_absent_host_counts_for_nothing():
    for second in (0.02, 0.2):
        effects, variances = numpy.array([0.1, 0.5, -0.3, 99.0]), numpy.array([0.01, second, 0.01, numpy.inf])
        found, three = pool(effects, variances), pool(effects[:3], variances[:3])
        assert (float(found.mean), float(found.error)) == pytest.approx((float(three.mean), float(three.error)))


def test_hosts_of_unlike_precision_weigh_the_same():
    effects, variances = numpy.array([0.1, 0.5, -0.3]), numpy.array([0.01, 0.2, 0.01])
    found = pool(effects, variances)
    assert float(found.mean) == pytest.approx(0.1)
    assert float(found.error) == pytest.approx(float(effects.std(ddof=1)) / math.sqrt(3))
    assert float(found.tau2) == pytest.approx(float(paule_mandel(effects, variances)))


def test_hosts_that_agree_to_the_last_digit_have_an_interval_as_wide_as_their_noise_asks():
    found = combine([hodges_lehmann([-0.1, 0.0, 0.1] * 2)] * 6).interval
    assert found.estimate == 0.0 and found.high > 0.003 and found.low < -0.003


def test_hosts_of_one_class_share_the_noise_of_a_pair():
    quiet, noisy = hodges_lehmann([0.1, 0.1001] * 3), hodges_lehmann([-0.4, 0.6] * 3)
    pooled = combine([quiet, noisy, quiet], ["a", "a", "a"])
    alone = combine([quiet, noisy, quiet], ["a", "b", "a"])
    assert alone.i2 == 0.0 and abs(pooled.interval.estimate - 0.1) < 1e-3
    assert pooled.tau2 == alone.tau2 == 0.0


@pytest.mark.parametrize("hosts", [3, 10])
def test_simulated_fleets_are_covered_and_nobody_is_odd_by_mistake(hosts):
    rows = measure(400, (hosts,), seed=1)
    covers = [row for row in rows if row["metric"].startswith("coverage")]
    classes = [row["value"] for row in covers if "two classes" in row["subject"]]
    coverage = [row["value"] for row in covers if "two classes" not in row["subject"]]
    # Of three hosts none can be missing, so no row says that one was.
    absent = 1 if hosts == 3 else 0
    assert [row["subject"] for row in covers].count(f"{hosts} hosts, missing hosts") == 1 - absent
    # 400 campaigns: the standard error at 95 % is 1.1 points.
    assert len(coverage) == 9 - absent and min(coverage) > 0.95 - 3.5 * 0.011 and max(coverage) < 0.95 + 3.5 * 0.011
    assert len(classes) == 3 and min(classes) > 0.95 - 3.5 * 0.011
    # What is mended there: weighted by precision they cover too seldom.
    assert min(row["value"] for row in rows if row["metric"] == "the same with hosts weighted") < 0.93
    odd = [row["value"] for row in rows if row["metric"].endswith("called odd") and "within" in row]
    assert len(odd) == 11 - absent and max(odd) < 0.05 + 3.5 * 0.011
    # Taken with k − 2 degrees of freedom whatever the weights, one in ten of these fleets had an odd host.
    assert hosts < 10 or max(r["value"] for r in rows if "1 : 5" in r["subject"] and "odd" in r["metric"]) < 0.05


def test_the_simulation_sees_a_method_that_does_not_cover():
    """A fixed-effect interval ignores that hosts differ; the factor kept above 1 covers too often where they don't."""
    estimates, variances, _ = campaigns(numpy.random.default_rng(1), 400, 10)
    weights = 1 / variances
    mean = (weights * estimates).sum(axis=1) / weights.sum(axis=1)
    inside = numpy.abs(mean - EFFECT) <= 1.96 / numpy.sqrt(weights.sum(axis=1))
    assert inside.mean() < 0.8
    alike, noise, _ = campaigns(numpy.random.default_rng(1), 400, 3, spread=0.0)
    assert covered(alike, noise, floor=True) > 0.99 > covered(alike, noise)


def test_the_simulation_sees_hosts_called_odd_by_mistake():
    """Held against measurement noise alone, every fleet whose hosts differ would have an odd one."""
    from scipy import special

    estimates, variances, unpooled = campaigns(numpy.random.default_rng(2), 400, 10)
    error = numpy.sqrt(variances * (1 + 1 / 9))
    others = (estimates.sum(axis=1, keepdims=True) - estimates) / 9
    naive = discoveries(2 * special.ndtr(-numpy.abs(estimates - others) / error))
    assert naive.any(axis=1).mean() > 0.5 > 0.1 > named(estimates, variances, unpooled).any(axis=1).mean()


def test_one_host_of_a_hundred_is_found_as_often_as_the_power_says():
    found = named(*campaigns(numpy.random.default_rng(3), 300, 100, odd_shift=math.log(1.2)))
    said = odd_host_power(math.log(1.2), 0.03 * math.sqrt(2), 8, 100, 0.04**2)
    assert found[:, 0].mean() == pytest.approx(said, abs=0.1)
    assert odd_host_power(math.log(1.2), 0.5, 8, 100) < 0.05 < 0.99 < odd_host_power(math.log(1.2), 0.01, 8, 100)


def test_benjamini_and_hochbergs_own_example():
    # J. R. Stat. Soc. B 57, 1995, 289: fifteen p-values, of which the procedure at 5 % rejects four.
    p_values = numpy.array([0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262,
                            0.5719, 0.6528, 0.7590, 1.0000])  # fmt: skip
    assert list(discoveries(p_values)).count(True) == 4


# ------------------------------------------------------------------------------------------------ in the verdict


def fleet(*scales):
    return {f"g{n:02}": honest_records(6, "standin", f"g{n:02}", 0, scale) for n, scale in enumerate(scales, 1)}


def with_driver(records, driver):
    return change(records, lambda r: replace(r, conditions=replace(r.conditions, driver_version=driver)))


def test_the_odd_host_is_named_with_what_sets_it_apart():
    records = {h: with_driver(r, "580.126") for h, r in fleet(1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 3.0).items()}
    records["g07"] = with_driver(records["g07"], "570.86")
    found = conclude(protocol(), records, "c1")
    odd = {host.host: host.odd for host in found.hosts if host.odd}
    assert list(odd) == ["g07"]
    assert odd["g07"].likely_causes[0] == "driver 570.86, 580.126 on 6 of 6 other hosts"
    assert any(c.startswith("g07 is the odd host") and "likely cause: driver 570.86" in c for c in found.caveats)


def test_a_fleet_whose_hosts_differ_is_told_as_such():
    """A night measures them on purpose (kvtrial_night_may_differ), and the verdict is over all."""
    records = {h: with_driver(r, "580.126") for h, r in fleet(*(1.0 for _ in range(8))).items()}
    assert not any("hosts differ" in caveat for caveat in conclude(protocol(), records, "c1").caveats)
    for host, driver in (("g07", "580.159"), ("g03", "570.86"), ("g05", "570.86")):
        records[host] = with_driver(records[host], driver)
    differ = next(c for c in conclude(protocol(), records, "c1").caveats if "hosts differ" in c)
    assert differ == (
        "hosts differ in driver: 580.126 (5), 570.86 (2: g03, g05), 580.159 (1: g07); "
        "the verdict is over hosts that are not alike"
    )


def test_an_odd_host_that_nothing_sets_apart_is_said_so():
    found = conclude(protocol(), fleet(1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 3.0), "c1")
    assert any("nothing that is recorded sets it apart" in caveat for caveat in found.caveats)


def test_the_power_to_find_one_host_of_a_hundred_is_printed():
    found = conclude(protocol(), fleet(1.0, 1.02, 0.98), "c1")
    assert any("one host that is 20% off among 100 such hosts" in caveat for caveat in found.caveats)
    assert not any("among 100" in caveat for caveat in conclude(protocol(), fleet(1.0, 1.0), "c1").caveats)


def test_no_odd_host_of_three():
    hosts = {f"h{n}": hodges_lehmann([base + 0.001 * k for k in range(6)]) for n, base in enumerate((0.0, 0.01, 0.1))}
    assert odd_hosts(hosts, {}) == []
