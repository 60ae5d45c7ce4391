"""The few distribution functions that the statistics need, on the standard library alone.

The server computes verdicts and must start in under a second; scipy would double its start-up.
Every function here is held against scipy in tests/engine/evidence/stats/test_inference.py.
"""

import math
from statistics import NormalDist

_NORMAL = NormalDist()


def normal_quantile(p: float) -> float:
    """The x with P(Z <= x) = p for a standard normal Z; p must lie between 0 and 1."""
    return _NORMAL.inv_cdf(p)


def normal_tail(z: float) -> float:
    """P(Z > z) for a standard normal Z."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def log_binomial(successes: int, trials: int, probability: float) -> float:
    """The natural logarithm of the probability of exactly `successes` in independent `trials`.

    `probability` is that of a success in one trial. Returns -inf if the result has probability 0.
    """
    if successes < 0 or successes > trials:
        return -math.inf
    if probability <= 0.0:
        return 0.0 if successes == 0 else -math.inf
    if probability >= 1.0:
        return 0.0 if successes == trials else -math.inf
    failures = trials - successes
    # The logarithm of the binomial coefficient; lgamma(n + 1) is that of n factorial.
    log_ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(failures + 1)
    return log_ways + successes * math.log(probability) + failures * math.log1p(-probability)


def binomial_cdf(successes: int, trials: int, probability: float) -> float:
    """The probability of at most `successes` in independent `trials`, from 0 to 1.

    `probability` is that of a success in one trial.
    """
    if successes < 0:
        return 0.0
    if successes >= trials:
        return 1.0
    total = math.fsum(
        math.exp(log_binomial(count, trials, probability)) for count in range(successes + 1)
    )
    return min(1.0, total)  # a rounding error may lift the sum above 1


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """The probability that at least one of `k` attempts is right, estimated without bias (Chen
    2021) from `attempts` attempts of which `correct` were right.

    Raises ValueError unless 1 <= k <= attempts: a larger k would need another estimator.
    """
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs at least {k} attempts, there are {attempts}")
    if attempts - correct < k:  # any choice of k attempts contains a right one
        return 1.0
    # 1 - C(n - correct, k) / C(n, k). The quotient, the chance that all k are wrong, is a product
    # of factors 1 - k / i; it is taken by logarithms because the counts can be huge.
    factors = range(attempts - correct + 1, attempts + 1)
    log_chance_all_wrong = math.fsum(math.log1p(-k / i) for i in factors)
    return 1.0 - math.exp(log_chance_all_wrong)


def t_cdf(t: float, df: float) -> float:
    """The probability that a value of Student's t distribution is at most `t`, from 0 to 1.

    `df` are the degrees of freedom, above 0; `t` may be infinite.
    """
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    square = t * t
    # Both forms give the same number; each is used for values at which the other loses precision.
    if square < df:
        tail = 0.5 - 0.5 * _incomplete_beta(0.5, df / 2.0, square / (df + square))
    else:
        tail = 0.5 * _incomplete_beta(df / 2.0, 0.5, df / (df + square))
    return 1.0 - tail if t > 0 else tail


def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p for Student's t with `df` degrees of freedom, 0 < p < 1.

    Found by bisection on `t_cdf`, to the precision of a float.
    """
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    low, high = 0.0, 1.0
    # Double the upper bound until the quantile lies between `low` and `high`.
    while t_cdf(high, df) < p:
        low, high = high, high * 2.0
    for _ in range(200):  # an upper bound: some sixty halvings reach neighbouring floats
        middle = 0.5 * (low + high)
        if middle in (low, high):  # no float lies between the two
            break
        if t_cdf(middle, df) < p:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), for a, b > 0.

    Computed by the continued fraction of Abramowitz and Stegun 26.5.8. The fraction converges fast
    only for small x; for a larger x, I_x(a, b) = 1 - I_(1-x)(b, a) is used.
    """
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    factor = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # Below this bound the fraction for I_x(a, b) converges fast.
    if x < (a + 1.0) / (a + b + 2.0):
        return factor * _beta_fraction(a, b, x) / a
    return 1.0 - factor * _beta_fraction(b, a, 1.0 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of I_x(a, b), evaluated by the modified Lentz method.

    The evaluation stops when a round changes the value by less than a factor of 1e-15, or after 499
    rounds.
    """
    # c and d are the method's two running ratios; each round takes two terms of the fraction.
    c = 1.0
    d = 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    change = value  # the factor by which the last term changed the value
    for round_number in range(1, 500):
        for numerator in _beta_numerators(a, b, x, round_number):
            d = 1.0 / _not_zero(1.0 + numerator * d)
            c = _not_zero(1.0 + numerator / c)
            change = c * d
            value *= change
        if abs(change - 1.0) < 1e-15:
            return value
    return value


def _beta_numerators(a: float, b: float, x: float, m: int) -> tuple[float, float]:
    """The two numerators of the continued fraction of I_x(a, b) for round `m` (1, 2, ...): those
    numbered 2 m and 2 m + 1 in formula 26.5.8 of Abramowitz and Stegun.

    `a` and `b` are above 0, `x` is from 0 to 1.
    """
    return (
        m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
        -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
    )


def _not_zero(denominator: float) -> float:
    """The denominator, or a tiny number in place of 0, as the modified Lentz method requires."""
    tiny = 1e-300
    return denominator if abs(denominator) > tiny else tiny
